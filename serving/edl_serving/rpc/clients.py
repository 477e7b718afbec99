"""Who has calls open at this server, and how many bytes of each it holds: what the limits for clients are about.

What does not belong here: whose turn it is (`batching.batch_queue`), and what is in a request.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

from edl.protocol.transport import grpc
from edl_serving.request_error import Refusal
from edl_serving.settings import ServerSettings

__all__ = ["Client", "Clients", "Context", "StreamPlace", "client_of"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_RETRY_MS = 200
"""For a client that finds no room beside others, who stay for minutes: as often as costs the server nothing."""
_RETRY_BYTES_MS = 20
"""For a client that has too much under way itself: some batches later, which is when part of it has been answered. All
the longer it would do nothing, though the model may be idle."""

_numbers = itertools.count()


def client_of(context: Context) -> str:
    """Name the client that a call is from: its connection, as gRPC names the peer."""
    peer = unquote(context.peer())
    # All peers on a Unix socket may have one name.
    return peer if not peer.startswith("unix") else f"{peer}#{next(_numbers)}"


@dataclass(eq=False)
class Client:
    """One client with calls open.

    Attributes:
        name: of `client_of`.
        calls: that are open.
        nbytes: of its requests without an answer, and of its answers that are not sent yet.
    """

    name: str
    max_bytes: int
    calls: int = 0
    nbytes: int = 0

    def take(self, nbytes: int) -> None:
        """Hold a request of so many bytes.

        Raises:
            Refusal: with those held already it would be too many.
        """
        if self.nbytes + nbytes > self.max_bytes and self.nbytes:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.nbytes:,} bytes of requests and answers of this client are under way, this request has "
                f"{nbytes:,}, and {self.max_bytes:,} are the most for one client (edl serve --max-client-bytes)",
                retry_after_ms=_RETRY_BYTES_MS,
                reason="client_bytes",
            )
        self.nbytes += nbytes


class Clients:
    """All clients with calls open. Used on the event loop only.

    Attributes:
        streams: `ModelStreamInfer` calls that are served.
        waiting: those that are open and wait for a place.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._max_connections = settings.max_connections
        self._max_streams = settings.max_streams
        self._max_client_bytes = settings.max_client_bytes
        self._clients: dict[str, Client] = {}
        self.streams = 0
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def nbytes(self) -> int:
        """Bytes of all requests without an answer, and of all answers that are not sent yet."""
        return sum(client.nbytes for client in self._clients.values())

    def enter(self, name: str, *, stream: bool = False) -> Client:
        """A client opened a call, which `leave` ends.

        Raises:
            Refusal: there are too many clients, or too many streams.
        """
        client = self._clients.get(name)
        if client is None and len(self._clients) >= self._max_connections:
            raise _full(f"{self._max_connections} clients are connected", "--max-connections", "connections")
        if stream and self.streams >= self._max_streams:
            raise _full(f"{self._max_streams} streams are open", "--max-streams", "streams")
        if client is None:
            client = self._clients[name] = Client(name, self._max_client_bytes)
        client.calls += 1
        self.streams += stream
        return client

    def begin_waiting(self) -> None:
        """A stream was opened for which there is no place."""
        if self.waiting >= self._max_streams:
            raise _full(f"{self.waiting} streams wait for a place", "--max-streams", "streams")
        self.waiting += 1

    def leave(self, client: Client, *, stream: bool = False) -> None:
        """A call that entered has ended."""
        client.calls -= 1
        self.streams -= stream
        if not client.calls:
            del self._clients[client.name]


class StreamPlace:
    """The place of one open stream among those that are served.

    A stream for which there is none stays open, and its requests are refused one by one, until there is: a student
    whose stream is ended while it writes would not learn why.

    Args:
        name: of the client.

    Raises:
        Refusal: as many streams wait for a place as there are places.

    Attributes:
        client: None while there is no place.
    """

    def __init__(self, clients: Clients, name: str) -> None:
        self._clients = clients
        self._name = name
        self.client: Client | None = None
        try:
            self.client = clients.enter(name, stream=True)
        except Refusal:
            clients.begin_waiting()

    def admit(self) -> Client:
        """Take a place.

        Raises:
            Refusal: there is none.
        """
        if self.client is None:
            self.client = self._clients.enter(self._name, stream=True)
            self._clients.waiting -= 1
        return self.client

    def close(self) -> None:
        """The stream has ended."""
        if self.client is None:
            self._clients.waiting -= 1
        else:
            self._clients.leave(self.client, stream=True)


def _full(what: str, option: str, reason: str) -> Refusal:
    return Refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{what}, the most that this server takes (edl serve {option})",
        retry_after_ms=_RETRY_MS,
        reason=reason,
    )
