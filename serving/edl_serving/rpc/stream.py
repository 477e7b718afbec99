"""An open `ModelStreamInfer`: its requests under way, and the responses on their way back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import TypeAlias

from edl.errors import ProtocolError
from edl.protocol import bundles, codec, fragments, kserve, names
from edl.protocol.codec import Buffer
from edl_serving.lifecycle import Lifecycle
from edl_serving.request_error import RequestError, invalid_argument, malformed_message, quote
from edl_serving.rpc.clients import ServicerContext, StreamSlot

__all__ = ["Compute", "ServicerContext", "InferStreamHandler", "encode_error"]

_Parts: TypeAlias = tuple[bytes, list[memoryview], str, RequestError | None]
Compute: TypeAlias = Callable[[bytes, list[memoryview], int, str, RequestError | None], Awaitable[bytes]]

_Admission: TypeAlias = tuple[bool, int | None]
"""Whether the lifecycle counts a request, and how many bytes its client's limit does; None if it was refused."""

_WINDOW = 64  # requests of one stream that are worked on at a time; the others wait in the connection
_BUNDLE_NBYTES = 1 << 20  # of answers in one message: a larger one costs more to copy than a message of its own
_CANCEL = kserve.ModelInferRequest(
    parameters={names.CANCEL: kserve.InferParameter(bool_param=True)}
).SerializeToString()


