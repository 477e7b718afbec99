"""The server's end of the tensor channel (`edl.protocol.frames`), which students use in place of a gRPC stream.

A student asks for a token over gRPC, where its credentials have been checked, and opens its channel with the token. A
connection without a valid token occupies a socket for some seconds, and the server reads nothing from it but the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edl.errors import ProtocolError, SettingsError
from edl.protocol.codec import Buffer
from edl.protocol.frames import (
    MAGIC,
    TOKEN_NBYTES,
    FrameKind,
    FrameSocket,
    Socket,
    TlsSocket,
    body_parts,
    receive_exactly,
    split_body,
)
from edl.protocol.tls import CredentialFiles, certificates_in
from edl.protocol.transport import grpc
from edl_serving.admission import ClientConnection
from edl_serving.request_error import RequestError, invalid_argument

if TYPE_CHECKING:
    from edl_serving.inference import Call, InferenceServicer

_log = logging.getLogger(__name__)

_TOKEN_S = 10.0  # lifetime of a token that opens a channel
_MOST_TOKENS = 1024
_MOST_TOKENS_OF_CLIENT = 4
_HANDSHAKE_S = 5.0
_MOST_HANDSHAKES = 128
_ACCEPT_AGAIN_S = 1.0  # after an error, such as too many open files
_WINDOW = 1024  # requests of a channel that are processed at a time; the others wait in the connection
_MOST_UNSENT = 256  # frames for a client that does not read: from here on nothing is received from it
_FINISH_S = 5.0  # how long a client may take to read its last answers
_FLUSH_S = 0.25  # time to send what is ready when the server stops


@dataclass(frozen=True)
class _Offer:
    call: Call
    proof: bytes
    until: float  # on the monotonic clock


class ChannelListener:
    """Issues tokens to students, and serves the channels that students open with the tokens."""

    def __init__(self, handler: InferenceServicer, files: CredentialFiles | None, max_age_s: float) -> None:
        self._handler = handler
        self._max_age_s = max_age_s  # of a channel with mutual TLS
        self._files = files if files is not None and files.tls else None
        self._tls: tuple[int, ssl.SSLContext, str] | None = None  # of a version of the files; digest of the certificate
        self._offers: dict[bytes, _Offer] = {}  # by token, in the order of their expiry
        self._listeners: list[socket.socket] = []
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[_ServerChannel] = set()
        self._port = 0

    def listen(self, host: str, port: int) -> None:
        """Listen on a TCP port (0 for any free port); raise SettingsError if the server cannot listen there."""
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        places = [(family, place[0], False) for family, _, _, _, place in found]
        if places[0][1] in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():  # gRPC takes either for IPv4 and IPv6
            places.insert(0, (socket.AF_INET6, "::", True))
        for family, name, both in places:
            address = name, self._port or port
            try:
                listener = socket.create_server(address, family=family, backlog=_MOST_HANDSHAKES, dualstack_ipv6=both)
            except OSError as exc:
                if self._port or both:  # students reach the name by its first address; this host may lack IPv6
                    continue
                raise SettingsError(
                    f"cannot listen on {host}:{port} for tensors: {exc.strerror}; give another --channel-port, or 0"
                ) from exc
            self._port = listener.getsockname()[1]
            listener.setblocking(False)
            self._listeners.append(listener)
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def offer(self, call: Call) -> bytes:
        """Return the answer to `names.OPEN_CHANNEL`; refuse the call if too many channels are open."""
        clients = self._handler.clients
        clients.close_call(clients.open_call(call.client, stream=True), stream=True)
        now = time.monotonic()
        for token in [token for token, offer in self._offers.items() if offer.until <= now]:
            del self._offers[token]
        own = [token for token, offer in self._offers.items() if offer.call.client == call.client]
        if len(own) >= _MOST_TOKENS_OF_CLIENT:
            del self._offers[own[0]]
        if len(self._offers) >= _MOST_TOKENS:  # a student uses its token within milliseconds
            del self._offers[next(iter(self._offers))]
        token, proof = secrets.token_bytes(TOKEN_NBYTES), secrets.token_bytes(TOKEN_NBYTES)
        certificate = self._context()[1] if self._files is not None else ""
        self._offers[token] = _Offer(call, proof, now + _TOKEN_S)
        found = {"port": self._port, "token": token.hex(), "proof": proof.hex(), "certificate": certificate}
        return json.dumps(found).encode()

    def _context(self) -> tuple[ssl.SSLContext, str]:
        """Return a TLS context and its certificate's SHA-256; RequestError if the current files cannot be used."""
        assert self._files is not None
        material = self._files.current()
        if self._tls is None or self._tls[0] != material.version:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                context.load_cert_chain(self._files.settings.cert or "", self._files.settings.key)
            except (OSError, ssl.SSLError) as exc:  # the files are being replaced
                raise RequestError(grpc.StatusCode.UNAVAILABLE, f"the certificate cannot be used: {exc}") from exc
            assert material.pair is not None, "a server with TLS has a certificate"
            leaf = certificates_in(material.pair[0])[0]
            self._tls = material.version, context, hashlib.sha256(leaf).hexdigest()
        return self._tls[1:]

    def end_channels(self) -> None:
        """End all channels once their pending answers are sent, and invalidate the tokens of unopened channels."""
        self._offers.clear()
        for channel in self._channels:
            channel.end()

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self.end_channels()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_FLUSH_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            _log.warning("new tensor channels cannot be opened: %s; trying again", os.strerror(exc.errno or errno.EIO))
            loop.remove_reader(listener)
            loop.call_later(_ACCEPT_AGAIN_S, self._accept_again, listener)
            return
        if len(self._handshakes) >= _MOST_HANDSHAKES:
            next(iter(self._handshakes)).cancel()
        sock.setblocking(False)
        task = loop.create_task(self._serve(sock))
        self._handshakes[task] = None
        task.add_done_callback(lambda task: self._handshakes.pop(task, None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def _serve(self, plain: socket.socket) -> None:
        with plain:
            try:
                sock, offer = await asyncio.wait_for(self._shake_hands(plain), _HANDSHAKE_S)
            except (OSError, asyncio.TimeoutError, RequestError):
                return
            task = asyncio.current_task()
            if task is not None:
                self._handshakes.pop(task, None)
            if offer is None:
                return
            handler = self._handler
            try:
                client = handler.clients.open_call(offer.call.client, stream=True)
            except RequestError as exc:
                handler.metrics.record_rejected_call(exc)
                return
            channel = _ServerChannel(handler, offer.call, client, sock)
            self._channels.add(channel)
            aged = None
            if self._files is not None and self._files.current().ca is not None:
                aged = asyncio.get_running_loop().call_later(self._max_age_s, channel.end)
            try:
                await channel.run()
            finally:
                if aged is not None:
                    aged.cancel()
                self._channels.discard(channel)
                handler.clients.close_call(client, stream=True)

    async def _shake_hands(self, plain: socket.socket) -> tuple[Socket, _Offer | None]:
        """Return the connection (over TLS if TLS is on), and the offer for its token (None for an invalid token)."""
        sock: Socket = plain
        if self._files is not None:
            sock = TlsSocket(plain, self._context()[0], serves=True)
            await sock.shake_hands()
        found = await receive_exactly(sock, len(MAGIC) + TOKEN_NBYTES)
        offer = self._offers.pop(found[len(MAGIC) :], None) if found.startswith(MAGIC) else None
        if offer is None or offer.until <= time.monotonic():
            return sock, None
        sock.sendmsg([offer.proof])  # a new connection has room for it
        return sock, offer


class _ServerChannel:
    """Answers the requests on a channel, each as soon as its result is ready. An error ends only its own request."""

    def __init__(self, handler: InferenceServicer, call: Call, client: ClientConnection, sock: Socket) -> None:
        self._handler = handler
        self._call = call
        self._client = client
        # For each request until its answer is sent: undoes what the lifecycle and the client's limit count for it.
        self._counted: dict[int, contextlib.ExitStack] = {}
        self._computing: dict[int, asyncio.Task[None]] = {}
        self._done = asyncio.Event()
        self._ending = False
        self._socket = FrameSocket(sock, self._begin, self._take, lambda _: self._done.set())

    async def run(self) -> None:
        try:
            await self._done.wait()
            if not self._socket.closed:
                self._done.clear()
                self._socket.finish()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._done.wait(), _FINISH_S)
        finally:
            self._socket.close()
            tasks = list(self._computing.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for number in list(self._counted):
                self._release(number)

    def end(self) -> None:
        """Stop accepting requests, and close the channel after the last answer."""
        self._ending = True
        self._adjust()
        self._end_if_idle()

    def _adjust(self) -> None:
        """Receive only while there is room for more requests and the client is reading its answers."""
        is_full = len(self._computing) >= _WINDOW or self._socket.pending >= _MOST_UNSENT
        if self._ending or is_full:
            self._socket.pause()
        else:
            self._socket.resume()

    def _end_if_idle(self) -> None:
        if self._ending and not self._computing and not self._socket.pending:
            self._done.set()

    def _begin(self, kind: int, number: int, nbytes: int) -> bool:
        if kind != FrameKind.REQUEST:
            if kind not in (FrameKind.CANCEL, FrameKind.PING) or nbytes:
                raise ProtocolError(f"malformed message: a frame of kind {kind} and {nbytes:,} bytes")
            return True
        if number in self._counted or number in self._computing:
            raise ProtocolError(f"malformed message: a second request with the number {number:016x}")
        try:
            most = self._handler.model.max_message_bytes
            if nbytes > most:
                raise invalid_argument(f"a request of {nbytes:,} bytes exceeds {most:,} (edl serve --max-message)")
            self._client.hold_bytes(nbytes)
        except RequestError as exc:
            self._refuse(exc, number, nbytes)
            return False
        self._counted[number] = contextlib.ExitStack()
        self._counted[number].callback(self._client.release_bytes, nbytes)
        return True

    def _take(self, kind: int, number: int, body: memoryview) -> None:
        if kind == FrameKind.PING:
            self._socket.send(FrameKind.PONG, number, (), self._adjust)
            self._adjust()
        elif kind == FrameKind.CANCEL:
            if number in self._computing:
                self._computing[number].cancel()
        else:
            self._accept(number, body)

    def _accept(self, number: int, body: memoryview) -> None:
        try:
            self._handler.lifecycle.begin_request()
        except RequestError as exc:
            self._refuse(exc, number, len(body))
            return
        self._counted[number].callback(self._handler.lifecycle.end_request)
        task = asyncio.get_running_loop().create_task(self._respond(number, body))
        self._computing[number] = task
        task.add_done_callback(lambda task: self._computed(number, task))
        self._adjust()

    async def _respond(self, number: int, body: memoryview) -> None:
        nbytes, request_id = len(body), f"{number:016x}"
        try:
            header, raw = split_body(body)
        except ProtocolError as exc:
            self._refuse(invalid_argument(str(exc)), number, nbytes)
            return
        answer = await self._handler.answer(self._call, header, raw, nbytes, request_id, None, _join_body)
        if isinstance(answer, RequestError):
            self._send_error(answer, number)
            return
        self._client.nbytes += len(answer)
        self._counted[number].callback(self._client.release_bytes, len(answer))
        self._send(FrameKind.ANSWER, number, [answer])

    def _computed(self, number: int, task: asyncio.Task[None]) -> None:
        """Clean up after a request, whose answer may still wait to be sent."""
        del self._computing[number]
        if task.cancelled():  # counted here, since a request that is cancelled at once never runs
            self._handler.metrics.record_outcome("cancelled")
            self._release(number)
        elif (error := task.exception()) is not None:
            _log.error("a request of %s failed unexpectedly", self._call.client, exc_info=error)
            self._send_error(RequestError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"), number)
        self._adjust()
        self._end_if_idle()

    def _release(self, number: int) -> None:
        if (counted := self._counted.pop(number, None)) is not None:
            counted.close()
        self._adjust()
        self._end_if_idle()

    def _refuse(self, error: RequestError, number: int, nbytes: int) -> None:
        self._handler.record_error(error, self._call, f"{number:016x}", nbytes)
        self._send_error(error, number)

    def _send_error(self, error: RequestError, number: int) -> None:
        found = {"status": error.code.name, "message": error.message, "retry_after_ms": error.retry_after_ms}
        self._send(FrameKind.ERROR, number, [json.dumps(found).encode()])

    def _send(self, kind: FrameKind, number: int, body: Sequence[Buffer]) -> None:
        counted = number in self._counted  # otherwise, another request may have this number by then
        self._socket.send(kind, number, body, (lambda: self._release(number)) if counted else self._adjust)
        self._adjust()


def _join_body(header: bytes, raw: Sequence[Buffer]) -> bytes:
    return b"".join(body_parts(header, raw))
