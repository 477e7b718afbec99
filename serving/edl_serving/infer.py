"""`ModelInfer` and `ModelStreamInfer`: from a message's bytes to the answer's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from edl.errors import ProtocolError
from edl.protocol import codec, kserve
from edl_serving.batcher import Batcher
from edl_serving.lifecycle import Lifecycle
from edl_serving.metrics import Metrics
from edl_serving.model import Model
from edl_serving.refusal import Refusal, invalid
from edl_serving.request import read_request
from edl_serving.shm import Regions, is_local

__all__ = ["Context", "Inference"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_STREAM_WINDOW = 16  # requests of one stream that are worked on at a time; the others wait in the connection
_SLOW_TO_READ = 64 << 10  # bytes of typed contents or BYTES, which become Python objects one by one


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
        self._max_rows = max_rows
        self._lifecycle = lifecycle
        self._batcher = batcher
        self._regions = regions
        self._metrics = metrics
        self._has_bytes = any(spec.datatype == "BYTES" for spec in model.inputs)

    async def unary(self, data: bytes, context: Context) -> bytes:
        """`ModelInfer`."""
        try:
            self._lifecycle.enter()
            context.add_done_callback(self._left)  # type: ignore[arg-type]  # the stub's type is a class
            answer = await self._compute(*_decode(data), context)
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
        header = kserve.ModelInferRequest()
        try:
            if refusal is not None:
                raise refusal
            header, raw = _decode(data)
            answer = await self._compute(header, raw, context)
        except Refusal as exc:
            self._metrics.answered(exc.code.name.lower())
            return kserve.ModelStreamInferResponse(
                error_message=exc.message,
                infer_response=kserve.ModelInferResponse(model_name=self._model.name, id=header.id),
            ).SerializeToString()
        except asyncio.CancelledError:
            self._metrics.answered("cancelled")
            raise
        self._metrics.answered("ok")
        return codec.wrap_response(answer)

    async def _compute(self, header: kserve.ModelInferRequest, raw: list[memoryview], context: Context) -> bytes:
        regions = self._regions if self._regions is not None and is_local(context.peer()) else None
        if self._is_slow_to_read(header, raw):
            request = await asyncio.to_thread(read_request, header, raw, self._model, self._max_rows, regions)
        else:
            request = read_request(header, raw, self._model, self._max_rows, regions)
        return await self._batcher.compute(request, context.time_remaining())

    def _is_slow_to_read(self, header: kserve.ModelInferRequest, raw: list[memoryview]) -> bool:
        if not raw:
            return header.ByteSize() > _SLOW_TO_READ
        return self._has_bytes and sum(view.nbytes for view in raw) > _SLOW_TO_READ


def _decode(data: bytes) -> tuple[kserve.ModelInferRequest, list[memoryview]]:
    try:
        return codec.decode_request(data)
    except ProtocolError as exc:
        raise invalid(str(exc)) from exc
