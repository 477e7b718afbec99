"""A bound on open connections: idle ones must not take all of the process's descriptors.

What does not belong here: what a connection asks for.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterable
from typing import Final, cast

from aiohttp import web

__all__ = ["ConnectionLimit", "RequestRecord"]

_SILENCE_S: Final = 10.0
"""Until a connection must have sent a request: a browser does so at once, or comes again."""


class RequestRecord:
    """Remembers which connections have asked for something, as long as they are open."""

    def __init__(self) -> None:
        self._protocols: set[asyncio.BaseProtocol] = set()

    async def add(self, request: web.BaseRequest, _: web.StreamResponse | None = None) -> None:
        """Add a request's connection; called before its answer is sent at the latest.

        Args:
            request: of the connection.
        """
        self._protocols.add(request.protocol)

    def keep(self, present: Iterable[asyncio.BaseProtocol]) -> None:
        """Forget all but the present connections.

        Args:
            present: that are open.
        """
        self._protocols.intersection_update(present)

    def __contains__(self, protocol: object) -> bool:
        return protocol in self._protocols


class ConnectionLimit:
    """Makes the protocol of every connection, and closes connections that never ask for anything.

    Args:
        server: of aiohttp.
        requests: which connections have asked for something.
        most: open connections at most; half of what the process may have open, if that is less.
    """

    def __init__(self, server: web.Server, requests: RequestRecord, most: int) -> None:
        self._server = server
        self._most = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._since: dict[asyncio.BaseProtocol, float] = {}  # aiohttp's protocols take no weak references
        self._requests = requests

    def make_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection, which is closed at once where there are too many."""
        if len(self._server.connections) >= self._most:
            return _RefusedConnection()
        made = self._server()
        self._since[made] = time.monotonic()
        return made

    def close_silent(self) -> None:
        """Close connections that have asked for nothing for too long."""
        now = time.monotonic()
        present = self._server.connections
        self._requests.keep(present)
        self._since = {protocol: self._since.get(protocol, now) for protocol in present}
        for protocol in present:
            transport = protocol.transport
            if protocol not in self._requests and now - self._since[protocol] > _SILENCE_S and transport is not None:
                transport.abort()


class _RefusedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()
