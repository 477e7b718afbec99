"""One open `ModelStreamInfer`: its requests under way, and the answers on their way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

from edl.errors import ProtocolError
from edl.protocol import codec, kserve, names
from edl.protocol.transport import grpc
from edl_serving.lifecycle import Lifecycle
from edl_serving.refusal import Refusal, invalid

__all__ = ["Compute", "Context", "Stream", "refused"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Compute: TypeAlias = Callable[[bytes, list[memoryview], str, Refusal | None], Awaitable[bytes]]

_WINDOW = 64  # requests of one stream that are worked on at a time; the others wait in the connection
_CANCEL = kserve.ModelInferRequest(
    parameters={names.CANCEL: kserve.InferParameter(bool_param=True)}
).SerializeToString()


class Stream:
    """Answers in the order of the requests or, if the call's metadata say so, as soon as they are there.

    An error ends its request, not the stream.

    Args:
        compute: called with a request's header without its id, its raw tensors, its id, and why it is refused, if it
            is; returns the bytes of a `ModelStreamInferResponse`.
    """

    def __init__(self, compute: Compute, lifecycle: Lifecycle, context: Context) -> None:
        self._compute = compute
        self._lifecycle = lifecycle
        self._context = context
        self._ordered = names.UNORDERED not in dict(context.invocation_metadata() or ())
        self._window = asyncio.Semaphore(_WINDOW)
        self._answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        self._entered: dict[asyncio.Task[bytes], bool] = {}  # all not written yet; whether the lifecycle counts it
        self._computing: dict[str, asyncio.Task[bytes]] = {}  # by id, where there is no order
        self._receiver: asyncio.Task[None] | None = None
        self._last = False

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Until the client, or `end`, ends the stream and everything taken has been answered."""
        self._receiver = asyncio.create_task(self._receive(requests))
        try:
            while (task := await self._answers.get()) is not None:
                await self._context.write(await task)
                self._forget(task)
            if self._receiver.done() and not self._receiver.cancelled():
                self._receiver.result()
        finally:
            self._receiver.cancel()
            for task in self._entered:
                task.cancel()
            await asyncio.gather(self._receiver, *self._entered, return_exceptions=True)
            for task in list(self._entered):
                self._forget(task)

    def end(self) -> None:
        """Take no more requests, and end the stream behind the last answer."""
        if self._receiver is not None:
            self._receiver.cancel()

    async def _receive(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                await self._window.acquire()
                self._take(data)
        finally:
            self._last = True
            if self._ordered or not self._entered:
                self._answers.put_nowait(None)

    def _take(self, data: bytes) -> None:
        header, request_id, entered = b"", "", False
        raw: list[memoryview] = []
        refusal: Refusal | None = None
        try:
            header, raw, request_id = codec.split_streamed_request(data)
            if header == _CANCEL and not self._ordered:
                self._window.release()
                if request_id in self._computing:
                    self._computing[request_id].cancel()
                return
            self._lifecycle.enter()
            entered = True
        except ProtocolError as exc:
            refusal = invalid(str(exc))
        except Refusal as exc:
            refusal = exc
        task = asyncio.ensure_future(self._compute(header, raw, request_id, refusal))
        self._entered[task] = entered
        if self._ordered:
            self._answers.put_nowait(task)
        else:
            self._computing[request_id] = task
            task.add_done_callback(lambda task: self._computed(request_id, task))

    def _computed(self, request_id: str, task: asyncio.Task[bytes]) -> None:
        if self._computing.get(request_id) is task:
            del self._computing[request_id]
        if task.cancelled():
            self._forget(task)
        else:
            self._answers.put_nowait(task)

    def _forget(self, task: asyncio.Task[bytes]) -> None:
        entered = self._entered.pop(task, None)
        if entered is None:
            return
        self._window.release()
        if entered:
            self._lifecycle.leave()
        if self._last and not self._ordered and not self._entered:
            self._answers.put_nowait(None)


def refused(refusal: Refusal, model: str, request_id: str) -> bytes:
    """The `ModelStreamInferResponse` that says what a unary call's status and trailing metadata would."""
    answer = kserve.ModelInferResponse(model_name=model, id=request_id)
    answer.parameters[names.STATUS].string_param = refusal.code.name
    if refusal.retry_after_ms is not None:
        answer.parameters[names.RETRY_AFTER].int64_param = refusal.retry_after_ms
    message = kserve.ModelStreamInferResponse(error_message=refusal.message, infer_response=answer)
    return bytes(message.SerializeToString())
