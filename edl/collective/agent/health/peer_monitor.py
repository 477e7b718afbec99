"""Connections between agents, through which an agent learns at once that another agent's process is gone.

A connection carries nothing but a name. A lease reports a death only after it has expired, because silence may also be
a slow network. If a kernel refuses a connection to the port on which that agent listened, the death is certain: the
process died (SIGKILL, preemption, lack of memory) on a host that is alive. Hosts that vanish, agents that are stopped
and networks that fail are found by the lease.

What follows from a death is decided in `edl.collective.agent.rendezvous`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from edl.background import BackgroundLoop
from edl.collective.job_records import World
from edl.discovery.served.addresses import open_listener

if TYPE_CHECKING:
    from edl.protocol.tls import PeerTLS  # imported where TLS is asked for only

logger = logging.getLogger(__name__)

Address = tuple[str, int]

_BACKLOG: Final = 128  # connections waiting to be accepted: eight come from the ring, the rest is for others
_MAX_PEERS: Final = 8
"""Agents that an agent connects to. A death is noticed while any of the eight nodes before it is alive. More would give
all agents more connections, for deaths that leases report too."""
_MAX_ACCEPTED: Final = 1024
"""Most connections from others that are kept, since they cost file descriptors. Eight come from the ring; the rest are
strangers' or left over."""
_REFUSALS: Final = 3
"""Refusals in a row that count as a death. A single one proves nothing: a proxy in between refuses for a moment while
it restarts."""
_REFUSED_RETRY_S: Final = 0.03
"""Pause after a refusal. With the number of refusals above, a death is known within 0.1 s, and a port has that long to
be opened again."""
_CONNECT_TIMEOUT_S: Final = 2.0
"""How long a connection may take including its handshake. A slower network is left to the lease."""
_UNREACHED_RETRY_S: Final = 10.0
"""Pause after an attempt that proved nothing. Most such peers can never be reached, so attempts should cost little."""
_CLOSE_TIMEOUT_S: Final = 2.0
"""How long the thread may take to end; it may be looking up a name."""
_RECEIVE_NBYTES: Final = 4096  # a peer's name is far shorter, and the rest is ignored
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Firewalls forget connections that are idle for minutes, and connections to vanished hosts would be held for ever."""


def choose_peers(world: World, position: int) -> dict[str, Address]:
    """Choose the agents that a node's agent connects to: the next members around the ring, eight at most."""
    around = [*world.nodes[position + 1 :], *world.nodes[:position]][:_MAX_PEERS]
    return {member.id: (member.addr, member.tether_port) for member in around if member.tether_port}


@dataclass(eq=False)
class _PeerConnection:
    """A connection to an agent, or the attempt to make one."""

    node: str  # the agent's node
    address: Address  # where the agent listens
    socket: socket.socket | None = None  # socket of the connection or attempt; None between two attempts
    # Whether the agent has said its name at this address. A refusal from any other address means nothing.
    proven: bool = False
    refusals: int = 0  # number of refusals in a row
    retry_at: float | None = 0.0  # when to connect; None while connected, or when nothing more can be learnt
    deadline: float | None = None  # when to give up connecting; None if not connecting


