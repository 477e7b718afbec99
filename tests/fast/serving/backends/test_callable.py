"""Functions over numpy arrays: what they may return, and where their names, types and shapes come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.errors import SettingsError
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends.backend import TensorSpec
from edl_serving.backends.callable import CallableBackend
from tests.fast.serving.backends.models import HERE
from tests.fast.serving.fakes import FakeBackend

X = np.ones((3, 4), np.float32)


def test_outputs_are_found_by_asking() -> None:
    def model(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {"sum": inputs["x"].sum(1), "same": inputs["x"].tolist(), "words": np.array([b"a"] * len(inputs["x"]))}

    backend = CallableBackend(model, ["x:float32[?]"])
    assert backend.outputs == (
        TensorSpec("sum", "FP32"),
        TensorSpec("same", "FP64", (-1,)),
        TensorSpec("words", "BYTES"),
    )
    answer = backend.predict({"x": X})
    assert answer["same"].dtype == np.float64
    np.testing.assert_array_equal(answer["sum"], [4, 4, 4])


def test_a_bare_array_is_the_only_output() -> None:
    assert CallableBackend(lambda inputs: inputs["x"] * 2, ["x:float32[4]"]).outputs[0].name == "output"
    named = CallableBackend(lambda inputs: inputs["x"] * 2, ["x:float32[4]"], ["y"])
    np.testing.assert_array_equal(named.predict({"x": X})["y"], 2 * X)
    with pytest.raises(SettingsError, match="the model answers 'output'; wanted are 'y', 'z'"):
        CallableBackend(lambda inputs: inputs["x"], ["x:float32[4]"], ["y", "z"])


def test_names_are_never_guessed() -> None:
    with pytest.raises(SettingsError, match="the model answers 'a', 'b'; wanted are 'logits'"):
        CallableBackend(lambda inputs: {"a": inputs["x"], "b": inputs["x"]}, ["x:float32[4]"], ["logits"])
    wrong = CallableBackend(lambda inputs: {"a": inputs["x"]}, ["x:float32[4]"], ["logits:float32[4]"])
    with pytest.raises(ValueError, match="the model answers 'a'; wanted are 'logits'"):
        wrong.predict({"x": X})


def test_types_become_those_promised() -> None:
    backend = CallableBackend(lambda inputs: inputs["x"].astype(np.float64), ["x:float32[4]"], ["y:float16[4]"])
    assert backend.predict({"x": X})["y"].dtype == np.float16
    backend = CallableBackend(lambda inputs: inputs["x"], ["x:float32[4]"], ["y:int64[4]"])
    with pytest.raises(TypeError, match="'y' is float32, which does not become INT64"):
        backend.predict({"x": X})


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
