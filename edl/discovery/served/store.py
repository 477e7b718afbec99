"""The gRPC client of a store that another process serves, with URLs such as `edl://HOST:PORT`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from typing_extensions import override

from edl.discovery.store import Claim, Entries, Entry, Store, held_by_another
from edl.discovery.store_url import StoreUrl
from edl.discovery.watching import Follower
from edl.errors import ClosedError, DiscoveryError, LeaseLostError, SettingsError
from edl.protocol import store as messages
from edl.protocol.channel import CLIENT_OPTIONS, Metadata, call_metadata, channel
from edl.protocol.tls import CredentialFiles, explain_handshake
from edl.protocol.transport import grpc
from edl.quoting import shown
from edl.resource import Resource
from edl.settings import Credentials

R = TypeVar("R", bound=Message)

SERVICE: Final = "edl.store.v1.Store"
FORMAT: Final = 1
"""Version of the protocol. A client with a different version gets an error, because it would misread answers."""

DEFAULT_PORT: Final = 29400
"""torch's own default port for a rendezvous (`torch.distributed.elastic`)."""


def store_credentials(credentials: Credentials) -> Credentials:
    """Return the credentials for a served store: tokens, and mutual TLS if all its files are set.

    If only a CA, or only a certificate and its key, is set, the settings are meant for connections to teachers.
    """
    if credentials.ca and credentials.cert:
        return credentials
    return Credentials(token_file=credentials.token_file, allow_insecure_tokens=credentials.allow_insecure_tokens)


@dataclass(frozen=True)
class ServedTarget:
    """A served store as a client sees it; a call may take `timeout_s` seconds."""

    host: str
    port: int
    timeout_s: float
    credentials: Credentials = field(default_factory=Credentials)  # mutual TLS, tokens, both or neither
    offered: Credentials = field(default_factory=Credentials)  # also an incomplete set for mutual TLS

    def __str__(self) -> str:
        return f"the store at {self.endpoint}"

    @property
    def endpoint(self) -> str:
        """Host and port in the form that gRPC accepts."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, url: StoreUrl, timeout_s: float, credentials: Credentials | None = None) -> ServedTarget:
        """Return the target for a URL; `credentials` default to those in the environment."""
        ((host, port),) = url.servers
        offered = Credentials.of() if credentials is None else credentials
        return cls(host, port or DEFAULT_PORT, timeout_s, store_credentials(offered), offered)


class StoreRefusalError(DiscoveryError):
    """The server is not an EDL store, or refuses this process's token."""


class _NoAnswerError(DiscoveryError):
    """A call took longer than its time limit."""


