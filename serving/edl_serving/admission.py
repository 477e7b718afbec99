"""Admission control: the server's lifecycle, limits on clients and streams, and tokens."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

from edl.protocol.channel import is_this_host
from edl.protocol.tls import CHECK_EVERY_S, CredentialFiles, Material
from edl.protocol.transport import grpc
from edl.settings import Credentials
from edl_serving.request_error import RequestError
from edl_serving.settings import ServerSettings, authority

_log = logging.getLogger(__name__)


class ServerState(enum.Enum):
    """The states of a server, in the order in which it passes through them."""

    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # reports not ready, but still serves students that have not noticed yet
    DRAINING = "draining"  # finishes what it has accepted
    STOPPED = "stopped"


class Lifecycle:
    """Counts requests, and refuses them when the server is warming up or draining. Use it only on the event loop.

    `healthy` is False while the canary or a backend reports a fault; `in_flight` is the number of requests not answered
    yet.
    """

    def __init__(self) -> None:
        self.state = ServerState.STARTING
        self.healthy = True
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        return self.state is ServerState.READY and self.healthy

    def begin_request(self) -> None:
        if self.state not in (ServerState.READY, ServerState.LEAVING):
            if self.state is ServerState.STARTING:
                raise RequestError(grpc.StatusCode.UNAVAILABLE, "the model is warming up", retry_after_ms=1000)
            raise RequestError(grpc.StatusCode.UNAVAILABLE, "the server is draining")
        self.in_flight += 1
        self._idle.clear()

    def end_request(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True


ServicerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_RETRY_MS = 200
"""Retry hint when other clients use up a limit. Clients stay for minutes; retries at this interval cost nothing."""
_RETRY_BYTES_MS = 20
"""Retry hint for a client that exceeds its own byte limit: the time of a few batches. After a longer wait, the client
would be idle."""


def client_of(context: ServicerContext) -> str:
    """Return a name for the client of a call: gRPC's text for the peer, which identifies the connection."""
    return unquote(context.peer())


@dataclass(eq=False)
class ClientConnection:
    """A client with open calls; `nbytes` is the size of its unanswered requests and unsent responses."""

    name: str
    max_bytes: int
    calls: int = 0
    nbytes: int = 0

    def hold_bytes(self, nbytes: int) -> None:
        """Count a request's bytes, or refuse the request. A client's only request is accepted whatever its size."""
        if self.nbytes + nbytes > self.max_bytes and self.nbytes:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.nbytes:,} bytes of this client's requests and answers are in flight, this request has "
                f"{nbytes:,}, and the limit per client is {self.max_bytes:,} (edl serve --max-client-bytes)",
                retry_after_ms=_RETRY_BYTES_MS,
                reason="client_bytes",
            )
        self.nbytes += nbytes

    def release_bytes(self, nbytes: int) -> None:
        self.nbytes -= nbytes


class ConnectionLimiter:
    """Counts clients, streams and tensor channels; refuses those above the limits. Use it only on the event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max_connections = settings.max_connections
        self.max_streams = settings.max_streams
        self._max_client_bytes = settings.max_client_bytes
        self._clients: dict[str, ClientConnection] = {}
        self.streams = 0

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def nbytes(self) -> int:
        """Bytes of all clients. Callable from any thread."""
        return sum(client.nbytes for client in list(self._clients.values()))

    def open_call(self, name: str, *, stream: bool = False) -> ClientConnection:
        """Count a call until `close_call`; refuse it if there are too many clients or streams."""
        client = self._clients.get(name)
        if client is None and len(self._clients) >= self._max_connections:
            raise _full(f"{self._max_connections} clients are connected", "--max-connections", "connections")
        if stream and self.streams >= self.max_streams:
            raise _full(f"{self.max_streams} streams are open", "--max-streams", "streams")
        if client is None:
            client = self._clients[name] = ClientConnection(name, self._max_client_bytes)
        client.calls += 1
        self.streams += stream
        return client

    def close_call(self, client: ClientConnection, *, stream: bool = False) -> None:
        client.calls -= 1
        self.streams -= stream
        if not client.calls:
            del self._clients[client.name]


def _full(what: str, option: str, reason: str) -> RequestError:
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{what}, the most that this server accepts (edl serve {option})",
        retry_after_ms=_RETRY_MS,
        reason=reason,
    )


def is_revocation(before: Material, after: Material) -> bool:
    """Return whether some client that `before` admits is no longer admitted by `after`."""
    return not (before.authorities <= after.authorities and set(before.tokens) <= set(after.tokens))


async def watch_revocations(files: CredentialFiles, end_streams: Callable[[], None]) -> None:
    """Call `end_streams` when new credential files revoke a token or a CA; clients must then authenticate again."""
    before, complaint = files.current(), ""
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        try:
            after = files.current()
            if is_revocation(before, after):
                end_streams()
        except Exception as exc:  # noqa: BLE001 - keep checking: if this task ended, revocations would go unnoticed
            if complaint != repr(exc):
                complaint = repr(exc)
                _log.exception("checking for revoked credentials failed; retrying")
            continue  # keep `before`, so that the next attempt still sees the revocation
        before, complaint = after, ""


def warn_of_no_credentials(host: str, credentials: Credentials) -> None:
    """Warn if other hosts can reach the server and it has no TLS or does not authenticate clients."""
    if is_this_host(authority(host, 0)):
        return
    if not credentials.cert and not credentials.token_file:
        _log.warning(
            "listening on %s without TLS and tokens: anyone who reaches it can use the model, and the network can "
            "read students' data; set --tls-cert and --tls-key, and --tls-ca or --token-file (docs/security.md)",
            host,
        )
    elif not credentials.cert:
        _log.warning("listening on %s without TLS: tokens and data can be read on the network (--tls-cert)", host)
    elif not credentials.ca and not credentials.token_file:
        _log.info("listening on %s with TLS, open to everyone: --tls-ca or --token-file restricts access", host)