class PeerConnections:
    """This agent's connections to others, and theirs to it, handled by a thread.

    The thread calls `on_gone` with the id of a node whose agent's process is certainly gone. Without `tls`, the name is
    sent to every peer, and any peer's is believed.
    """

    def __init__(self, name: str, on_gone: Callable[[str], object], tls: PeerTLS | None = None) -> None:
        self._name = name.encode()
        self._tls = tls
        self._on_gone = on_gone
        self._listener = open_listener(backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        """The port to which others connect."""
        self._wanted: Mapping[str, Address] = {}
        self._connections: dict[str, _PeerConnection] = {}
        self._accepted = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._waker, woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, self._drain)
        self._loop = BackgroundLoop("edl-peer-monitor", self._turn, interrupt=self._interrupt)

    def set_peers(self, nodes: Mapping[str, Address]) -> None:
        """Connect to these agents from now on, and to no others."""
        self._wanted = dict(nodes)
        self._interrupt()

    def close(self) -> None:
        """Close all connections. The other agents notice that this agent is gone."""
        if self._loop.closing:
            return
        if self._loop.close(_CLOSE_TIMEOUT_S):
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._waker.close()
            self._selector.close()
        else:
            self._listener.close()  # the thread still uses the rest, which ends with this process

    def _interrupt(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full, or the socket closed
            self._waker.send(b"\0")

    # --- In the thread ---

    def _turn(self) -> float:
        """Handle what has arrived, and connect to the wanted peers.

        If this fails with an unexpected error, leases decide, as between hosts that cannot connect. The listener stays
        open, because others would take a closed one for a death.
        """
        for key, _ in self._selector.select(self._idle_s()):
            key.data(key.fileobj)
        self._connect_wanted()
        return 0.0

    def _idle_s(self) -> float | None:
        """Return the seconds until something must be done even if nothing arrives; None for no limit."""
        times = [at for peer in self._connections.values() for at in (peer.retry_at, peer.deadline) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _drain(self, woken: socket.socket) -> None:
        woken.recv(_RECEIVE_NBYTES)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(_REFUSED_RETRY_S)  # for instance because no file descriptor is left
            return
        if self._accepted >= _MAX_ACCEPTED:
            connection.close()
            return
        try:
            connection.setblocking(False)
            _keep_alive(connection)
            if self._tls is not None:
                connection = self._tls.accepted(connection)
        except OSError:
            connection.close()
            return
        self._accepted += 1
        self._selector.register(connection, selectors.EVENT_READ, self._greet)
        self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        """Say this node's name, after the TLS handshake if there is one."""
        try:
            waits_for = _continue_handshake(connection)
            if waits_for:
                self._selector.modify(connection, waits_for, self._greet)
                return
            connection.send(self._name)
        except OSError:
            self._drop(connection)
            return
        self._selector.modify(connection, selectors.EVENT_READ, self._drop)

    def _drop(self, connection: socket.socket) -> None:
        """Close a connection from another agent. It is gone, or sent data, which no agent does."""
        self._accepted -= 1
        self._selector.unregister(connection)
        connection.close()

    def _connect_wanted(self) -> None:
        wanted = self._wanted
        for node, peer in list(self._connections.items()):
            if wanted.get(node) != peer.address:
                self._disconnect(peer)
                del self._connections[node]
        now = time.monotonic()
        for node, address in wanted.items():
            peer = self._connections.setdefault(node, _PeerConnection(node, address))
            if peer.deadline is not None and now >= peer.deadline:
                self._disconnect(peer)  # no answer at all: the host or the route to it is gone
                peer.retry_at = now + _UNREACHED_RETRY_S
            elif peer.retry_at is not None and now >= peer.retry_at:
                self._connect(peer)

    def _connect(self, peer: _PeerConnection) -> None:
        peer.retry_at = None
        peer.deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(*peer.address, type=socket.SOCK_STREAM)[0]
            peer.socket = socket.socket(family, kind, protocol)
            peer.socket.setblocking(False)
            _keep_alive(peer.socket)
            code = peer.socket.connect_ex(place)
        except (OSError, UnicodeError) as exc:  # UnicodeError: an invalid host name
            code = getattr(exc, "errno", None) or errno.EIO
        if code == errno.EINPROGRESS and peer.socket is not None:
            self._selector.register(peer.socket, selectors.EVENT_WRITE, lambda _: self._check_connected(peer))
        else:
            self._end_attempt(peer, code)

    def _check_connected(self, peer: _PeerConnection) -> None:
        assert peer.socket is not None
        self._selector.unregister(peer.socket)
        self._end_attempt(peer, peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _end_attempt(self, peer: _PeerConnection, code: int) -> None:
        if code == 0 and peer.socket is not None:
            self._selector.register(peer.socket, selectors.EVENT_READ, lambda _: self._receive(peer))
            if self._tls is None:
                peer.deadline = None
            else:
                self._begin_tls(peer, self._tls)
            return
        self._disconnect(peer)
        peer.refusals = peer.refusals + 1 if code == errno.ECONNREFUSED and peer.proven else 0
        if peer.refusals >= _REFUSALS:
            logger.debug("nothing listens at %s:%d now, where the agent of %s did", *peer.address, peer.node)
            self._on_gone(peer.node)
        else:
            peer.retry_at = time.monotonic() + (_REFUSED_RETRY_S if peer.refusals else _UNREACHED_RETRY_S)

    def _begin_tls(self, peer: _PeerConnection, tls: PeerTLS) -> None:
        """Begin the handshake. `peer.deadline` stays in force: a host that is silent here counts as unreachable."""
        assert peer.socket is not None
        self._selector.unregister(peer.socket)
        try:
            peer.socket = tls.connected(peer.socket, peer.address[0])
        except (OSError, ValueError):  # it is already gone, or its name is invalid
            self._disconnect(peer)
            peer.retry_at = time.monotonic() + _UNREACHED_RETRY_S
            return
        self._selector.register(peer.socket, selectors.EVENT_READ, lambda _: self._continue_tls(peer))
        self._continue_tls(peer)

    def _continue_tls(self, peer: _PeerConnection) -> None:
        assert peer.socket is not None
        try:
            waits_for = _continue_handshake(peer.socket)
        except OSError as exc:
            # Not the agent, or not trustworthy. A lease reports its death, as between hosts that cannot connect.
            logger.debug("no connection to the agent of %s at %s:%d: %s", peer.node, *peer.address, exc)
            self._disconnect(peer)
            peer.retry_at = time.monotonic() + _UNREACHED_RETRY_S
            return
        if waits_for:
            self._selector.modify(peer.socket, waits_for, lambda _: self._continue_tls(peer))
        else:
            peer.deadline = None
            self._selector.modify(peer.socket, selectors.EVENT_READ, lambda _: self._receive(peer))

    def _receive(self, peer: _PeerConnection) -> None:
        """Read the agent's name, or the end of the connection.

        The end alone proves nothing; the next attempt to connect does.
        """
        assert peer.socket is not None
        try:
            received = peer.socket.recv(_RECEIVE_NBYTES)
        except ssl.SSLWantReadError:
            return  # TLS's own messages, such as the tickets of TLS 1.3
        except OSError:
            received = b""
        if received:
            peer.proven = peer.proven or received == peer.node.encode()
            peer.refusals = 0
            return
        self._disconnect(peer)
        peer.retry_at = time.monotonic() + (_REFUSED_RETRY_S if peer.proven else _UNREACHED_RETRY_S)

    def _disconnect(self, peer: _PeerConnection) -> None:
        if peer.socket is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(peer.socket)
            peer.socket.close()
            peer.socket = None
        peer.deadline = None


def _continue_handshake(connection: socket.socket) -> int:
    """Continue the TLS handshake, if there is one.

    Returns the event of `selectors` that it waits for; 0 if it is over.
    """
    if isinstance(connection, ssl.SSLSocket):
        try:
            connection.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
    return 0


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