class StoreClient(Resource):
    """Calls a server; DiscoveryError if it is down or refuses a call. Closing ends pending calls. Thread-safe."""

    def __init__(self, target: ServedTarget) -> None:
        super().__init__()
        self.target = target
        self._files = CredentialFiles.of(target.credentials)
        self._metadata()  # refuse at once a token that would cross the network unencrypted
        self._making = threading.Lock()
        self._answered = False
        self._version = self._material_version
        self._channel = channel(target.endpoint, self._files, CLIENT_OPTIONS)

    def call(self, method: str, request: Message, reply: type[R], timeout_s: float | None = None) -> R:
        """Make a unary call."""
        self._check()
        try:
            path = f"/{SERVICE}/{method}"
            made: Any = self._current().unary_unary(path, _serialize, reply.FromString)
            answer: R = made(request, timeout=timeout_s or self.target.timeout_s, metadata=self._metadata())
        except grpc.RpcError as exc:
            raise self._translated(exc) from exc
        except ValueError as exc:  # how gRPC reports a closed channel
            raise ClosedError(f"the connection to {self.target} is closed") from exc
        self._answered = True
        return answer

    def gather(self, method: str, request: Message, reply: type[R]) -> list[R]:
        """Make a call that a stream of messages answers; return all messages."""
        self._check()
        return list(self.replies(self._stream(method, request, reply, self.target.timeout_s)))

    def watch(self, prefix: str, timeout_s: float | None = None) -> Any:
        """Return a gRPC call that follows a prefix until it is cancelled."""
        self._check()
        return self._stream("Watch", messages.WatchRequest(prefix=prefix), messages.WatchReply, timeout_s)

    def _stream(self, method: str, request: Message, reply: type[R], timeout_s: float | None) -> Any:
        try:
            made: Any = self._current().unary_stream(f"/{SERVICE}/{method}", _serialize, reply.FromString)
            return made(request, timeout=timeout_s, metadata=self._metadata())
        except ValueError as exc:
            raise ClosedError(f"the connection to {self.target} is closed") from exc

    def replies(self, call: Any) -> Iterator[Any]:
        """Yield the answers of a streaming call."""
        try:
            yield from call
        except grpc.RpcError as exc:
            raise self._translated(exc) from exc

    def hello(self) -> messages.HelloReply:
        """Ask which process serves; raise SettingsError if the server runs another version of EDL."""
        reply = self.call("Hello", messages.HelloRequest(), messages.HelloReply)
        if reply.format != FORMAT:
            raise SettingsError(
                f"{self.target} is served by another version of EDL (protocol {reply.format}, not {FORMAT}): "
                "install the same version on all nodes"
            )
        return reply

    def _translated(self, exc: grpc.RpcError) -> DiscoveryError | ClosedError:
        if self._closed:
            return ClosedError(f"the connection to {self.target} is closed")
        code, words = exc.code(), shown(exc.details() or "")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return _NoAnswerError(f"{self.target} did not answer within {self.target.timeout_s:g} s")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return StoreRefusalError(
                f"{self.target.endpoint} is a gRPC server, but not an EDL store: another program uses this port"
            )
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return StoreRefusalError(
                f"{self.target} refuses this process: {words}; set EDL_TOKEN_FILE to the file with the store's tokens"
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return DiscoveryError(f"{self.target} is full: {words}")
        if code is grpc.StatusCode.UNAVAILABLE:
            return DiscoveryError(f"{self.target} cannot be reached: {self._explained(words)}")
        return DiscoveryError(f"{self.target}: {words or code.name}")

    def _explained(self, words: str) -> str:
        """Return what is wrong with TLS or certificates if no call has been answered yet; else gRPC's error message."""
        return words if self._answered else self.explain_tls(words) or words

    def explain_tls(self, words: str | None = None) -> str:
        """Connect once more, and return what is wrong with TLS or certificates; empty if nothing is wrong."""
        words = explain_handshake(words, self.target.endpoint, self._files)
        if not words or self.target.credentials.ca:
            return words
        offered = self.target.offered
        material = {"EDL_TLS_CA": offered.ca, "EDL_TLS_CERT": offered.cert, "EDL_TLS_KEY": offered.key}
        return (
            f"{self.target.endpoint} speaks TLS, and a store's TLS is mutual: it requires a client certificate. Set"
            " EDL_TLS_CA, EDL_TLS_CERT and EDL_TLS_KEY, or --tls-ca, --tls-cert and --tls-key if a command has them;"
            f" missing now: {', '.join(name for name, value in material.items() if not value)}"
        )

    @property
    def _material_version(self) -> int:
        return 0 if self._files is None else self._files.current().version

    def _metadata(self) -> Metadata:
        return call_metadata(self.target.endpoint, self._files)

    def _current(self) -> grpc.Channel:
        """Return the channel; a new one if certificates were replaced, as a channel keeps its initial certificates."""
        if self._version != self._material_version:
            with self._making:
                version = self._material_version
                if self._version != version and not self._closed:
                    before, self._channel = self._channel, channel(self.target.endpoint, self._files, CLIENT_OPTIONS)
                    self._version = version
                    before.close()
        return self._channel

    def _halt(self) -> None:
        self._channel.close()  # ends pending calls

    def _release(self) -> None:
        self._channel.close()  # a channel that `_current` made meanwhile


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


# --- The store ---


class ServedStore(Store):
    """See `Store`. Opening it sends no request to the server."""

    def __init__(self, target: ServedTarget) -> None:
        super().__init__()
        self._target = target
        self.client: Final = self._own(StoreClient(target))

    def __repr__(self) -> str:
        return f"ServedStore('edl://{self._target.endpoint}')"

    @override
    def grant(self, ttl_s: float) -> Claim:
        return _GrantedClaim(self.client, ttl_s)

    @override
    def owns(self, claim: Claim) -> bool:
        return isinstance(claim, _GrantedClaim) and claim.client.target.endpoint == self._target.endpoint

    @override
    def read(self, key: str) -> Entry | None:
        reply = self.client.call("Get", messages.GetRequest(key=key), messages.GetReply)
        return _entry(reply.entry) if reply.HasField("entry") else None

    @override
    def read_all(self, prefix: str) -> Sequence[Entry]:
        entries: dict[str, Entry] = {}
        partial = True
        for reply in self.client.gather("Watch", messages.WatchRequest(prefix=prefix, once=True), messages.WatchReply):
            partial = _apply(reply, entries)
        if partial:
            raise DiscoveryError(f"{self._target} broke off in the middle of an answer")
        return [entries[key] for key in sorted(entries)]

    @override
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        number = claim.number if isinstance(claim, _GrantedClaim) else None
        request = messages.SetRequest(key=key, value=value, lease=number, version=expected)
        reply = self.client.call("Set", request, messages.SetReply)
        outcome = messages.SetReply.Outcome
        if reply.outcome == outcome.WRITTEN:
            return Entry(key, value, reply.version)
        if reply.outcome == outcome.OTHER_VERSION:
            return None
        if reply.outcome == outcome.HELD:
            raise held_by_another(key)
        if reply.outcome == outcome.LEASE_LOST:
            raise LeaseLostError("the lease has expired")
        raise DiscoveryError(f"{self._target} gave an answer that this version of EDL does not know: {reply.outcome}")

    @override
    def remove(self, key: str, version: int | None) -> bool:
        return self.client.call(
            "Delete", messages.DeleteRequest(key=key, version=version), messages.DeleteReply
        ).deleted

    @override
    def series(self) -> Iterator[tuple[str, list[dict[str, float]]]]:
        return map(points_of, self.client.gather("Series", messages.SeriesRequest(), messages.SeriesReply))

    @override
    def follow(self, prefix: str) -> Follower[Entries]:
        return _PushFollower(self.client, prefix)


def points_of(reply: messages.SeriesReply) -> tuple[str, list[dict[str, float]]]:
    """Return the name and the points of a series."""
    rows = zip(*[iter(reply.values)] * len(reply.fields), strict=True)
    return reply.name, [dict(zip(reply.fields, row, strict=True)) for row in rows]


class _GrantedClaim(Claim):
    def __init__(self, client: StoreClient, ttl_s: float) -> None:
        super().__init__()
        self.client = client
        self.number = client.call("Grant", messages.GrantRequest(ttl_s=ttl_s), messages.GrantReply).lease

    @override
    def renew(self) -> bool:
        return self.client.call("Renew", messages.RenewRequest(lease=self.number), messages.RenewReply).renewed

    @override
    def withdraw(self) -> None:
        self.client.call("Revoke", messages.RevokeRequest(lease=self.number), messages.RevokeReply)


class _PushFollower(Follower[Entries]):
    """Reads the changes that the server pushes. The server first sends the whole state, then only changes."""

    def __init__(self, client: StoreClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._closed = False
        self._call: Any = None

    @override
    def next(self, wait_s: float | None) -> Entries:
        if self._call is not None and wait_s is not None:  # a stream has one deadline, from its start
            self._call.cancel()
            self._call = None
        if self._call is None:
            self._entries: dict[str, Entry] = {}
            self._partial = True
            self._call = self._client.watch(self._prefix, timeout_s=wait_s)
            self._replies = self._client.replies(self._call)
            if self._closed:  # `close` ran before there was a call to cancel
                self._call.cancel()
        try:
            for reply in self._replies:
                self._partial = _apply(reply, self._entries)
                if not self._partial:
                    return dict(self._entries)
        except _NoAnswerError:
            self._call = None
            if wait_s is None or self._partial:
                raise
            return dict(self._entries)
        except BaseException:
            self._call = None
            raise
        self._call = None
        raise DiscoveryError(f"{self._client.target} ended the watch")

    @override
    def close(self) -> None:
        self._closed = True
        call = self._call
        if call is not None:
            call.cancel()


def _apply(reply: messages.WatchReply, entries: dict[str, Entry]) -> bool:
    """Apply the changes that a server sent; return whether more will follow."""
    for key in reply.deleted:
        entries.pop(key, None)
    for entry in reply.changed:
        entries[entry.key] = _entry(entry)
    return reply.more


def _entry(found: Any) -> Entry:
    return Entry(found.key, found.value, found.version)
