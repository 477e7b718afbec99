"""Models and requests for the tests of the teacher server's parts, without a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from edl.protocol import kserve
from edl_serving import Array, Backend, ServerSettings, TensorSpec
from edl_serving.messages.request import DecodedRequest
from edl_serving.messages.request_plan import RequestPlan, plan_request
from edl_serving.model import ServedModel
from edl_serving.request_error import RequestError

Predict = Callable[[Mapping[str, Array]], Any]
X = TensorSpec("x", "FP32", (4,))
LOGITS = TensorSpec("logits", "FP32", (5,))


def five_logits(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Row sums plus 0 to 4."""
    return {"logits": inputs["x"].sum(-1, keepdims=True) + np.arange(5, dtype=np.float32)}


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


def plan_for(model: ServedModel, header: kserve.ModelInferRequest, max_rows: int = 100) -> RequestPlan:
    return plan_request(header, model, max_rows)


def request_for(model: ServedModel, x: Array, header: kserve.ModelInferRequest | None = None) -> DecodedRequest:
    return DecodedRequest(plan_for(model, header or header_for(x.shape)), (x,), {})


def refusal_of(call: Callable[[], object]) -> str:
    """The message that `call` is refused with."""
    with pytest.raises(RequestError) as refused:
        call()
    assert refused.value.code.name in ("INVALID_ARGUMENT", "NOT_FOUND")
    return refused.value.message
