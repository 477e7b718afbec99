"""The same small model in every form that a teacher can serve: `logits = x @ weight + bias`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edl_serving.backends import ModelSource

IN, OUT = 4, 3


def weights(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(IN, OUT)).astype(np.float32), random.normal(size=OUT).astype(np.float32)


def expected(x: np.ndarray, seed: int = 0) -> np.ndarray:
    weight, bias = weights(seed)
    return x @ weight + bias


# What `--callable` and `--factory` name.


def predict(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"logits": expected(inputs["x"])}


def build(seed: int = 0) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda inputs: {"logits": expected(inputs["x"], seed)}


# What `--torch-factory` names.


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)
        self.dropout = nn.Dropout(0.5)  # shows whether the model is in evaluation mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.layer(x))


def module(seed: int = 0) -> nn.Module:
    """Untrained; `trained` has the weights."""
    return Linear()


def trained(seed: int = 0) -> nn.Module:
    model = Linear()
    weight, bias = weights(seed)
    with torch.no_grad():
        model.layer.weight.copy_(torch.from_numpy(weight.T))
        model.layer.bias.copy_(torch.from_numpy(bias))
    return model.eval()


# Each writes the model into a folder and says how to serve it.

X, LOGITS = ("x:float32[4]",), ("logits",)
HERE = f"{__name__}:"


def as_callable(folder: Path, seed: int) -> ModelSource:
    if seed:  # another function: `predict` has no weights to change
        return ModelSource("factory", f"{HERE}build", options={"seed": seed}, inputs=X)
    return ModelSource("callable", f"{HERE}predict", inputs=X)


def as_factory(folder: Path, seed: int) -> ModelSource:
    return ModelSource("factory", f"{HERE}build", options={"seed": seed}, inputs=X)


def as_checkpoint(folder: Path, seed: int) -> ModelSource:
    torch.save({"state_dict": trained(seed).state_dict(), "epoch": 3}, folder / "model.pt")
    return ModelSource(
        "torch-factory", f"{HERE}module", checkpoint=str(folder / "model.pt"), inputs=X, outputs=LOGITS, device="cpu"
    )


def as_safetensors(folder: Path, seed: int) -> ModelSource:
    from safetensors.torch import save_file

    save_file(dict(trained(seed).state_dict()), folder / "model.safetensors")
    return ModelSource(
        "torch-factory",
        f"{HERE}module",
        checkpoint=str(folder / "model.safetensors"),
        inputs=X,
        outputs=LOGITS,
        device="cpu",
    )


def as_torchscript(folder: Path, seed: int) -> ModelSource:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # saving is; files are there to be served all the same
        scripted: Any = torch.jit.script(trained(seed))
        scripted.save(str(folder / "model.ts"))
    return ModelSource("torchscript", str(folder / "model.ts"), inputs=X, outputs=LOGITS, device="cpu")


def exported(folder: Path, seed: int, rows: Any, count: int) -> ModelSource:
    program = torch.export.export(
        trained(seed), (torch.zeros(count, IN),), dynamic_shapes={"x": {0: rows}} if rows is not None else None
    )
    torch.export.save(program, folder / "model.pt2")
    return ModelSource("torch-export", str(folder / "model.pt2"), outputs=LOGITS, device="cpu")


def as_export(folder: Path, seed: int) -> ModelSource:
    return exported(folder, seed, torch.export.Dim("batch"), 2)


def as_export_of_two_to_five_rows(folder: Path, seed: int) -> ModelSource:
    return exported(folder, seed, torch.export.Dim("batch", min=2, max=5), 3)


def as_export_of_three_rows(folder: Path, seed: int) -> ModelSource:
    return exported(folder, seed, None, 3)


_PADDLE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import paddle
path, rows, weight, bias = json.loads(sys.argv[1])
layer = paddle.nn.Linear(len(weight), len(bias))
layer.weight.set_value(paddle.to_tensor(weight, "float32"))
layer.bias.set_value(paddle.to_tensor(bias, "float32"))
layer.eval()
spec = paddle.static.InputSpec([rows, len(weight)], "float32", name="x")
paddle.jit.save(layer, path, input_spec=[spec])
"""


def _paddle(folder: Path, seed: int, rows: int | None = None, pir: bool = True) -> ModelSource:
    """Saved by a process of its own: the program's format is chosen when Paddle is imported."""
    weight, bias = weights(seed)
    argument = json.dumps([str(folder / "model"), rows, weight.tolist(), bias.tolist()])
    environ = {**os.environ, "FLAGS_enable_pir_api": "1" if pir else "0"}
    subprocess.run([sys.executable, "-c", _PADDLE, argument], check=True, env=environ, capture_output=True, timeout=60)
    assert (folder / ("model.json" if pir else "model.pdmodel")).exists()
    return ModelSource("paddle", str(folder / "model"), outputs=LOGITS, device="cpu")


def as_paddle(folder: Path, seed: int) -> ModelSource:
    return _paddle(folder, seed)


def as_old_paddle(folder: Path, seed: int) -> ModelSource:
    return _paddle(folder, seed, pir=False)


def as_paddle_of_three_rows(folder: Path, seed: int) -> ModelSource:
    return _paddle(folder, seed, rows=3)


FORMS = {
    form.__name__.removeprefix("as_"): form
    for form in (
        as_callable,
        as_factory,
        as_checkpoint,
        as_safetensors,
        as_torchscript,
        as_export,
        as_export_of_two_to_five_rows,
        as_export_of_three_rows,
        as_paddle,
        as_old_paddle,
        as_paddle_of_three_rows,
    )
}
