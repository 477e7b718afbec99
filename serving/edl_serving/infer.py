"""`ModelInfer` and `ModelStreamInfer`: from a message's bytes to the answer's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from edl.errors import ProtocolError
from edl.protocol import codec, kserve
from edl.protocol.transport import grpc
from edl_serving.batcher import Batcher
from edl_serving.lifecycle import Lifecycle
from edl_serving.metrics import Metrics
from edl_serving.model import Model
from edl_serving.refusal import Refusal, invalid
from edl_serving.request import RequestReader
from edl_serving.shm import Regions, is_local

__all__ = ["Context", "Inference"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_STREAM_WINDOW = 16  # requests of one stream that are worked on at a time; the others wait in the connection


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
        """`ModelStreamInfer`: answers come in the order of the requests; an error ends its request, not the stream."""
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        window = asyncio.Semaphore(_STREAM_WINDOW)
        pending: set[asyncio.Task[bytes]] = set()
        entered: set[asyncio.Task[bytes]] = set()

        async def receive() -> None:
            try:
                async for data in requests:
                    await window.acquire()
                    refusal = self._refused()
                    task = asyncio.create_task(self._compute_for_stream(data, context, refusal))
                    pending.add(task)
                    if refusal is None:
                        entered.add(task)
                    answers.put_nowait(task)
            finally:
                answers.put_nowait(None)

        receiver = asyncio.create_task(receive())
        try:
            while (task := await answers.get()) is not None:
                await context.write(await task)
                window.release()
                pending.discard(task)
                if task in entered:
                    entered.remove(task)
                    self._lifecycle.leave()
            await receiver
        finally:
            receiver.cancel()
            for task in pending:
                task.cancel()
            await asyncio.gather(receiver, *pending, return_exceptions=True)
            for _ in entered:
                self._lifecycle.leave()

    def _left(self, context: Context) -> None:
        self._lifecycle.leave()

    def _refused(self) -> Refusal | None:
        try:
            self._lifecycle.enter()
        except Refusal as refusal:
            return refusal
        return None

    async def _compute_for_stream(self, data: bytes, context: Context, refusal: Refusal | None) -> bytes:
        try:
            if refusal is not None:
                raise refusal
            answer = await self._compute(data, context)
        except Refusal as exc:
            self._metrics.answered(exc.code.name.lower())
            return kserve.ModelStreamInferResponse(
                error_message=exc.message,
                infer_response=kserve.ModelInferResponse(model_name=self._model.name, id=_id_of(data)),
            ).SerializeToString()
        except asyncio.CancelledError:
            self._metrics.answered("cancelled")
            raise
        self._metrics.answered("ok")
        return codec.wrap_response(answer)

    async def _compute(self, data: bytes, context: Context) -> bytes:
        try:
            header, raw = codec.split_request(data)
        except ProtocolError as exc:
            raise invalid(str(exc)) from exc
        regions = self._regions if self._regions is not None and is_local(context.peer()) else None
        request = await self._reader.read(header, raw, regions)
        return await self._batcher.compute(request, context.time_remaining())


def _id_of(data: bytes) -> str:
    """The id that a refused request came with, if that much of it can be read."""
    try:
        return codec.decode_request(data)[0].id
    except ProtocolError:
        return ""
