"""Clients with calls open at this server, and the limits for them: connections, streams and bytes.

What does not belong here: whose turn it is (`batching.batch_queue`), and what is in a request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

from edl.protocol.transport import grpc
from edl_serving.request_error import RequestError
from edl_serving.settings import ServerSettings

__all__ = ["ClientConnection", "ConnectionLimiter", "ServicerContext", "StreamSlot", "client_of"]

ServicerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_RETRY_MS = 200
"""For a client that finds no room beside others, who stay for minutes: as often as costs the server nothing."""
_RETRY_BYTES_MS = 20
"""For a client that has too much under way itself: some batches later, which is when part of it has been answered. All
the longer it would do nothing, though the model may be idle."""

_numbers = itertools.count()


def client_of(context: ServicerContext) -> str:
    """Return the name of the client that a call is from: its connection, as gRPC names the peer."""
    peer = unquote(context.peer())
    # All peers on a Unix socket may have one name.
    return peer if not peer.startswith("unix") else f"{peer}#{next(_numbers)}"


@dataclass(eq=False)
class ClientConnection:
    """A client with calls open.

    Attributes:
        name: of `client_of`.
        max_bytes: the limit for `nbytes`.
        calls: that are open.
        nbytes: of its requests without a response, and of its responses that are not sent yet.
    """

    name: str
    max_bytes: int
    calls: int = 0
    nbytes: int = 0

    def hold_bytes(self, nbytes: int) -> None:
        """Count a request's bytes, which the caller subtracts from `nbytes` later.

        Args:
            nbytes: of the request.

        Raises:
            RequestError: there are too many bytes with those held already.
        """
        if self.nbytes + nbytes > self.max_bytes and self.nbytes:
            raise RequestError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.nbytes:,} bytes of requests and answers of this client are under way, this request has "
                f"{nbytes:,}, and {self.max_bytes:,} are the most for one client (edl serve --max-client-bytes)",
                retry_after_ms=_RETRY_BYTES_MS,
                reason="client_bytes",
            )
        self.nbytes += nbytes


class ConnectionLimiter:
    """Counts clients and streams, and refuses more than the settings allow. Used on the event loop only.

    Args:
        settings: the limits.

    Attributes:
        streams: `ModelStreamInfer` calls that are served.
        waiting: `ModelStreamInfer` calls that are open without being served.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._max_connections = settings.max_connections
        self._max_streams = settings.max_streams
        self._max_client_bytes = settings.max_client_bytes
        self._clients: dict[str, ClientConnection] = {}
        self.streams = 0
        self.waiting = 0

    def __len__(self) -> int:
        """Return the number of clients with calls open."""
        return len(self._clients)

    @property
    def nbytes(self) -> int:
        """Bytes of all requests without a response, and of all responses that are not sent yet."""
        return sum(client.nbytes for client in self._clients.values())

    def open_call(self, name: str, *, stream: bool = False) -> ClientConnection:
        """Count a call, until `close_call`.

        Args:
            name: of the client.
            stream: whether the call is a stream that is to be served.

        Returns:
            The client.

        Raises:
            RequestError: there are too many clients, or too many streams.
        """
        client = self._clients.get(name)
        if client is None and len(self._clients) >= self._max_connections:
            raise _full(f"{self._max_connections} clients are connected", "--max-connections", "connections")
        if stream and self.streams >= self._max_streams:
            raise _full(f"{self._max_streams} streams are open", "--max-streams", "streams")
        if client is None:
            client = self._clients[name] = ClientConnection(name, self._max_client_bytes)
        client.calls += 1
        self.streams += stream
        return client

    def add_waiting_stream(self) -> None:
        """Count a stream that is open without being served.

        Raises:
            RequestError: too many streams wait already.
        """
        if self.waiting >= self._max_streams:
            raise _full(f"{self.waiting} streams wait for a place", "--max-streams", "streams")
        self.waiting += 1

    def close_call(self, client: ClientConnection, *, stream: bool = False) -> None:
        """Stop counting a call.

        Args:
            client: of `open_call`.
            stream: as given to `open_call`.
        """
        client.calls -= 1
        self.streams -= stream
        if not client.calls:
            del self._clients[client.name]


class StreamSlot:
    """A slot for an open stream among the streams that are served.

    A stream without a slot stays open, and its requests are refused until a slot is free: a student whose stream ends
    while it writes would not learn why.

    Args:
        clients: which counts the slots.
        name: of the client.

    Raises:
        RequestError: as many streams wait for a slot as there are slots.

    Attributes:
        client: None while there is no slot.
    """

    def __init__(self, clients: ConnectionLimiter, name: str) -> None:
        self._clients = clients
        self._name = name
        self.client: ClientConnection | None = None
        try:
            self.client = clients.open_call(name, stream=True)
        except RequestError:
            clients.add_waiting_stream()

    def acquire(self) -> ClientConnection:
        """Take a slot unless the stream has it.

        Returns:
            The client.

        Raises:
            RequestError: no slot is free.
        """
        if self.client is None:
            self.client = self._clients.open_call(self._name, stream=True)
            self._clients.waiting -= 1
        return self.client

    def hold_bytes(self, nbytes: int) -> None:
        """Count a request's bytes, until `release_bytes`. Takes a slot unless the stream has it.

        Args:
            nbytes: of the request, or of one that comes in fragments.

        Raises:
            RequestError: no slot is free, or the client has too many bytes under way.
        """
        (self.client or self.acquire()).hold_bytes(nbytes)

    def release_bytes(self, nbytes: int) -> None:
        """Stop counting bytes.

        Args:
            nbytes: that `hold_bytes` counted.
        """
        if self.client is not None:
            self.client.nbytes -= nbytes

    def close(self) -> None:
        """Release the slot at the end of the stream."""
        if self.client is None:
            self._clients.waiting -= 1
        else:
            self._clients.close_call(self.client, stream=True)


def _full(what: str, option: str, reason: str) -> RequestError:
    return RequestError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{what}, the most that this server takes (edl serve {option})",
        retry_after_ms=_RETRY_MS,
        reason=reason,
    )
