"""The tensor channel: frames over a TCP socket between EDL's students and teachers.

In Python, gRPC copies a tensor several times on each side while it holds the GIL. With this channel, the kernel copies
a tensor once from the student's array, and once into the memory from which the teacher computes. Both copies are made
without the GIL.

The client begins a connection with `MAGIC` and the one-time token from `names.OPEN_CHANNEL`; the server answers with
the proof that it issued together with the token. Frames follow in both directions: a prefix (`_PREFIX`: kind, request
number, size of the body in bytes) and a body. The body of a request or an answer is a KServe v2 message in two parts
(see `body_parts`): the serialized header, and the tensors that would be the message's raw contents. If gRPC uses TLS,
the whole connection uses TLS too.

This module only transfers frames. `edl.distill.transport.channel` and `edl_serving.channel` define what the frames
mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import functools
import itertools
import logging
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from edl.errors import ProtocolError
from edl.protocol.codec import Buffer

logger = logging.getLogger("edl.protocol")

T = TypeVar("T")

MAGIC = b"EDL1"
TOKEN_NBYTES = 32
_PREFIX = struct.Struct("<B7xQQ")
_BODY = struct.Struct("<II")  # bytes of the header, and the number of tensors
_ALIGNMENT = 64  # of tensors within a body: numpy is slower on unaligned numbers
_MOST_TENSORS = 10_000
_STAGE_NBYTES = 64 << 10  # many small frames arrive in one call; these bytes of a large frame are copied once more
_MOST_PARTS = 64  # buffers in one `sendmsg`; Linux takes 1,024
_TLS_NBYTES = 128 << 10  # received, or encrypted, at a time
_MOST_CALLS = 256  # receives of a connection before other work of the loop gets its turn
_LOCAL_QUEUE_NBYTES = 256 << 10
"""Bytes that the kernel queues between two processes on one host. By default, the kernel queues 4 MB, which are no
longer in the processor's cache when they are read: a request then costs both sides a quarter more CPU time
(`benchmarks/reader`). For connections to another host, the kernel chooses the size from the round-trip time."""
_SILENT_MS = 30_000  # how long a peer's kernel may stay silent before the connection counts as broken


class FrameKind(enum.IntEnum):
    """The kinds of frames."""

    REQUEST = 1
    CANCEL = 2  # the student no longer waits for the request with this number; it may still get an answer
    ANSWER = 3
    ERROR = 4  # JSON: `status` (gRPC's name of it), `message`, and perhaps `retry_after_ms`
    PING = 5
    PONG = 6


def body_parts(header: bytes, tensors: Sequence[Buffer]) -> list[Buffer]:
    """Return the parts of a body, without copying the tensors.

    A body consists of two 4-byte numbers (size of the header in bytes, number of tensors), an 8-byte size for each
    tensor, the header, and the tensors. Zeros before each tensor align it to 64 bytes.
    """
    views = [memoryview(tensor) for tensor in tensors]
    views = [view.cast("B") if view.nbytes else memoryview(b"") for view in views]
    sizes = [len(view) for view in views]
    parts: list[Buffer] = [_BODY.pack(len(header), len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + header]
    at = len(parts[0])
    for view, size in zip(views, sizes, strict=True):
        if padding := -at % _ALIGNMENT:
            parts.append(bytes(padding))
        parts.append(view)
        at += padding + size
    return parts


def split_body(body: memoryview) -> tuple[bytes, list[memoryview]]:
    """Return a body's header, and its tensors as views of the body; ProtocolError if the body is malformed."""
    if len(body) < _BODY.size:
        raise ProtocolError(f"malformed message: its body has only {len(body)} bytes")
    header_nbytes, count = _BODY.unpack_from(body)
    header_at = _BODY.size + 8 * count
    at = header_at + header_nbytes
    if count > _MOST_TENSORS or at > len(body):
        raise ProtocolError(
            f"malformed message: {count:,} tensors, and a header that ends at byte {at:,} of {len(body):,}"
        )
    tensors = []
    for size in struct.unpack_from(f"<{count}Q", body, _BODY.size):
        at += -at % _ALIGNMENT
        tensors.append(body[at : at + size])
        at += size
    if at != len(body):
        raise ProtocolError(f"malformed message: tensors end at byte {at:,} of {len(body):,}")
    return bytes(body[header_at : header_at + header_nbytes]), tensors


async def when_ready(sock: Socket, operation: Callable[[], T], *, writes: bool = False) -> T:
    """Run an operation on a non-blocking socket when the socket is ready to read (or write); return the result."""
    loop = asyncio.get_running_loop()
    add, remove = (loop.add_writer, loop.remove_writer) if writes else (loop.add_reader, loop.remove_reader)
    while True:
        try:
            return operation()
        except BlockingIOError:
            ready = asyncio.Event()
        add(sock, ready.set)
        try:
            await ready.wait()
        finally:
            remove(sock)


