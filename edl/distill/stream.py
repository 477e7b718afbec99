"""Requests to one teacher over one bidirectional stream: half the cost of a call of their own each.

Answers come in any order and are matched by id. What does not belong here: what is in a request or an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from edl.distill.dispatch import Failure, FailureKind
from edl.distill.failure import RequestFailed, failure_of
from edl.errors import ProtocolError
from edl.protocol import codec, kserve, names
from edl.protocol.codec import Buffer
from edl.protocol.transport import grpc

__all__ = ["InferStream"]

Answer: TypeAlias = tuple[bytes, list[memoryview]]

_CLOSE_S = 0.5
_CANCEL = kserve.ModelInferRequest(
    parameters={names.CANCEL: kserve.InferParameter(bool_param=True)}
).SerializeToString()


@dataclass(eq=False)
class _Waiting:
    """A request without an answer. The future's result may be a failure: an exception in it would be a cycle."""

    future: asyncio.Future[Answer | Failure]
    header: bytes
    raw: Sequence[Buffer]
    written: bool = False


class InferStream:
    """An open `ModelStreamInfer` of a server with `names.EXTENSION_STREAM`. Used on the event loop.

    Requests are joined to messages when their turn to be written comes, so only one lies in memory at a time.
    """

    def __init__(self, channel: grpc.aio.Channel, endpoint: str) -> None:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            names.method("ModelStreamInfer")
        )
        self._endpoint = endpoint
        self._call: Any = method(metadata=((names.UNORDERED, "1"),))
        self._numbers = itertools.count()
        self._waiting: dict[str, _Waiting] = {}
        self._outbox: deque[str] = deque()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._write()), self._loop.create_task(self._read())]
        self.broken = False
        """Whether the stream has ended; open another one."""

    async def ask(self, header: bytes, raw: Sequence[Buffer], timeout_s: float) -> Answer:
        """Send a request and wait for its answer. Cancelling tells the server that nobody waits any more.

        Args:
            header: a serialized ModelInferRequest without an id.
            raw: its `raw_input_contents`; read until the answer is here.

        Returns:
            The answer's header, serialized, and its `raw_output_contents`.

        Raises:
            RequestFailed: as for a call of its own; LOST if the stream ends.
        """
        if self.broken:
            raise RequestFailed(FailureKind.LOST, f"{self._endpoint}: the stream has ended")
        number = f"{next(self._numbers):08x}"
        waiting = self._waiting[number] = _Waiting(self._loop.create_future(), header, raw)
        timer = self._loop.call_later(timeout_s, self._expire, number, timeout_s)
        self._outbox.append(number)
        self._wake.set()
        try:
            answer = await waiting.future
        finally:
            timer.cancel()
            if self._waiting.pop(number, None) is not None and waiting.written:
                self._outbox.append(number)  # a number that nobody waits for is a cancellation
                self._wake.set()
        if isinstance(answer, Failure):
            raise RequestFailed(answer.kind, answer.message, answer.retry_after_s)
        return answer

    async def close(self) -> None:
        """End the stream; requests under way end with LOST."""
        self._break(Failure(FailureKind.LOST, f"{self._endpoint}: the connection was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):  # a call that was cancelled before it began never gets a status
            await asyncio.wait_for(self._call.code(), _CLOSE_S)  # behind it, gRPC's own task for the call is gone too

    def _expire(self, number: str, timeout_s: float) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.future.done():
            words = f"{self._endpoint}: no answer within {timeout_s:g} s"
            waiting.future.set_result(Failure(FailureKind.TIMEOUT, words))

    def _break(self, failure: Failure) -> None:
        if self.broken:
            return
        self.broken = True
        self._call.cancel()
        self._outbox.clear()
        self._wake.set()
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            if not one.future.done():
                one.future.set_result(failure)

    # Out

    async def _write(self) -> None:
        try:
            while not self.broken:
                while self._outbox:
                    message = self._message(self._outbox.popleft())
                    if message:
                        await self._call.write(message)
                    del message
                self._wake.clear()
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading task finds the same end, and knows why

    def _message(self, number: str) -> bytes:
        waiting = self._waiting.get(number)
        request_id = codec.id_field(number)
        if waiting is None:
            return _CANCEL + request_id
        waiting.written = True
        return codec.join_request(waiting.header + request_id, waiting.raw)

    # In

    async def _read(self) -> None:
        failure = Failure(FailureKind.LOST, f"{self._endpoint} ended the stream")
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._take(data)
        except grpc.aio.AioRpcError as exc:
            failure = Failure(_kind_of(exc.code()), f"{self._endpoint}: {exc.details() or exc.code().name}")
        except ProtocolError as exc:
            failure = Failure(FailureKind.BAD_OUTPUT, f"{self._endpoint}: {exc}")
        finally:
            self._break(failure)

    def _take(self, data: bytes) -> None:
        header, raw, number, error = codec.split_streamed_response(data)
        waiting = self._waiting.pop(number, None)
        if waiting is None or waiting.future.done():  # nobody waits for it any more
            return
        waiting.future.set_result(self._failure(header, error) if error else (header, raw))

    def _failure(self, header: bytes, error: str) -> Failure:
        parameters = codec.parse_response(header).parameters
        name = parameters[names.STATUS].string_param if names.STATUS in parameters else ""
        hint = parameters[names.RETRY_AFTER].int64_param if names.RETRY_AFTER in parameters else None
        code = grpc.StatusCode.__members__.get(name, grpc.StatusCode.UNKNOWN)
        return failure_of(code, error, hint, self._endpoint).failure


def _kind_of(code: grpc.StatusCode) -> FailureKind:
    """What the end of a stream is to its requests, none of which needs to have caused it."""
    return FailureKind.ERROR if code is grpc.StatusCode.UNKNOWN else FailureKind.LOST
