"""Sends requests to an EDL teacher over the tensor channel (`edl.protocol.frames`), at a fraction of gRPC's cost."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.transport.calls import RequestFailed, RequestIds, ServerCalls, failure_from_status
from edl.errors import ProtocolError
from edl.notifier import wait_within
from edl.protocol.codec import Buffer
from edl.protocol.frames import (
    MAGIC,
    TOKEN_NBYTES,
    Frame,
    FrameKind,
    FrameSocket,
    Socket,
    TlsSocket,
    body_parts,
    receive_exactly,
    split_body,
)
from edl.protocol.transport import grpc

logger = logging.getLogger("edl.distill")

Body: TypeAlias = tuple[bytes, list[memoryview]]  # an answer's header, serialized, and its tensors
Done: TypeAlias = Callable[[Body | RequestFailure | None], None]
"""Called once on the event loop, with the result of a request, or with None if the request was cancelled."""

_OPEN_S = 2.0  # how long opening may take; behind a firewall that drops packets, each connection waits that long
_PING_S = 15.0  # silence after which a peer with pending requests is pinged
_LOST_S = 30.0  # silence after which the peer counts as lost
_LARGEST_ERROR_NBYTES = 64 << 10


@dataclass(eq=False)
class _PendingRequest:
    done: Done
    frame: Frame
    deadline: float
    timeout_s: float


class TensorChannel:
    """An open tensor channel. Requests have no task or timer of their own, because each would cost a loop iteration."""

    def __init__(self, sock: Socket, calls: ServerCalls, ids: RequestIds) -> None:
        self._endpoint = calls.endpoint
        self._ids = ids
        self._max_answer_nbytes = calls.options.max_answer_bytes
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _PendingRequest] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pinged_at: float | None = None
        self.answered = False  # whether it has returned an answer or an error
        self._socket = FrameSocket(sock, self._begin, self._take, self._ended)

    @property
    def broken(self) -> bool:
        """Whether the channel has ended."""
        return self._socket.closed

    def start(self, header: bytes, raw: Sequence[Buffer], timeout_s: float, done: Done) -> str:
        """Send a request; return its id, for `cancel`.

        `raw`, the tensors, is read until `done` is called, which happens after this method has returned. `done` gets
        LOST if the channel ends.
        """
        request_id = next(self._ids)
        deadline = self._loop.time() + timeout_s
        frame = self._socket.send(FrameKind.REQUEST, int(request_id, 16), body_parts(header, raw))
        self._waiting[int(request_id, 16)] = _PendingRequest(done, frame, deadline, timeout_s)
        self._arm_timer(deadline)
        return request_id

    def cancel(self, request_id: str) -> None:
        """Tell the server that an answer is no longer needed. No effect if the request is complete."""
        self._drop(int(request_id, 16), None)

    async def infer(self, header: bytes, raw: Sequence[Buffer], timeout_s: float) -> Body:
        """Send a request like `start`; return the answer or raise `RequestFailed`.

        If the calling task is cancelled, the request is cancelled too.
        """
        if self.broken:
            raise RequestFailed(FailureKind.LOST, f"{self._endpoint}: the connection has ended")
        future: asyncio.Future[Body | RequestFailure | None] = self._loop.create_future()
        request_id = self.start(header, raw, timeout_s, functools.partial(_set_result, future))
        try:
            answer = await future
        finally:
            self.cancel(request_id)
        if isinstance(answer, RequestFailure):  # passed as a result: an exception in the future would create a cycle
            raise RequestFailed(answer.kind, answer.message, answer.retry_after_s)
        assert answer is not None, "only this coroutine knows the id"
        return answer

    def close(self) -> None:
        """End the channel; pending requests end with LOST."""
        self._socket.close("the connection was closed")

    def _drop(self, number: int, failure: RequestFailure | None) -> None:
        request = self._waiting.pop(number, None)
        if request is not None:
            if not self._socket.withdraw(request.frame):
                self._socket.send(FrameKind.CANCEL, number)
            request.done(failure)

    # Time

    def _arm_timer(self, due: float) -> None:
        """Check requests at `due` or earlier. Answers do not postpone this check, because they are too frequent."""
        due = min(due, self._loop.time() + _PING_S)
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        self._timer = None
        now = self._loop.time()
        for number, request in list(self._waiting.items()):
            if request.deadline <= now:
                words = f"{self._endpoint}: no answer within {request.timeout_s:g} s (request {number:016x})"
                self._drop(number, RequestFailure(FailureKind.TIMEOUT, words))
        if not self._waiting and not self._socket.pending:
            return
        self._look_for_life(now)
        if self.broken:
            return
        self._arm_timer(min([request.deadline for request in self._waiting.values()], default=now + _PING_S))

    def _look_for_life(self, now: float) -> None:
        if self._pinged_at is not None and self._socket.heard_at >= self._pinged_at:
            self._pinged_at = None
        if self._pinged_at is None:
            if now - self._socket.moved_at >= _PING_S / 2:
                self._pinged_at = now
                self._socket.send(FrameKind.PING, 0)
        elif now - max(self._pinged_at, self._socket.moved_at) >= _LOST_S - _PING_S - 1:  # timers fire a little early
            self._socket.close(f"the server was silent for {_LOST_S:g} s")

    # In

    def _begin(self, kind: int, number: int, nbytes: int) -> bool:
        if kind == FrameKind.PONG and not nbytes:
            return True
        if kind == FrameKind.ERROR and nbytes <= _LARGEST_ERROR_NBYTES:
            return number in self._waiting
        if kind != FrameKind.ANSWER:
            raise ProtocolError(f"malformed message: a frame of kind {kind} and {nbytes:,} bytes")
        request = self._waiting.get(number)
        if request is not None and nbytes > self._max_answer_nbytes:
            del self._waiting[number]
            limit = f"more than Options(max_answer_bytes={self._max_answer_nbytes})"
            what = f"an answer of {nbytes:,} bytes, {limit}"
            request.done(RequestFailure(FailureKind.BAD_OUTPUT, f"{self._endpoint}: {what} (request {number:016x})"))
            return False
        return request is not None  # otherwise its answer is no longer awaited

    def _take(self, kind: int, number: int, body: memoryview) -> None:
        request = self._waiting.pop(number, None)
        if request is None:
            return
        self.answered = True
        answer: Body | RequestFailure
        try:
            answer = split_body(body) if kind == FrameKind.ANSWER else self._failure(body, number)
        except ProtocolError as exc:
            answer = RequestFailure(FailureKind.BAD_OUTPUT, f"{self._endpoint}: {exc}")
        request.done(answer)

    def _failure(self, body: memoryview, number: int) -> RequestFailure:
        try:
            found = json.loads(bytes(body))
            name, message = str(found["status"]), str(found["message"])
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise ProtocolError(f"malformed message: an error that is not JSON ({exc})") from exc
        code = grpc.StatusCode.__members__.get(name, grpc.StatusCode.UNKNOWN)
        words = f"{message} (request {number:016x})"
        return failure_from_status(code, words, found.get("retry_after_ms"), self._endpoint).failure

    def _ended(self, why: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            request.done(RequestFailure(FailureKind.LOST, f"{self._endpoint}: {why}"))


async def open_channel(calls: ServerCalls, ids: RequestIds, deadline: float) -> TensorChannel:
    """Open a tensor channel to the server of `calls`, which must support `names.EXTENSION_CHANNEL`.

    Raises `RequestFailed` if the server refuses the channel, cannot be reached within two seconds, or is not the server
    that issued the token.
    """
    deadline = min(deadline, time.monotonic() + _OPEN_S)
    where = "opening one"
    opened: list[socket.socket] = []
    try:
        offer = await calls.open_channel(ids.traceparent, deadline)
        port, token, proof = int(offer["port"]), bytes.fromhex(offer["token"]), bytes.fromhex(offer["proof"])
        shake_hands = functools.partial(_shake_hands, opened, token, proof, bytes.fromhex(offer["certificate"]))
        where = f"port {port}"
        host = calls.endpoint.rpartition(":")[0].strip("[]")
        sock = await wait_within(_connect(host, port, shake_hands), deadline - time.monotonic())
        channel = TensorChannel(sock, calls, ids)
        opened.pop()  # the last socket is used, and must not be closed
    except (OSError, asyncio.TimeoutError, ValueError, TypeError, KeyError, ProtocolError) as exc:
        words = str(exc) or f"no answer within {_OPEN_S:g} s"
        raise RequestFailed(FailureKind.LOST, f"{calls.endpoint}: {where}: {words}") from exc
    finally:
        for each in opened:  # including one whose handshake ended just as this was cancelled
            each.close()
    return channel


async def _connect(host: str, port: int, shake_hands: Callable[[int, Any], Awaitable[Socket]]) -> Socket:
    """Return a socket to the first address of a host at which the handshake succeeds."""
    error: Exception = OSError(f"{host} has no address")
    loop = asyncio.get_running_loop()
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return await shake_hands(family, address)
        except (OSError, ProtocolError) as exc:
            error = exc
    raise error


async def _shake_hands(
    opened: list[socket.socket], token: bytes, proof: bytes, certificate: bytes, family: int, address: Any
) -> Socket:
    """Return a connection, with TLS if the teacher sent a `certificate` (its SHA-256, over verified gRPC)."""
    plain = socket.socket(family, socket.SOCK_STREAM)
    opened.append(plain)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, address)
    sock: Socket = plain
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        sock = TlsSocket(plain, context, serves=False)
        shown = hashlib.sha256(await sock.shake_hands()).digest()
        if not hmac.compare_digest(shown, certificate):
            raise ProtocolError("its certificate is not the teacher's")
    sock.sendmsg([MAGIC + token])  # a new connection has room for it
    found = await receive_exactly(sock, TOKEN_NBYTES)
    if not found:
        raise ProtocolError(
            "it closed the connection: too many are being opened, or the server that answered did not issue this token"
        )
    if not hmac.compare_digest(found, proof):
        raise ProtocolError("this is not the server that issued the token")
    return sock


def _set_result(future: asyncio.Future[Body | RequestFailure | None], answer: Body | RequestFailure | None) -> None:
    if not future.done():
        future.set_result(answer)