async def receive_exactly(sock: Socket, nbytes: int) -> bytes:
    """Return `nbytes` bytes, or fewer if the peer ends the connection first."""
    found, at = bytearray(nbytes), 0
    while at < nbytes:
        target = memoryview(found)[at:]
        size = await when_ready(sock, functools.partial(sock.recv_into, target))
        at += size
        if not size:
            break
    return bytes(found[:at])


class TlsSocket:
    """TLS over a non-blocking socket, in large pieces: `ssl.SSLSocket` makes two system calls per 16 KiB."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, serves: bool) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=serves)
        self._received = memoryview(bytearray(_TLS_NBYTES))
        self._unsent = memoryview(b"")
        self.family = sock.family
        self.setsockopt, self.shutdown, self.fileno = sock.setsockopt, sock.shutdown, sock.fileno
        self.getpeername, self.getsockname, self.close = sock.getpeername, sock.getsockname, sock.close

    async def shake_hands(self) -> bytes:
        """Shake hands; return the peer's certificate (DER, empty if none). OSError if it speaks no TLS or hangs up."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await when_ready(self, self.flush, writes=True)
                if not await when_ready(self, self._fill):
                    raise ConnectionResetError(errno.ECONNRESET, "the connection was closed") from None
            else:
                await when_ready(self, self.flush, writes=True)
                return self._tls.getpeercert(binary_form=True) or b""

    def recv_into(self, target: memoryview) -> int:
        """See `socket.socket.recv_into`."""
        while True:
            try:
                size: Any = self._tls.read(len(target), target)
                return int(size)
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLWantReadError:
                if not self._fill():
                    return 0

    def sendmsg(self, parts: Sequence[Buffer]) -> int:
        """Encrypt the parts, or their beginning; see `socket.socket.sendmsg`, and `flush`."""
        self.flush()
        taken = 0
        with contextlib.suppress(BlockingIOError):
            for part in parts:
                view, at = memoryview(part), 0
                while at < len(view):
                    size = self._tls.write(view[at:])
                    at += size
                    taken += size
                    if self._outgoing.pending >= _TLS_NBYTES:
                        self.flush()
            self.flush()
        return taken

    def flush(self) -> None:
        """Send the encrypted data; raise `BlockingIOError` if the kernel does not accept all of it."""
        while self._unsent or self._outgoing.pending:
            self._unsent = self._unsent or memoryview(self._outgoing.read())
            self._unsent = self._unsent[self._sock.send(self._unsent) :]

    def _fill(self) -> int:
        """Receive data; return the number of bytes received, 0 at the end of the stream."""
        nbytes = self._sock.recv_into(self._received)
        self._incoming.write(self._received[:nbytes])
        return nbytes


Socket: TypeAlias = socket.socket | TlsSocket


@dataclass(eq=False, slots=True)
class Frame:
    """A frame in the queue."""

    parts: list[Buffer]
    sent: Callable[[], None] | None
    begun: bool = False  # whether a part of it has been sent


