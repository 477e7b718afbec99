"""Models that change their inputs in place, which are read-only memory of others."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader
from edl_serving import Array
from edl_serving.backends import ModelSource, open_backends
from edl_serving.backends.callable import CallableBackend
from tests.fast.serving.conftest import StartInside

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


def backend_of(function: Any, sample: Mapping[str, Array] | None = None) -> CallableBackend:
    inputs = () if sample else ("x:float32[2]", "n:int64[2]", "s:bytes[1]")
    return CallableBackend(function, inputs, ["y:float32[2]"], sample=sample)


def clamp(inputs: Mapping[str, Array]) -> Array:
    values = (ctypes.c_float * 2).from_address(inputs["x"].ctypes.data)
    values[:] = [max(0.0, min(1.0, value)) for value in values]
    return np.zeros((len(inputs["x"]), 2), np.float32)


def set_string(inputs: Mapping[str, Array]) -> Array:
    inputs["s"][0, 0] = b"other"
    return np.zeros((len(inputs["x"]), 2), np.float32)


def no_writes(inputs: Mapping[str, Array]) -> Array:
    return np.array(inputs["x"]) * 2


@pytest.mark.parametrize(("function", "expected"), [(clamp, True), (set_string, True), (no_writes, False)])
def test_writes_are_found_out(function: Any, expected: bool, caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_of(function)
    with caplog.at_level(logging.WARNING):
        backend.warm_up(4)
    assert backend.writes_inputs is expected
    assert len(caplog.records) == expected


def test_a_model_may_take_only_zeros() -> None:
    def predict(inputs: Mapping[str, Array]) -> Array:
        if inputs["x"].any():
            raise ValueError("only zeros")
        return np.zeros((len(inputs["x"]), 2), np.float32)

    backend_of(predict).warm_up(4)
