"""The canary: readiness that is found out by a row of the sample, sent through the queue and the model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from edl.notifier import wait_within
from edl.protocol import kserve, names
from edl.protocol.transport import grpc
from edl_serving.backends.backend import Array
from edl_serving.batching.batch_queue import InferenceJob
from edl_serving.batching.batcher import Batcher
from edl_serving.model import ServedModel
from edl_serving.request import DecodedRequest
from edl_serving.request_error import RequestError
from edl_serving.request_plan import plan_request

_log = logging.getLogger(__name__)

_LOOKS = 20  # within the time for an answer: a model that computes is asked again soon, and a look costs nothing
_NAME = "canary"  # as a client: it takes its turn like any other


class Canary:
    """Sends a row to the model at intervals, and awaits `changed` whenever the model begins or ceases to answer."""

    def __init__(
        self,
        batcher: Batcher,
        model: ServedModel,
        row: Mapping[str, Array],
        every_s: float,
        timeout_s: float,
        changed: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._batcher = batcher
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._changed = changed
        header = kserve.ModelInferRequest(model_name=model.name, id=_NAME)
        inputs = model.inputs_of(())
        for spec in inputs:
            header.inputs.add(name=spec.name, datatype=spec.datatype, shape=row[spec.name].shape)
        if model.max_top_k is not None:
            header.parameters[names.TOP_K].int64_param = model.max_top_k
        self._request = DecodedRequest(plan_request(header, model, 1), tuple(row[spec.name] for spec in inputs), {})
        self._model = model.name
        self.healthy = True

    async def run(self) -> None:
        """Send rows until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            why = await self._ask()
            if why is None or self.healthy == (not why):
                continue
            self.healthy = not why
            if why:
                _log.error("model %r fails a row of the sample, so this teacher is not ready: %s", self._model, why)
            else:
                _log.warning("model %r answers a row of the sample again: ready", self._model)
            await self._changed(self.healthy)

    async def _ask(self) -> str | None:
        """Send a row; return what is wrong, empty if the model answered, None where that cannot be known now."""
        job = InferenceJob.of(self._request, self._timeout_s, _NAME, 0, _NAME)
        try:
            await wait_within(self._batcher.compute(job), self._timeout_s)
        except asyncio.TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except RequestError as error:
            if error.reason == "queue":
                return await self._stuck()
            if error.code is grpc.StatusCode.UNAVAILABLE:
                return None
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {self._timeout_s:g} s"
            return error.message
        return ""

    async def _stuck(self) -> str | None:
        """Return what is wrong if no row is computed while the queue is full; None as soon as a row has been."""
        before = self._batcher.computed_rows
        for _ in range(_LOOKS):
            await asyncio.sleep(self._timeout_s / _LOOKS)
            if self._batcher.computed_rows != before:
                return None
        return f"the queue is full, and nothing was computed within {self._timeout_s:g} s"
