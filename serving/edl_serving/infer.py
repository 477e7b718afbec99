"""`ModelInfer` and `ModelStreamInfer`: from a message's bytes to the answer's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from edl.errors import ProtocolError
from edl.protocol import codec
from edl_serving.batcher import Batcher
from edl_serving.lifecycle import Lifecycle
from edl_serving.metrics import Metrics
from edl_serving.model import Model
from edl_serving.refusal import Refusal, invalid
from edl_serving.request import RequestReader
from edl_serving.shm import Regions, is_local
from edl_serving.stream import Context, Stream, refused

__all__ = ["Context", "Inference"]


class Inference:
    """Computes requests.

    Args:
        max_rows: of one request.
        regions: registered shared memory, None where it is turned off.
    """

    def __init__(
        self,
        model: Model,
        max_rows: int,
        lifecycle: Lifecycle,
        batcher: Batcher,
        regions: Regions | None,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._reader = RequestReader(model, max_rows)
        self._lifecycle = lifecycle
        self._batcher = batcher
        self._regions = regions
        self._metrics = metrics
        self._streams: set[Stream] = set()

    async def unary(self, data: bytes, context: Context) -> bytes:
        """`ModelInfer`."""
        try:
            self._lifecycle.enter()
            context.add_done_callback(self._left)  # type: ignore[arg-type]  # the stub's type is a class
            answer = await self._compute(data, context)
        except Refusal as refusal:
            self._metrics.answered(refusal.code.name.lower())
            await context.abort(refusal.code, refusal.message, refusal.trailing_metadata)
        except asyncio.CancelledError:
            self._metrics.answered("cancelled")
            raise
        self._metrics.answered("ok")
        return answer

    async def stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """`ModelStreamInfer`; see `Stream`."""
        regions = self._regions_for(context)

        async def compute(header: bytes, raw: list[memoryview], request_id: str, refusal: Refusal | None) -> bytes:
            try:
                if refusal is not None:
                    raise refusal
                request = await self._reader.read(header, raw, regions)
                timeout_s = _least(request.plan.timeout_s, context.time_remaining())
                id_bytes = codec.id_field(request_id) if request_id else b""
                answer = await self._batcher.compute(request, timeout_s, id_bytes)
            except Refusal as exc:
                self._metrics.answered(exc.code.name.lower())
                return refused(exc, self._model.name, request_id)
            self._metrics.answered("ok")
            return answer

        stream = Stream(compute, lambda: self._metrics.answered("cancelled"), self._lifecycle, context)
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)

    def end_streams(self) -> None:
        """End open streams; an answer that is on its way still comes first."""
        for stream in self._streams:
            stream.end()

    def _left(self, context: Context) -> None:
        self._lifecycle.leave()

    async def _compute(self, data: bytes, context: Context) -> bytes:
        try:
            header, raw = codec.split_request(data)
        except ProtocolError as exc:
            raise invalid(str(exc)) from exc
        request = await self._reader.read(header, raw, self._regions_for(context))
        return await self._batcher.compute(request, context.time_remaining())

    def _regions_for(self, context: Context) -> Regions | None:
        return self._regions if self._regions is not None and is_local(context.peer()) else None


def _least(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)
