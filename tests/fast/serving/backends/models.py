"""The same small model in every form that a teacher can serve: `logits = x @ weight + bias`.

`conftest.saved` makes each form once.
"""

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
from tests.waiting import DEADLINE_S

IN, OUT = 4, 3
OTHER_SEED = 7


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


def as_factory(folder: Path, seed: int) -> ModelSource:
    return ModelSource("factory", f"{HERE}build", options={"seed": seed}, inputs=X)


def as_callable(folder: Path, seed: int) -> ModelSource:
    """Of another seed another function: `predict` has no weights to change."""
    return as_factory(folder, seed) if seed else ModelSource("callable", f"{HERE}predict", inputs=X)


def factory(checkpoint: Path) -> ModelSource:
    return ModelSource(
        "torch-factory", f"{HERE}module", checkpoint=str(checkpoint), inputs=X, outputs=LOGITS, device="cpu"
    )


def as_checkpoint(folder: Path, seed: int) -> ModelSource:
    torch.save({"state_dict": trained(seed).state_dict(), "epoch": 3}, folder / f"checkpoint-{seed}.pt")
    return factory(folder / f"checkpoint-{seed}.pt")


def as_safetensors(folder: Path, seed: int) -> ModelSource:
    from safetensors.torch import save_file

    save_file(dict(trained(seed).state_dict()), folder / f"model-{seed}.safetensors")
    return factory(folder / f"model-{seed}.safetensors")


def as_torchscript(folder: Path, seed: int) -> ModelSource:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # saving is; files are there to be served all the same
        scripted: Any = torch.jit.script(trained(seed))
        scripted.save(str(folder / f"model-{seed}.ts"))
    return ModelSource("torchscript", str(folder / f"model-{seed}.ts"), inputs=X, outputs=LOGITS, device="cpu")


def exported(folder: Path, seed: int, rows: Any, count: int) -> ModelSource:
    program = torch.export.export(
        trained(seed), (torch.zeros(count, IN),), dynamic_shapes={"x": {0: rows}} if rows is not None else None
    )
    path = folder / f"model-{seed}-{rows}.pt2"
    torch.export.save(program, path)
    return ModelSource("torch-export", str(path), outputs=LOGITS, device="cpu")


_PADDLE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import paddle
for path, rows, weight, bias in json.loads(sys.argv[1]):
    layer = paddle.nn.Linear(len(weight), len(bias))
    layer.weight.set_value(paddle.to_tensor(weight, "float32"))
    layer.bias.set_value(paddle.to_tensor(bias, "float32"))
    layer.eval()
    spec = paddle.static.InputSpec([rows, len(weight)], "float32", name="x")
    paddle.jit.save(layer, path, input_spec=[spec])
"""


def as_paddle(folder: Path, seed: int, rows: int | None = None, pir: bool = True) -> ModelSource:
    """Saved by a process of its own, all of a format at once: the format is chosen when Paddle is imported."""
    place = folder / ("pir" if pir else "old")
    if not place.exists():
        place.mkdir()
        models = []
        for each in (0, OTHER_SEED):
            weight, bias = weights(each)
            models += [(str(place / f"{each}-{count}"), count, weight.tolist(), bias.tolist()) for count in (None, 3)]
        environ = {**os.environ, "FLAGS_enable_pir_api": "1" if pir else "0"}
        command = [sys.executable, "-c", _PADDLE, json.dumps(models)]
        subprocess.run(command, check=True, env=environ, capture_output=True, timeout=DEADLINE_S)
    path = place / f"{seed}-{rows}"
    assert path.with_suffix(".json" if pir else ".pdmodel").exists()
    return ModelSource("paddle", str(path), outputs=LOGITS, device="cpu")


FORMS: dict[str, Callable[[Path, int], ModelSource]] = {
    "callable": as_callable,
    "factory": as_factory,
    "checkpoint": as_checkpoint,
    "safetensors": as_safetensors,
    "torchscript": as_torchscript,
    "export": lambda folder, seed: exported(folder, seed, torch.export.Dim("batch"), 2),
    "export_of_two_to_five_rows": lambda folder, seed: exported(folder, seed, torch.export.Dim("b", min=2, max=5), 3),
    "export_of_three_rows": lambda folder, seed: exported(folder, seed, None, 3),
    "paddle": as_paddle,
    "old_paddle": lambda folder, seed: as_paddle(folder, seed, pir=False),
    "paddle_of_three_rows": lambda folder, seed: as_paddle(folder, seed, rows=3),
}
