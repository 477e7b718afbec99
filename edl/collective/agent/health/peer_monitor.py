"""Connections between agents, through which an agent learns at once that another agent's process is gone.

A lease shows a death only when it expires, because silence may also mean a slow network. If a host's kernel refuses a
connection to the port on which its agent listened, the death is certain: the process died, but the host is alive.
Vanished hosts, stopped agents and network failures are detected when the lease expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from edl.background import start_call
from edl.collective.job_records import World
from edl.discovery.served.addresses import open_listener

if TYPE_CHECKING:
    from edl.protocol.tls import PeerTLS  # imported only if TLS is used

logger = logging.getLogger(__name__)

Address = tuple[str, int]

_BACKLOG: Final = 128  # connections waiting to be accepted: eight come from the ring, the rest is for others
_MAX_PEERS: Final = 8  # a death is noticed while any of the eight nodes before it is alive
_MAX_ACCEPTED: Final = 1024  # most connections that are kept; eight come from the ring, the rest is strangers' or left
_REFUSALS: Final = 3  # in a row, that count as a death; a proxy in between refuses for a moment while it restarts
_REFUSED_RETRY_S: Final = 0.03  # after a refusal: a death is known within 0.1 s, in which a port may be opened again
_CONNECT_TIMEOUT_S: Final = 2.0  # including the handshake; a slower network is left to the lease
_UNREACHED_RETRY_S: Final = 10.0  # after an attempt that proved nothing; most such peers can never be reached
_CLOSE_TIMEOUT_S: Final = 30.0  # how long the thread may take to end on a busy machine; it waits for nothing
_CANCEL_AGAIN_S: Final = 0.05  # before Python 3.12, `wait_for` loses a cancellation as a connection is made
_RECEIVE_NBYTES: Final = 4096  # a peer's name is far shorter, and the rest is ignored
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # firewalls forget idle connections


def choose_peers(world: World, position: int) -> dict[str, Address]:
    """Choose the agents that a node's agent connects to: the agents of the next members in the ring, at most eight."""
    around = [*world.nodes[position + 1 :], *world.nodes[:position]][:_MAX_PEERS]
    return {member.id: (member.addr, member.tether_port) for member in around if member.tether_port}


class PeerConnections:
    """Connections between this agent and other agents, in both directions, in a separate event loop.

    The event loop's thread calls `on_gone` with the id of a node whose agent is certainly gone. Without `tls`, nothing
    proves who sends a node's name.
    """

    def __init__(self, name: str, on_gone: Callable[[str], object], tls: PeerTLS | None = None) -> None:
        self._name = name.encode()
        self._tls = tls
        self._on_gone = on_gone
        self._listener = open_listener(backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]  # to which others connect
        self.heard: set[str] = set()  # nodes that have sent their name over a connection that still exists
        self._accepted: set[asyncio.Task[None]] = set()
        self._watches: dict[tuple[str, Address], asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._ended = start_call("edl-peer-monitor", self._run)

    def set_peers(self, nodes: Mapping[str, Address]) -> None:
        self._loop.call_soon_threadsafe(self._watch_only, set(nodes.items()))

    def close(self) -> None:
        """Close all connections. The other agents notice that this agent is gone."""
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._ended.result(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        accepting = self._loop.create_task(self._accept_all())
        self._loop.run_forever()
        self._listener.close()
        tasks = [accepting, *self._accepted, *self._watches.values()]
        while unfinished := [task for task in tasks if not task.done()]:
            for task in unfinished:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(unfinished, timeout=_CANCEL_AGAIN_S))
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # during which the sockets are closed
        self._loop.close()

    def _watch_only(self, peers: set[tuple[str, Address]]) -> None:
        for peer in self._watches.keys() - peers:
            self._watches.pop(peer).cancel()
        for peer in peers - self._watches.keys():
            self._watches[peer] = self._loop.create_task(self._watch(*peer))

    async def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_REFUSED_RETRY_S)  # for instance because no file descriptor is left
                continue
            if len(self._accepted) >= _MAX_ACCEPTED:
                connection.close()
                continue
            task = self._loop.create_task(self._greet(connection))
            self._accepted.add(task)
            task.add_done_callback(self._accepted.discard)

    async def _greet(self, connection: socket.socket) -> None:
        """Send this node's name, and keep a connection until the other side closes it or sends data (no agent does)."""
        reader = asyncio.StreamReader()
        with connection, contextlib.suppress(OSError):
            _keep_alive(connection)
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader),
                connection,
                ssl=None if self._tls is None else self._tls.context(serving=True),
                ssl_handshake_timeout=None if self._tls is None else _CONNECT_TIMEOUT_S,
            )
            try:
                transport.write(self._name)
                await reader.read(1)
            finally:
                transport.abort()

    async def _watch(self, node: str, address: Address) -> None:
        """Stay connected to an agent. Calls `on_gone` once the port that sent the agent's name refuses connections."""
        proven = False  # a refusal from any other address means nothing
        refusals = 0
        while refusals < _REFUSALS:
            retry_s = _UNREACHED_RETRY_S
            try:
                reader, writer = await asyncio.wait_for(self._connect(address), _CONNECT_TIMEOUT_S)
            except ConnectionRefusedError:
                if proven:
                    refusals += 1
                    retry_s = _REFUSED_RETRY_S
            except (OSError, asyncio.TimeoutError, ValueError) as exc:  # ValueError: an invalid host name
                logger.debug("no connection to the agent of %s at %s:%d: %r", node, *address, exc)
                refusals = 0
            else:
                try:
                    # The end of the connection alone proves nothing; the next attempt to connect does.
                    while said := await reader.read(_RECEIVE_NBYTES):
                        refusals = 0
                        if said == node.encode():
                            proven = True
                            self.heard.add(node)
                except OSError:
                    pass
                finally:
                    self.heard.discard(node)
                    writer.transport.abort()
                if proven:
                    retry_s = _REFUSED_RETRY_S
            if refusals < _REFUSALS:
                await asyncio.sleep(retry_s)
        logger.debug("nothing listens at %s:%d now, where the agent of %s did", *address, node)
        self._on_gone(node)

    async def _connect(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # In a thread of its own, since a name server may take longer than this process lives.
        lookup = start_call("edl-peer-name", partial(socket.getaddrinfo, *address, type=socket.SOCK_STREAM))
        family, kind, protocol, _, place = (await asyncio.wrap_future(lookup))[0]
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            _keep_alive(connection)
            await self._loop.sock_connect(connection, place)
            if self._tls is None:
                return await asyncio.open_connection(sock=connection)
            context, name = self._tls.context(serving=False), self._tls.server_name(address[0])
            return await asyncio.open_connection(sock=connection, ssl=context, server_hostname=name)
        except BaseException:
            connection.close()
            raise


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