class FrameSocket:
    """Sends and receives frames over a connected socket. Used on the event loop.

    Small frames that are ready together are sent in one system call, and the tensors of a large frame are sent without
    a copy.

    Args:
        sock: A connected, non-blocking socket, after the handshakes.
        begin: Called with the kind, number and size of a frame before its body arrives; returns whether to keep the
            frame, and may raise `ProtocolError`. Memory is reserved only for frames that are kept.
        take: Called with the kind, number and read-only body of each frame that was kept; may raise `ProtocolError`.
        ended: Called once, with the reason, when the connection has ended, even if `close` ended it.
    """

    def __init__(
        self,
        sock: Socket,
        begin: Callable[[int, int, int], bool],
        take: Callable[[int, int, memoryview], None],
        ended: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._begin = begin
        self._take = take
        self._ended = ended
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self.heard_at = self.moved_at = self._loop.time()  # when bytes were last received, and last received or sent
        self._stage = memoryview(bytearray(_STAGE_NBYTES))
        self._staged = 0
        self._kind = self._number = self._filled = self._dropping = 0
        self._body: memoryview | None = None  # of the arriving frame, if it is larger than the stage
        self._paused = self._finishing = False
        self._out: deque[Frame] = deque()
        self._flushing = False  # whether `_flush` is scheduled, for the end of this turn or when there is room
        self._writer_added = False
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)
            with contextlib.suppress(OSError):  # the peer may have gone
                if sock.getpeername()[0] == sock.getsockname()[0]:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_QUEUE_NBYTES)
        self._loop.add_reader(sock, self._on_readable)

    @property
    def pending(self) -> int:
        """Number of frames that wait to be sent."""
        return len(self._out)

    def send(
        self, kind: FrameKind, number: int, body: Sequence[Buffer] = (), sent: Callable[[], None] | None = None
    ) -> Frame:
        """Queue a frame to be sent. Its parts must not change until `sent` is called."""
        prefix = _PREFIX.pack(kind, number, sum([memoryview(part).nbytes for part in body]))
        frame = Frame([prefix, *body], sent)
        if not self.closed:
            self._out.append(frame)
            if not self._flushing:
                self._flushing = True
                self._loop.call_soon(self._flush)
        return frame

    def withdraw(self, frame: Frame) -> bool:
        """Withdraw a frame; return False if part of it has been sent."""
        if not frame.begun:
            frame.parts, frame.sent = [], None
        return not frame.begun

    def pause(self) -> None:
        """Stop receiving until `resume`; frames that have arrived are still delivered."""
        if not self._paused and not self.closed:
            self._paused = True
            self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        """Receive again."""
        if self._paused and not self.closed:
            self._paused = False
            self._loop.add_reader(self._sock, self._on_readable)
            self._loop.call_soon(self._on_readable)  # data that TLS has read ahead does not make the socket ready

    def finish(self) -> None:
        """Send pending frames and the end of the stream; drop received data until the peer ends the connection.

        If unread bytes from the peer are in the buffer, closing at once would make the kernel drop data in flight.
        """
        self._finishing = True
        self.resume()
        if not self.closed and not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self, why: str = "closed") -> None:
        """End the connection. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # forked children, such as a DataLoader's workers, have it too
        self._sock.close()
        self._out.clear()
        self._body = None
        self._ended(why)

    def _on_readable(self) -> None:
        try:
            for _ in range(_MOST_CALLS):
                if self._paused or self.closed or not self._receive():
                    return
            self._loop.call_soon(self._on_readable)
        except BlockingIOError:
            pass
        except Exception as exc:  # noqa: BLE001 - whatever it is, see `_fail`
            self._fail(exc)

    def _fail(self, exc: Exception) -> None:
        """End the connection after an error; if the connection stayed open, the callback would run and fail again."""
        if not isinstance(exc, OSError | ProtocolError):
            logger.error("a connection failed unexpectedly", exc_info=exc)
        self.close(getattr(exc, "strerror", None) or str(exc) or type(exc).__name__)

    def _receive(self) -> bool:
        """Receive once; return whether more data may be available."""
        body = self._body if not self._finishing else None
        self._staged = self._staged if not self._finishing else 0
        target = self._stage[self._staged :] if body is None else body[self._filled :]
        nbytes = self._sock.recv_into(target)
        if not nbytes:
            self.close("the peer closed the connection")
            return False
        self.heard_at = self.moved_at = self._loop.time()
        if self._finishing:
            return True
        if body is None:
            self._staged += nbytes
            self._parse()
        else:
            self._filled += nbytes
            if self._filled == len(body):
                self._body = None
                self._take(self._kind, self._number, body.toreadonly())
        return self._tls is not None or nbytes == len(target)

    def _parse(self) -> None:
        """Deliver the frames in the receive buffer (the stage)."""
        at = 0
        while not self.closed:
            step = min(self._dropping, self._staged - at)
            self._dropping -= step
            at += step
            if self._staged - at < _PREFIX.size:
                break
            kind, number, nbytes = _PREFIX.unpack_from(self._stage, at)
            at += _PREFIX.size
            if not self._begin(kind, number, nbytes):
                self._dropping = nbytes
                continue
            # Not a bytearray, which would be filled with zeros first. Pages are used as bytes arrive.
            body = np.empty(nbytes, np.uint8).data
            step = min(nbytes, self._staged - at)
            body[:step] = self._stage[at : at + step]
            at += step
            if step < nbytes:
                self._kind, self._number, self._body, self._filled = kind, number, body, step
                break
            self._take(kind, number, body.toreadonly())
        left = self._staged - at
        if at and left:
            self._stage[:left] = self._stage[at : self._staged]
        self._staged = left

    def _flush(self) -> None:
        if self.closed:
            return
        try:
            while self._out:
                parts = list(itertools.islice((part for frame in self._out for part in frame.parts), _MOST_PARTS))
                nbytes = self._sock.sendmsg(parts) if parts else 0
                self.moved_at = self._loop.time()
                self._advance(nbytes)
            if self._tls is not None:
                self._tls.flush()
            if self._finishing:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            if not self._writer_added:
                self._writer_added = True
                self._loop.add_writer(self._sock, self._flush)
            return
        except Exception as exc:  # noqa: BLE001 - whatever it is, see `_fail`
            self._fail(exc)
            return
        self._flushing = False
        if self._writer_added:
            self._writer_added = False
            self._loop.remove_writer(self._sock)

    def _advance(self, nbytes: int) -> None:
        while self._out:
            frame = self._out[0]
            parts = frame.parts
            done = 0
            while done < len(parts) and (size := memoryview(parts[done]).nbytes) <= nbytes:
                nbytes -= size
                done += 1
            frame.begun = frame.begun or done > 0 or nbytes > 0
            del parts[:done]
            if parts:
                if nbytes:
                    parts[0] = memoryview(parts[0])[nbytes:]
                return
            self._out.popleft()
            if frame.sent is not None:
                frame.sent()