class InferStreamHandler:
    """Answers the requests of a stream: in their order or, if the call's metadata ask for it, as responses are ready.

    An error ends its request, not the stream.

    Args:
        compute: called with a request's header without its id, its raw tensors, the bytes of both, its id, and the
            error that refuses it, or None; returns the bytes of a `ModelStreamInferResponse`.
        cancelled: called for a request that was cancelled.
        lifecycle: says whether requests are taken.
        slot: among the streams that are served.
        metadata: of the call.
        context: of the call.
        limit_nbytes: of a request that comes in fragments.
    """

    def __init__(
        self,
        compute: Compute,
        cancelled: Callable[[], None],
        lifecycle: Lifecycle,
        slot: StreamSlot,
        metadata: Mapping[str, str | bytes],
        context: ServicerContext,
        limit_nbytes: int,
    ) -> None:
        self._compute = compute
        self._cancelled = cancelled
        self._lifecycle = lifecycle
        self._slot = slot
        self._context = context
        self._ordered = names.UNORDERED not in metadata
        self._bundles = names.BUNDLES in metadata and not self._ordered
        self._defragmenter = fragments.Defragmenter(limit_nbytes, slot.hold_bytes, slot.release_bytes)
        self._window = asyncio.Semaphore(_WINDOW)
        self._answers: deque[asyncio.Task[bytes] | None] = deque()
        self._wake = asyncio.Event()
        self._entered: dict[asyncio.Task[bytes], _Admission] = {}  # all not written yet
        self._computing: dict[str, asyncio.Task[bytes]] = {}  # by id, where there is no order
        self._receiver: asyncio.Task[None] | None = None
        self._last = False

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Answer requests until the client, or `end`, ends the stream and all requests have been answered.

        Args:
            requests: the messages' bytes.
        """
        self._receiver = asyncio.create_task(self._receive(requests))
        try:
            while (task := await self._next_answer()) is not None:
                tasks, message = self._bundle_ready(task, await task)
                await self._context.write(message)
                for written in tasks:
                    self._release(written)
            if self._receiver.done() and not self._receiver.cancelled():
                self._receiver.result()
        finally:
            self._receiver.cancel()
            for task in self._entered:
                task.cancel()
            await asyncio.gather(self._receiver, *self._entered, return_exceptions=True)
            for task in list(self._entered):
                self._release(task)
            self._defragmenter.drop()

    def end(self) -> None:
        """Take no more requests, and end the stream behind the last response."""
        if self._receiver is not None:
            self._receiver.cancel()

    # Out

    def _answer(self, task: asyncio.Task[bytes] | None) -> None:
        self._answers.append(task)
        self._wake.set()

    async def _next_answer(self) -> asyncio.Task[bytes] | None:
        while not self._answers:
            self._wake.clear()
            await self._wake.wait()
        return self._answers.popleft()

    def _bundle_ready(self, task: asyncio.Task[bytes], answer: bytes) -> tuple[list[asyncio.Task[bytes]], bytes]:
        """Return the message with this response and, if the client takes bundles, with others that are ready."""
        tasks, answers, nbytes = [task], [answer], len(answer)
        while self._bundles and self._answers and (other := self._answers[0]) is not None:
            if other.cancelled() or other.exception() is not None:
                break  # its own turn will tell
            nbytes += len(other.result())
            if nbytes > _BUNDLE_NBYTES:
                break
            tasks.append(other)
            answers.append(other.result())
            self._answers.popleft()
        return tasks, answer if len(answers) == 1 else bundles.join_responses(answers)

    # In

    async def _receive(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                for parts in self._messages(data):
                    await self._window.acquire()
                    self._accept(*parts)
                    del parts
                del data  # the next one may be long in coming: a request that was answered would stay for as long
        finally:
            self._last = True
            if self._ordered or not self._entered:
                self._answer(None)

    def _messages(self, data: bytes) -> Iterator[_Parts]:
        """Yield the message, the messages in it if it is a bundle, or the request whose last fragment it is."""
        header, raw, request_id, error = _split(data)
        if fragments.is_fragment(header) and not self._ordered:
            try:
                whole = self._defragmenter.add(raw, request_id)
            except ProtocolError as exc:
                yield header, [], request_id, invalid_argument(str(exc))
                return
            except RequestError as exc:
                yield header, [], request_id, exc
                return
            if whole is not None:
                yield _split(whole)
        elif not bundles.is_bundle(header):
            yield header, raw, request_id, error
        elif len(data) > bundles.MOST_REQUEST_NBYTES:
            yield (
                header,
                raw,
                request_id,
                _bundle_error(f"{len(data):,} bytes, at most {bundles.MOST_REQUEST_NBYTES:,}"),
            )
        elif self._ordered:
            yield header, raw, request_id, _bundle_error(f"the stream was not opened with {names.UNORDERED}")
        elif request_id or not raw:
            yield (
                header,
                raw,
                request_id,
                _bundle_error(f"has the id {quote(request_id)} and {len(raw)} messages"),
            )
        else:
            for message in raw:
                part = _split(message)
                yield (*part[:3], _bundle_error("lies within another one")) if bundles.is_bundle(part[0]) else part

    def _accept(self, header: bytes, raw: list[memoryview], request_id: str, error: RequestError | None) -> None:
        if header == _CANCEL and not self._ordered:
            self._window.release()
            self._defragmenter.drop(request_id)
            if request_id in self._computing:
                self._computing[request_id].cancel()
            return
        entered, held = False, None
        nbytes = len(header) + sum([len(tensor) for tensor in raw])
        if error is None:
            try:
                self._lifecycle.begin_request()
                entered = True
                self._slot.hold_bytes(nbytes)
                held = nbytes
            except RequestError as exc:
                error = exc.with_traceback(None)  # with this frame in it, a circle that keeps the request
        task = asyncio.ensure_future(self._compute(header, raw, nbytes, request_id, error))
        self._entered[task] = entered, held
        if self._ordered:
            task.add_done_callback(self._hold_response)
            self._answer(task)
        else:
            self._computing[request_id] = task
            task.add_done_callback(lambda task: self._computed(request_id, task))

    def _computed(self, request_id: str, task: asyncio.Task[bytes]) -> None:
        if self._computing.get(request_id) is task:
            del self._computing[request_id]
        if task.cancelled():
            self._release(task)
        else:
            self._hold_response(task)
            self._answer(task)

    def _hold_response(self, task: asyncio.Task[bytes]) -> None:
        client = self._slot.client
        if client is not None and not task.cancelled() and task.exception() is None and task in self._entered:
            _, held = self._entered[task]
            if held is not None:
                client.nbytes += len(task.result())
                self._entered[task] = self._entered[task][0], held + len(task.result())

    def _release(self, task: asyncio.Task[bytes]) -> None:
        taken = self._entered.pop(task, None)
        if taken is None:
            return
        entered, held = taken
        self._window.release()
        if held is not None:
            self._slot.release_bytes(held)
        if task.cancelled():  # here, since one that is cancelled in the message that it came with never runs
            self._cancelled()
        if entered:
            self._lifecycle.end_request()
        if self._last and not self._ordered and not self._entered:
            self._answer(None)


def _split(data: Buffer) -> _Parts:
    try:
        return (*codec.split_streamed_request(data), None)
    except ProtocolError as exc:
        return b"", [], "", malformed_message(data, str(exc))


def _bundle_error(how: str) -> RequestError:
    return invalid_argument(f"parameter {names.BUNDLE}: {how}")


def encode_error(error: RequestError, model: str, request_id: str) -> bytes:
    """Return the `ModelStreamInferResponse` that says what the status and trailing metadata of a unary call would.

    Args:
        error: that ended the request.
        model: name of the model.
        request_id: of the request.
    """
    answer = kserve.ModelInferResponse(model_name=model, id=request_id)
    answer.parameters[names.STATUS].string_param = error.code.name
    if error.retry_after_ms is not None:
        answer.parameters[names.RETRY_AFTER].int64_param = error.retry_after_ms
    message = kserve.ModelStreamInferResponse(error_message=error.message, infer_response=answer)
    return bytes(message.SerializeToString())
