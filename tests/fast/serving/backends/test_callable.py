"""Functions over numpy arrays: what they may return, and where their names, types and shapes come from."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader
from edl.errors import SettingsError
from edl_serving import Array
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends.backend import TensorSpec
from edl_serving.backends.callable import CallableBackend
from tests.fast.serving.backends.models import HERE
from tests.fast.serving.conftest import StartInside
from tests.fast.serving.fakes import FakeBackend

X = np.ones((3, 4), np.float32)


def test_rows_must_be_answered_with_rows() -> None:
    with pytest.raises(SettingsError, match=r"answers 2 rows with 'y' of shape \[\]"):
        CallableBackend(lambda inputs: {"y": np.float32(1)}, ["x:float32[4]"])
    with pytest.raises(SettingsError, match=r"answers 2 rows with 'y' of shape \[1, 4\]"):
        CallableBackend(lambda inputs: {"y": inputs["x"][:1]}, ["x:float32[4]"])
    with pytest.raises(TypeError, match="returned NoneType, not a dictionary of arrays"):
        CallableBackend(lambda inputs: None, ["x:float32[4]"])
    with pytest.raises(SettingsError, match="a model must be callable"):
        CallableBackend({"y": 1}, ["x:float32[4]"])  # type: ignore[arg-type]


def test_attributes_describe_a_callable() -> None:
    class Model:
        inputs = ["x:float32[4]"]
        outputs = ["y:float32[4]"]
        version = 7
        inline = True
        warmed, closed = 0, False

        def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"y": inputs["x"]}

        def warm_up(self, max_rows: int) -> None:
            self.warmed = max_rows

        def close(self) -> None:
            self.closed = True

    model = Model()
    backend = CallableBackend(model)
    assert (backend.version, backend.inline) == ("7", True)
    backend.warm_up(9)
    backend.close()
    assert (model.warmed, model.closed) == (9, True)
    assert CallableBackend(model, ["x:float16[2]"], ["y:float16[2]"]).inputs[0].datatype == "FP16"


def test_sample_gives_inputs_and_outputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "batch.npz", x=np.ones((5, 4), np.float32))
    source = ModelSource("callable", f"{HERE}predict", sample=str(tmp_path / "batch.npz"))
    (backend,) = open_backends(source)
    assert backend.inputs == (TensorSpec("x", "FP32", (4,)),)
    assert backend.outputs == (TensorSpec("logits", "FP32", (3,)),)


def test_samples_that_are_no_batches(tmp_path: Path) -> None:
    path = tmp_path / "batch.npz"
    source = ModelSource("callable", f"{HERE}predict", sample=str(path))
    with pytest.raises(SettingsError, match=r"--sample: there is no file .*batch\.npz"):
        open_backends(source)
    np.savez(path, x=np.ones((5, 4)), y=np.ones(3))
    with pytest.raises(SettingsError, match="every array needs the same number of rows"):
        open_backends(source)
    np.savez(path, x=np.array([{"a": 1}], object))  # would need unpickling
    with pytest.raises(SettingsError, match=r"not an \.npz file of plain arrays"):
        open_backends(source)
    path.write_bytes(b"PK garbage")
    with pytest.raises(SettingsError, match=r"not an \.npz file"):
        open_backends(source)


class Own(FakeBackend):
    """A backend of the user's."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.rows = rows


def test_factory_returns_a_backend() -> None:
    (backend,) = open_backends(ModelSource("factory", f"{__name__}:Own", options={"rows": 3}))
    assert isinstance(backend, Own)
    assert backend.rows == 3
    with pytest.raises(SettingsError, match="--input means nothing to a factory that returns a Backend"):
        open_backends(ModelSource("factory", f"{__name__}:Own", inputs=("x:float32",)))


TORCH = """
import torch
def predict(inputs):
    x = torch.from_numpy(inputs["x"]).sub_(0.5).div_(0.25)
    return {"y": x.sum(1, keepdim=True).numpy()}
"""

NUMPY = """
def predict(inputs):
    x = inputs["x"]
    x -= 0.5
    x /= 0.25
    return {"y": x.sum(1, keepdims=True)}
"""

OWN_WARM_UP = NUMPY + "predict.warm_up = lambda max_rows: None\n"


@pytest.mark.parametrize(
    ("code", "shared"), [(TORCH, True), (NUMPY, False), (OWN_WARM_UP, True)], ids=["torch", "numpy", "own warm_up"]
)
def test_a_model_may_write_to_inputs(
    inside: StartInside, code: str, shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "writing.py").write_text(code + "def make():\n    return predict\n")
    described: dict[str, Any] = {"inputs": ("x:float32[1000]",), "outputs": ("y:float32[1]",), "version": "1"}
    backends = open_backends(ModelSource("factory", f"{tmp_path}/writing.py:make", **described))
    server = inside(list(backends), shared_memory=shared)
    reader = DistillReader(ins=["x"], predicts=["y"], teachers=[server.target])
    reader.set_batch_generator(lambda: ((np.full((32, 1000), number, np.float32),) for number in range(3)))
    with reader:
        answers = [(x[0, 0], y[:, 0].tolist()) for x, y in reader()]
    assert answers == [(number, [(number - 0.5) * 4000] * 32) for number in range(3)]
    assert caplog.text.count("the model writes to its inputs") == 1, caplog.text


def clamp(inputs: Mapping[str, Array]) -> Array:
    """Native code, which does not ask whether it may, and changes no zero."""
    values = (ctypes.c_float * 2).from_address(inputs["x"].ctypes.data)
    values[:] = [max(0.0, min(1.0, value)) for value in values]
    return inputs["x"] * 2


def test_writes_are_found_out() -> None:
    for function, writes in ((clamp, True), (lambda inputs: inputs["x"] * 2, False)):
        backend = CallableBackend(function, ("x:float32[2]", "n:int64[2]", "s:bytes[1]"), ["y:float32[2]"])
        backend.warm_up(4)
        assert backend.writes_inputs is writes
