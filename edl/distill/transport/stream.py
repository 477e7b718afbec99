"""Sends requests to a teacher over a bidirectional stream, which costs half as much as unary calls.

Answers arrive in any order and are matched by id. The contents of requests and answers are handled elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.transport.calls import RequestFailed, RequestIds, compression_hint, failure_from_status
from edl.errors import ProtocolError
from edl.notifier import wait_within
from edl.protocol import bundles, codec, fragments, kserve, names
from edl.protocol.channel import Metadata
from edl.protocol.codec import Buffer
from edl.protocol.transport import grpc

__all__ = ["RawResponse", "InferStream"]

RawResponse: TypeAlias = tuple[bytes, list[memoryview]]
"""An answer's header, serialized and without its id, and its `raw_output_contents`."""
Done: TypeAlias = Callable[[RawResponse | RequestFailure | None], None]
"""Called once, on the event loop, with what became of a request; with None if it was cancelled."""

_CLOSE_S = 0.5
"""How long `close` waits for the call's status, which comes within milliseconds or never."""
_BUNDLE_NBYTES = 4000  # of one bundle; with what is around it, no server refuses a message of that size
_LEAST_FRAGMENTED_NBYTES = 8 << 20
"""Requests of this size and more are sent in fragments. That gives a tenth more requests a second at 19 MB, and none at
5 MB."""
_FRAGMENT_NBYTES = 4 << 20
"""Size of a fragment, whose five copies between two processes stay in the caches. At 1 MB the messages cost more than
the caches save, and at 8 MB half of the gain is lost."""
_FRAMING = 24  # bytes that a bundle adds to a message: its id, a tag and its length
_CANCEL = kserve.ModelInferRequest(
    parameters={names.CANCEL: kserve.InferParameter(bool_param=True)}
).SerializeToString()


@dataclass(eq=False)
class _PendingRequest:
    """A request without an answer."""

    done: Done
    header: bytes
    raw: Sequence[Buffer]
    nbytes: int
    deadline: float
    timeout_s: float
    written: bool = False


