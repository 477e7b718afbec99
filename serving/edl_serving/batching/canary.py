"""Readiness that is found out: a row of the sample runs through the queue and the model now and then.

A model that hangs, raises or answers NaN makes the server not ready, until a row is answered again. A full queue says
nothing about the model as long as it is computed; if nothing is for the time that an answer may take, the model hangs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from edl.protocol import kserve
from edl.protocol.transport import grpc
from edl_serving.backends.backend import Array
from edl_serving.batching.batcher import Batcher
from edl_serving.batching.job import Job
from edl_serving.messages.request import Request
from edl_serving.messages.request_plan import make_plan
from edl_serving.model import Model
from edl_serving.request_error import Refusal

__all__ = ["Canary"]

_log = logging.getLogger(__name__)

_LOOKS = 20  # within the time for an answer: a model that computes is asked again soon, and a look costs nothing
_NAME = "canary"  # as a client: it takes its turn like any other


class Canary:
    """Asks the model, and tells what comes of it.

    Args:
        row: of each input, `[1, *shape]`.
        every_s: seconds from one answer to the next question.
        timeout_s: how long an answer may take, waiting included.
        changed: awaited with whether the model answers, whenever that changes; it does at first.
    """

    def __init__(
        self,
        batcher: Batcher,
        model: Model,
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
        for spec in model.inputs:
            header.inputs.add(name=spec.name, datatype=spec.datatype, shape=row[spec.name].shape)
        self._request = Request(make_plan(header, model, 1), tuple(row[spec.name] for spec in model.inputs), {})
        self._model = model.name
        self.healthy = True

    async def run(self) -> None:
        """Ask for ever."""
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
        """What is wrong, empty if nothing is; None where that cannot be known now."""
        job = Job.of(self._request, self._timeout_s, _NAME, 0, _NAME)
        try:
            await asyncio.wait_for(self._batcher.compute(job), self._timeout_s)
        except asyncio.TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except Refusal as refusal:
            if refusal.reason == "queue":
                return await self._stuck()
            if refusal.code is grpc.StatusCode.UNAVAILABLE:
                return None
            if refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {self._timeout_s:g} s"
            return refusal.message
        return ""

    async def _stuck(self) -> str | None:
        """Whether nothing is computed while the queue is full; None as soon as something has been."""
        before = self._batcher.computed_rows
        for _ in range(_LOOKS):
            await asyncio.sleep(self._timeout_s / _LOOKS)
            if self._batcher.computed_rows != before:
                return None
        return f"the queue is full, and nothing was computed within {self._timeout_s:g} s"
