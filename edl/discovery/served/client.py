"""Calls to a served Store, with every error of gRPC's translated here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from edl.discovery.common.call_thread import CallThread
from edl.discovery.common.resource import Resource
from edl.discovery.served.target import FORMAT, SERVICE, ServedTarget
from edl.errors import ClosedError, DiscoveryError, SettingsError
from edl.protocol import store as messages
from edl.protocol.channel import Metadata, call_metadata, channel
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.tls.handshake import explain_handshake, looks_like_handshake
from edl.protocol.transport import grpc
from edl.quoting import shown

__all__ = ["StoreClient", "StoreRefusalError", "WatchCall"]

R = TypeVar("R", bound=Message)

_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # Another process of the server's host may take over within a fraction of a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # which is how long an attempt to connect may take, too
    # A host that vanished sends nothing: watches are to end, and say so.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # else channels of one process share a connection, and its backoff
)


class StoreRefusalError(DiscoveryError):
    """What answers is no store of EDL, or takes no calls without a token that is valid there."""


class StoreClient(Resource):
    """Calls to a server. Closing it ends calls that are under way. Thread-safe.

    All methods raise DiscoveryError when the server cannot be reached, or refuses.
    """

    def __init__(self, target: ServedTarget) -> None:
        super().__init__()
        self.target = target
        self._files = CredentialFiles.of(target.credentials)
        self._metadata()  # refuse at once a token that would cross the network as it is
        self._making = threading.Lock()
        self._answered = False
        self._version = self._material_version
        self._channel = channel(target.endpoint, self._files, _OPTIONS)
        self._calls = self._own(CallThread("edl-store-calls"))

    def call(self, method: str, request: Message, reply: type[R], timeout_s: float | None = None) -> R:
        """Make a unary call."""
        self._check()
        return self._calls.run(lambda: self._call_here(method, request, reply, timeout_s))

    def gather(self, prefix: str) -> list[messages.WatchReply]:
        """Ask once what is under a prefix."""
        self._check()
        return self._calls.run(lambda: list(self.watch(prefix, once=True)))

    def _call_here(self, method: str, request: Message, reply: type[R], timeout_s: float | None) -> R:
        try:
            path = f"/{SERVICE}/{method}"
            made: Any = self._current().unary_unary(path, _serialize, reply.FromString)
            answer: R = made(request, timeout=timeout_s or self.target.timeout_s, metadata=self._metadata())
        except grpc.RpcError as exc:
            raise self.translated(exc) from exc
        except ValueError as exc:  # gRPC's way to say that a channel is closed
            raise ClosedError(f"the connection to {self.target} is closed") from exc
        self._answered = True
        return answer

    def watch(self, prefix: str, *, once: bool = False) -> WatchCall:
        """Follow a prefix, until the call is cancelled or fails. Waits for nothing. Not for the main thread."""
        self._check()
        try:
            made: Any = self._current().unary_stream(f"/{SERVICE}/Watch", _serialize, messages.WatchReply.FromString)
            request = messages.WatchRequest(prefix=prefix, once=once)
            timeout_s = self.target.timeout_s if once else None
            return WatchCall(self, made(request, timeout=timeout_s, metadata=self._metadata()))
        except ValueError as exc:
            raise ClosedError(f"the connection to {self.target} is closed") from exc

    def hello(self) -> messages.HelloReply:
        """Ask who serves.

        Raises:
            SettingsError: it is a server of another version of EDL.
        """
        reply = self.call("Hello", messages.HelloRequest(), messages.HelloReply)
        if reply.format != FORMAT:
            raise SettingsError(
                f"{self.target} is served by another version of EDL (protocol {reply.format}, not {FORMAT}): "
                "install the same version on all nodes"
            )
        return reply

    def translated(self, exc: grpc.RpcError) -> DiscoveryError | ClosedError:
        """EDL's error for gRPC's."""
        if self._closed:
            return ClosedError(f"the connection to {self.target} is closed")
        code, words = exc.code(), shown(exc.details() or "")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DiscoveryError(f"{self.target} did not answer within {self.target.timeout_s:g} s")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return StoreRefusalError(
                f"{self.target.endpoint} is a gRPC server, and no store of EDL: another program has this port"
            )
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return StoreRefusalError(
                f"{self.target} refuses this process: {words}; name the file of its tokens in EDL_TOKEN_FILE"
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return DiscoveryError(f"{self.target} is full: {words}")
        if code is grpc.StatusCode.UNAVAILABLE:
            return DiscoveryError(f"{self.target} cannot be reached: {self._explained(words)}")
        return DiscoveryError(f"{self.target}: {words or code.name}")

    def _explained(self, words: str) -> str:
        """Return what is wrong with TLS or certificates, where no call was answered yet; else gRPC's words."""
        if self._answered or not looks_like_handshake(words):
            return words
        try:
            return asyncio.run(explain_handshake(self.target.endpoint, self._files)) or words
        except RuntimeError:  # called from inside an event loop
            return words

    @property
    def files(self) -> CredentialFiles | None:
        """What this side shows and believes."""
        return self._files

    @property
    def _material_version(self) -> int:
        return 0 if self._files is None else self._files.current().version

    def _metadata(self) -> Metadata:
        return call_metadata(self.target.endpoint, self._files)

    def _current(self) -> grpc.Channel:
        """Return the channel, made anew where certificates were replaced: a channel keeps what it began with."""
        if self._version != self._material_version:
            with self._making:
                version = self._material_version
                if self._version != version and not self._closed:
                    before, self._channel = self._channel, channel(self.target.endpoint, self._files, _OPTIONS)
                    self._version = version
                    before.close()
        return self._channel

    def _halt(self) -> None:
        self._channel.close()  # which ends the calls that are under way

    def _release(self) -> None:
        self._channel.close()  # one that was made anew meanwhile


class WatchCall:
    """The states of a prefix as they come; iterating raises DiscoveryError where the connection fails."""

    def __init__(self, client: StoreClient, call: Any) -> None:
        self._client = client
        self._call = call

    def __iter__(self) -> Iterator[messages.WatchReply]:
        try:
            yield from self._call
        except grpc.RpcError as exc:
            raise self._client.translated(exc) from exc

    def cancel(self) -> None:
        """Have the iteration end soon."""
        self._call.cancel()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
