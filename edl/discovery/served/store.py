"""The store that another process serves, over gRPC, seen from a client. URLs `edl://HOST:PORT`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult

from google.protobuf.message import Message
from typing_extensions import override

from edl.discovery.base_store import BaseStore, Claim, Entries, held_by_another
from edl.discovery.resource import CallThread, Resource
from edl.discovery.store import Entry
from edl.discovery.watching import Follower
from edl.errors import ClosedError, DiscoveryError, LeaseLostError, SettingsError
from edl.protocol import store as messages
from edl.protocol.channel import Metadata, call_metadata, channel
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.tls.handshake import explain_handshake, looks_like_handshake
from edl.protocol.transport import grpc
from edl.quoting import shown
from edl.settings import Credentials

__all__ = [
    "DEFAULT_PORT",
    "FORMAT",
    "SERVICE",
    "ServedStore",
    "ServedTarget",
    "StoreClient",
    "StoreRefusalError",
    "WatchCall",
    "store_credentials",
]

R = TypeVar("R", bound=Message)

SERVICE: Final = "edl.store.v1.Store"
FORMAT: Final = 1
"""Version of the protocol; a client of another version gets an error, as it would misread answers."""

DEFAULT_PORT: Final = 29400
"""torch's own for a rendezvous (`torch.distributed.elastic`)."""
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


def store_credentials(credentials: Credentials) -> Credentials:
    """Return the credentials for a served store: mutual TLS if all of it is set, and tokens.

    A CA alone, or a certificate alone, is for teachers.
    """
    if credentials.ca and credentials.cert:
        return credentials
    return Credentials(token_file=credentials.token_file, allow_insecure_tokens=credentials.allow_insecure_tokens)


@dataclass(frozen=True)
class ServedTarget:
    """A served store as a client sees it."""

    host: str
    port: int
    timeout_s: float
    credentials: Credentials = field(default_factory=Credentials)

    def __str__(self) -> str:
        return f"the store at {self.endpoint}"

    @property
    def endpoint(self) -> str:
        """Host and port as gRPC takes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """What opens it again."""
        return f"edl://{self.endpoint}"

    @classmethod
    def of(cls, parts: SplitResult, timeout_s: float, credentials: Credentials | None = None) -> ServedTarget:
        """Return what a split URL says; `credentials` are those of the environment if None.

        Raises:
            SettingsError: the URL cannot be used. The message repeats no password and no query.
        """
        where = f"discovery URL {parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        if "@" in parts.netloc:
            raise SettingsError(f"{where}: a URL is no place for a password; name a file of tokens in EDL_TOKEN_FILE")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise SettingsError(f"{where}: a host and a port are expected, and nothing else")
        try:
            port = DEFAULT_PORT if parts.port is None else parts.port
        except ValueError as exc:
            raise SettingsError(f"{where}: {exc}") from exc
        if not parts.hostname:
            raise SettingsError(f"{where}: the host is missing; expected is edl://host:{DEFAULT_PORT}")
        if port == 0:
            raise SettingsError(f"{where}: a port from 1 to 65535 is expected")
        own = store_credentials(Credentials.of() if credentials is None else credentials)
        return cls(parts.hostname, port, timeout_s, own)


class StoreRefusalError(DiscoveryError):
    """The server is not a store of EDL, or refuses this process's token."""


class _NoAnswerError(DiscoveryError):
    """A call took longer than it may."""


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
        return self._calls.run(lambda: list(self.watch(prefix, once=True, timeout_s=self.target.timeout_s)))

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

    def watch(self, prefix: str, *, once: bool = False, timeout_s: float | None = None) -> WatchCall:
        """Follow a prefix until the call is cancelled, fails or times out. Not for the main thread."""
        self._check()
        try:
            made: Any = self._current().unary_stream(f"/{SERVICE}/Watch", _serialize, messages.WatchReply.FromString)
            request = messages.WatchRequest(prefix=prefix, once=once)
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
            return _NoAnswerError(f"{self.target} did not answer within {self.target.timeout_s:g} s")
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
        """Return what is wrong with TLS or certificates, if no call was answered yet; else gRPC's words."""
        if self._answered or not looks_like_handshake(words):
            return words
        try:
            return asyncio.run(explain_handshake(self.target.endpoint, self._files)) or words
        except RuntimeError:  # called from inside an event loop
            return words

    @property
    def files(self) -> CredentialFiles | None:
        """The certificates and tokens of this side."""
        return self._files

    @property
    def _material_version(self) -> int:
        return 0 if self._files is None else self._files.current().version

    def _metadata(self) -> Metadata:
        return call_metadata(self.target.endpoint, self._files)

    def _current(self) -> grpc.Channel:
        """Return the channel, a new one if certificates were replaced: a channel keeps those it began with."""
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
        self._channel.close()  # one that `_current` made at this moment


class WatchCall:
    """The states of a prefix; iterating raises DiscoveryError when the connection fails."""

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


# --- The store ---


class ServedStore(BaseStore):
    """See `Store`. Opening it asks the server nothing."""

    def __init__(self, target: ServedTarget) -> None:
        super().__init__()
        self._target = target
        self.client: Final = self._own(StoreClient(target))

    def __repr__(self) -> str:
        return f"ServedStore({self._target.url!r})"

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
        state = _PrefixState()
        for reply in self.client.gather(prefix):
            state.take(reply)
        if state.partial:
            raise DiscoveryError(f"{self._target} broke off in the middle of an answer")
        return [state.entries[key] for key in sorted(state.entries)]

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
    def follow(self, prefix: str) -> Follower[Entries]:
        return _PushFollower(self.client, prefix)


class _GrantedClaim(Claim):
    """A lease at the server."""

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


class _PrefixState:
    """All entries under a prefix, put together from what a server sends; `partial` while the rest is on its way."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.partial = True

    def take(self, reply: messages.WatchReply) -> None:
        for key in reply.deleted:
            self.entries.pop(key, None)
        for entry in reply.changed:
            self.entries[entry.key] = _entry(entry)
        self.partial = reply.more


class _PushFollower(Follower[Entries]):
    """Reads what the server pushes. The server sends the whole state first, then only what changes."""

    def __init__(self, client: StoreClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._closed = False
        self._call: WatchCall | None = None

    @override
    def next(self, wait_s: float | None) -> Entries:
        if self._call is not None and wait_s is not None:  # a stream has one deadline, from its beginning
            self._call.cancel()
            self._call = None
        if self._call is None:
            self._state = _PrefixState()
            self._call = self._client.watch(self._prefix, timeout_s=wait_s)
            self._replies = iter(self._call)
            if self._closed:  # `close` looked for a call to cancel before there was one
                self._call.cancel()
        try:
            for reply in self._replies:
                self._state.take(reply)
                if not self._state.partial:
                    return dict(self._state.entries)
        except _NoAnswerError:
            self._call = None
            if wait_s is None or self._state.partial:
                raise
            return dict(self._state.entries)
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


def _entry(found: Any) -> Entry:
    return Entry(found.key, found.value, found.version)
