"""Models and requests for the tests of the teacher server's parts, without a server."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.protocol import codec, kserve
from edl.testing.models import Model
from edl_serving import Array, Backend, ServerSettings, TensorSpec
from edl_serving.batching.batch_queue import InferenceJob
from edl_serving.batching.executor import Executor
from edl_serving.model import ServedModel
from edl_serving.monitoring import WorkerMetrics
from edl_serving.request import DecodedRequest
from edl_serving.request_error import RequestError
from edl_serving.request_plan import plan_request
from tests.fast.serving.conftest import request_bytes
from tests.waiting import DEADLINE_S, wait_until

Predict = Callable[[Mapping[str, Array]], Any]
X = TensorSpec("x", "FP32", (4,))
LOGITS = TensorSpec("logits", "FP32", (5,))


def logits(x: Array) -> Array:
    """Row sums plus 0 to 4."""
    answer: Array = x.sum(-1, keepdims=True) + np.arange(5, dtype=np.float32)
    return answer


def five_logits(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"logits": logits(inputs["x"])}


class FakeBackend(Backend):
    """Calls a function, and remembers the rows of each call."""

    def __init__(
        self,
        predict: Predict = five_logits,
        inputs: tuple[TensorSpec, ...] = (X,),
        outputs: tuple[TensorSpec, ...] = (LOGITS,),
    ) -> None:
        self._predict = predict
        self._inputs = inputs
        self._outputs = outputs
        self.calls: list[int] = []

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._outputs

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.calls.append(len(next(iter(inputs.values()))))
        result: Mapping[str, Array] = self._predict(inputs)
        return result


def model_of(backend: FakeBackend, **settings: Any) -> ServedModel:
    return ServedModel(ServerSettings(model="m", **settings), [backend])


def header_for(shape: tuple[int, ...] = (2, 4), **fields: Any) -> kserve.ModelInferRequest:
    """A header that asks for everything the default fake offers."""
    header = kserve.ModelInferRequest(model_name="m", **fields)
    header.inputs.add(name="x", datatype="FP32", shape=shape)
    return header


class Bench:
    """A model behind an executor, without a queue."""

    def __init__(self, backend: Any, **settings: Any) -> None:
        self.backend = backend
        used = ServerSettings("m", **settings)
        self.model = ServedModel(used, [backend])
        self.metrics = WorkerMetrics()
        self.executor = Executor(backend, self.model, used, self.metrics)

    def job(self, inputs: Mapping[str, Array], deadline: float = math.inf, **parameters: Any) -> InferenceJob:
        header, _ = codec.REQUEST.split(request_bytes(inputs, **parameters))
        plan = plan_request(codec.REQUEST.parse(header), self.model, 1000)
        job = InferenceJob.of(DecodedRequest(plan, tuple(inputs.values()), {}), None, "c", 0, "")
        job.deadline = deadline
        return job

    def run(self, *jobs: InferenceJob) -> list[Any]:
        """The responses' bytes, or errors."""
        self.executor.run_jobs(jobs)
        return [job.answer for job in jobs]


def refusal_of(call: Callable[[], object]) -> str:
    """The message that `call` is refused with."""
    with pytest.raises(RequestError) as refused:
        call()
    assert refused.value.code.name in ("INVALID_ARGUMENT", "NOT_FOUND")
    return refused.value.message


class Base(Backend):
    """Sums rows: `x` FP32 [4] to `logits` FP32 [5], the row's sum plus 0 to 4."""

    inputs = (X,)  # type: ignore[assignment]
    outputs = (LOGITS,)  # type: ignore[assignment]

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return five_logits(inputs)


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

    return Model(answer, ["x:float32[4]"], ["y:float32[4]"])


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