class InferStream:
    """An open `ModelStreamInfer` of a server with `names.EXTENSION_STREAM`. Used on the event loop.

    A request is serialized only when it is written, so at most one message is in memory at a time. Requests have
    neither a task nor a timer of their own, which would cost a turn of the loop each. Large requests are sent in
    fragments. Small ones that wait at the same time, such as requests that refer to shared memory, share a message;
    none waits for another.

    Args:
        ids: Ids for its requests; None for new ids.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        endpoint: str,
        *,
        in_bundles: bool = False,
        in_fragments: bool = False,
        metadata: Metadata = (),
        ids: RequestIds | None = None,
    ) -> None:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            names.method("ModelStreamInfer")
        )
        self._endpoint = endpoint
        self._ids = ids if ids is not None else RequestIds()
        own = [(names.UNORDERED, "1"), (names.TRACEPARENT, self._ids.traceparent)]
        if in_bundles:
            own.append((names.BUNDLES, "1"))
        self._call: Any = method(metadata=(*metadata, *own))
        self._in_bundles = in_bundles
        self._waiting: dict[str, _PendingRequest] = {}
        self._outbox: deque[str] = deque()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = [self._loop.create_task(self._write()), self._loop.create_task(self._read())]
        self.broken = False  # whether the stream has ended; open another then
        # whether the stream ended because the server had no room for it: nothing is wrong with the connection
        self.refused = False
        self.in_fragments = in_fragments

    def start(self, header: bytes, raw: Sequence[Buffer], timeout_s: float, done: Done) -> str:
        """Send a request.

        `raw`: its `raw_input_contents`; read until `done` is called. `done`: not called before this returns.
        LOST if the stream ends.

        Returns:
            The request's id, for `cancel`; the teacher's log shows it.
        """
        number = next(self._ids)
        deadline = self._loop.time() + timeout_s
        nbytes = _nbytes(header, raw)
        self._waiting[number] = _PendingRequest(done, header, raw, nbytes, deadline, timeout_s)
        self._arm_timer(deadline)
        self._queue(number)
        return number

    def cuts_request(self, header: bytes, raw: Sequence[Buffer]) -> bool:
        """Return whether a request would go in fragments."""
        return self._is_cut(_nbytes(header, raw))

    def cancel(self, number: str) -> None:
        """Tell the server that an answer is no longer wanted. Ignores requests that are done."""
        self._finish(number, None)

    async def infer(self, header: bytes, raw: Sequence[Buffer], timeout_s: float) -> RawResponse:
        """Send a request as `start`, and wait for the answer. Cancelling cancels the request.

        Raises:
            RequestFailed: as for a call of its own; LOST if the stream ends.
        """
        if self.broken:
            raise RequestFailed(FailureKind.LOST, f"{self._endpoint}: the stream has ended")
        future: asyncio.Future[RawResponse | RequestFailure | None] = self._loop.create_future()
        number = self.start(header, raw, timeout_s, functools.partial(_set_result, future))
        try:
            answer = await future
        finally:
            self.cancel(number)
        if isinstance(answer, RequestFailure):  # as a result: an exception in the future would be a cycle
            raise RequestFailed(answer.kind, answer.message, answer.retry_after_s)
        assert answer is not None, "only this coroutine knows the number"
        return answer

    async def close(self) -> None:
        """End the stream; requests under way end with LOST."""
        self._fail_all(RequestFailure(FailureKind.LOST, f"{self._endpoint}: the connection was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):  # a call that was cancelled before it began never gets a status
            await wait_within(self._call.code(), _CLOSE_S)  # behind it, gRPC's own task for the call is gone too

    def _is_cut(self, nbytes: int) -> bool:
        return self.in_fragments and nbytes >= _LEAST_FRAGMENTED_NBYTES

    def _queue(self, number: str) -> None:
        self._outbox.append(number)
        if not self._wake.is_set():
            self._wake.set()

    def _finish(self, number: str, why: RequestFailure | None) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            if waiting.written:
                self._queue(number)  # a number without a waiting request is a cancellation
            waiting.done(why)

    def _arm_timer(self, deadline: float) -> None:
        """Have requests checked at `deadline`, or before. Answers do not put it off: they come more often."""
        if self._timer is None or deadline < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(deadline, self._expire_requests)

    def _expire_requests(self) -> None:
        self._timer = None
        now = self._loop.time()
        for number, waiting in list(self._waiting.items()):
            if waiting.deadline <= now:
                words = f"{self._endpoint}: no answer within {waiting.timeout_s:g} s (request {number})"
                self._finish(number, RequestFailure(FailureKind.TIMEOUT, words))
        if self._waiting:
            self._arm_timer(min(waiting.deadline for waiting in self._waiting.values()))

    def _fail_all(self, failure: RequestFailure) -> None:
        if self.broken:
            return
        self.broken = True
        self._call.cancel()
        self._outbox.clear()
        self._wake.set()
        waiting = self._waiting
        self._waiting = {}
        if self._timer is not None:
            self._timer.cancel()
        for request in waiting.values():
            request.done(failure)

    # Out

    async def _write(self) -> None:
        try:
            while not self.broken:
                while self._outbox:
                    waiting = self._waiting.get(self._outbox[0])
                    if waiting is not None and self._is_cut(waiting.nbytes):
                        await self._write_fragments(self._outbox.popleft(), waiting)
                    else:
                        await self._call.write(self._next_message())
                self._wake.clear()
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading task finds the same end, and knows why

    async def _write_fragments(self, number: str, waiting: _PendingRequest) -> None:
        """Write a large request, unless it ends before that is done."""
        waiting.written = True
        header = waiting.header + codec.id_field(number)
        for message in fragments.fragment_request(header, waiting.raw, number, _FRAGMENT_NBYTES):
            await self._call.write(message)
            if number not in self._waiting:
                return  # its tensors may have changed; a cancellation follows, so the server discards the fragments

    def _next_message(self) -> bytes:
        """Return the next request, or as many as fit into a bundle."""
        message = self._message(self._outbox.popleft())
        if not self._in_bundles or not self._outbox or not self._is_small(self._outbox[0], len(message)):
            return message
        messages, nbytes = [message], len(message)
        while self._outbox and self._is_small(self._outbox[0], nbytes):
            messages.append(self._message(self._outbox.popleft()))
            nbytes += len(messages[-1])
        return bundles.join_requests(messages)

    def _is_small(self, number: str, beside: int) -> bool:
        waiting = self._waiting.get(number)
        return beside + (waiting.nbytes if waiting is not None else len(_CANCEL)) + _FRAMING <= _BUNDLE_NBYTES

    def _message(self, number: str) -> bytes:
        waiting = self._waiting.get(number)
        request_id = codec.id_field(number)
        if waiting is None:
            return _CANCEL + request_id
        waiting.written = True
        return codec.join_request(waiting.header + request_id, waiting.raw)

    # In

    async def _read(self) -> None:
        failure = RequestFailure(FailureKind.LOST, f"{self._endpoint} ended the stream")
        data = b""
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._receive(data)
                data = b""  # otherwise a delivered answer would stay in memory until the next one arrives
        except grpc.aio.AioRpcError as exc:
            failure = RequestFailure(_kind_of(exc.code()), f"{self._endpoint}: {exc.details() or exc.code().name}")
            hint = dict(exc.trailing_metadata() or ()).get(names.RETRY_AFTER_MS)
            found = failure_from_status(exc.code(), exc.details() or "", hint, self._endpoint).failure
            if found.kind is FailureKind.OVERLOADED and exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                failure = found
                self.refused = True
            elif found.kind is FailureKind.BAD_OUTPUT:
                failure = found
        except ProtocolError as exc:
            failure = RequestFailure(FailureKind.BAD_OUTPUT, f"{self._endpoint}: {exc}{compression_hint(data)}")
        finally:
            self._fail_all(failure)

    def _receive(self, data: bytes) -> None:
        for header, raw, number, error in bundles.split_responses(data):
            waiting = self._waiting.pop(number, None)
            if waiting is None:
                continue  # its answer is no longer awaited
            answer: RawResponse | RequestFailure = (header, raw)
            if error:
                try:
                    answer = self._failure(header, f"{error} (request {number})")
                except ProtocolError as exc:
                    answer = RequestFailure(FailureKind.BAD_OUTPUT, f"{self._endpoint}: {exc}")
            waiting.done(answer)

    def _failure(self, header: bytes, error: str) -> RequestFailure:
        parameters = codec.parse_response(header).parameters
        name = parameters[names.STATUS].string_param if names.STATUS in parameters else ""
        hint = parameters[names.RETRY_AFTER].int64_param if names.RETRY_AFTER in parameters else None
        code = grpc.StatusCode.__members__.get(name, grpc.StatusCode.UNKNOWN)
        return failure_from_status(code, error, hint, self._endpoint).failure


def _nbytes(header: bytes, raw: Sequence[Buffer]) -> int:
    return len(header) + sum([memoryview(part).nbytes for part in raw])


def _set_result(
    future: asyncio.Future[RawResponse | RequestFailure | None], answer: RawResponse | RequestFailure | None
) -> None:
    if not future.done():
        future.set_result(answer)


def _kind_of(code: grpc.StatusCode) -> FailureKind:
    """Return the failure kind of a stream's requests when it ends, which none of them need have caused."""
    return FailureKind.ERROR if code is grpc.StatusCode.UNKNOWN else FailureKind.LOST
