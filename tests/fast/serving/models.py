"""Models that the tests of the teacher server serve."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edl.testing.models import Model
from edl_serving import Array, Backend, TensorSpec
from tests.waiting import DEADLINE_S, wait_until


class Base(Backend):
    """Sums rows: `x` FP32 [4] to `logits` FP32 [5], the row's sum plus 0 to 4."""

    inputs = (TensorSpec("x", "FP32", (4,)),)  # type: ignore[assignment]
    outputs = (TensorSpec("logits", "FP32", (5,)),)  # type: ignore[assignment]

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"logits": logits(inputs["x"])}


def logits(x: Array) -> Array:
    """What `Base` answers."""
    answer: Array = x.sum(-1, keepdims=True) + np.arange(5, dtype=np.float32)
    return answer


class Mixed(Base):
    """Two inputs of any width and several types, and an output of each kind."""

    inputs = (TensorSpec("x", "FP32", (-1,)), TensorSpec("words", "BYTES", (2,)))  # type: ignore[assignment]
    outputs = (  # type: ignore[assignment]
        TensorSpec("logits", "FP32", (5,)),
        TensorSpec("width", "INT64", ()),
        TensorSpec("joined", "BYTES", ()),
    )

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        x, words = inputs["x"], inputs["words"]
        return {
            "logits": logits(x),
            "width": np.full(len(x), x.shape[1]),
            "joined": np.array([b" ".join(pair) for pair in words], object),
        }


class Moody(Base):
    """Does what the first element of a row says: 1 raises, 2 answers NaN, else sums."""

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        x = inputs["x"]
        answer = logits(x)
        if (x[:, 0] == 1).any():
            raise ValueError("in a bad mood")
        answer[x[:, 0] == 2] = np.nan
        return {"logits": answer}


def gated_echo(gate: str) -> Model:
    """`x` FP32 [rows, 4] to `y`, the same, once the file `gate` is there; for `edl serve --factory`."""

    def answer(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        wait_until(Path(gate).exists, gate)
        return {"y": inputs["x"]}

    return Model(answer, ["x:float32[4]"], ["y:float32[4]"], delay_s=0.001)  # computed in a thread, since it takes time


class Gated(Base):
    """Waits for `gate` before each answer, and remembers what it was asked; for servers in the test's own process."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.batches: list[Array] = []
        self.started = threading.Event()

    def warm_up(self, max_rows: int) -> None:
        pass

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.batches.append(inputs["x"].copy())
        self.started.set()
        if not self.gate.wait(DEADLINE_S):
            raise TimeoutError("the gate stayed shut")
        return super().predict(inputs)
