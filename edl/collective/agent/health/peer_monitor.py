"""Knowing at once that another agent's process is gone: a connection to it that carries nothing but its name.

A lease tells of a death when it has run out, since silence may also be a slow network. A kernel that says that nobody
listens any more, where that agent did, tells it for certain: the process died (by SIGKILL, preemption, lack of memory)
on a host that lives. Hosts that vanish, agents that are stopped and networks that fail stay the lease's business.

What does not belong here: what follows from a death (`edl.collective.agent.membership.rendezvous`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from edl.collective.job_records import World
from edl.discovery.served.listening import open_listener

if TYPE_CHECKING:
    from edl.protocol.tls.peers import PeerTLS  # imported where TLS is asked for only

__all__ = ["Address", "PeerConnections", "choose_peers"]

_log = logging.getLogger(__name__)

Address = tuple[str, int]

_NEIGHBOURS: Final = 8
_HELD: Final = 1024
"""Connections from others that are kept at most: each costs a file descriptor."""
_REFUSALS: Final = 3
_REFUSED_AGAIN_S: Final = 0.03
_CONNECT_S: Final = 2.0
_UNREACHED_AGAIN_S: Final = 10.0
_CLOSE_S: Final = 2.0
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Firewalls forget connections that are idle for minutes; hosts that vanished would be held for ever."""


def choose_peers(world: World, position: int) -> dict[str, Address]:
    """Whom the node at `position` is tied to: the members behind it, around the ring, by id; eight at most."""
    around = [*world.nodes[position + 1 :], *world.nodes[:position]][:_NEIGHBOURS]
    return {member.id: (member.addr, member.tether_port) for member in around if member.tether_port}


@dataclass(eq=False)
class _PeerConnection:
    """A connection to one agent, or the attempt to make one.

    `proven` is set once the agent has said its name there: a refusal from any other address means nothing.
    """

    node: str
    address: Address
    socket: socket.socket | None = None
    proven: bool = False
    refusals: int = 0
    """In a row: one alone may be a proxy or a firewall that begins anew."""
    again_at: float | None = 0.0
    """When to connect; None while connected, or when there is no more to be learnt."""
    until: float | None = None
    """When to give up connecting; None if not connecting."""


class PeerConnections:
    """This agent's ties to others, and theirs to it. Its own thread does the work.

    Args:
        name: of this node.
        gone: called with the id of a node whose agent's process is gone for certain; from the thread.
        tls: for the connections, None for none: then whoever asks is told the name, and believed to have peer.
    """

    def __init__(self, name: str, gone: Callable[[str], object], tls: PeerTLS | None = None) -> None:
        self._name = name.encode()
        self._tls = tls
        self._gone = gone
        self._listener = open_listener(backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        """Where others tie themselves to this agent."""
        self._wanted: Mapping[str, Address] = {}
        self._connections: dict[str, _PeerConnection] = {}
        self._held = 0
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake)
        self._thread = threading.Thread(target=self._run, name="edl-peer-monitor", daemon=True)
        self._thread.start()

    def set_peers(self, nodes: Mapping[str, Address]) -> None:
        """Be tied to these from now on, and to nobody else."""
        self._wanted = dict(nodes)
        self._poke()

    def close(self) -> None:
        """Cut all ties. Others see this agent go."""
        if not self._closing:
            self._closing = True
            self._poke()
            self._thread.join(_CLOSE_S)  # it may be looking up a name

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or the thread has ended
            self._waker.send(b"\0")

    # --- In the thread. ---

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._rest_s()):
                    key.data(key.fileobj)
                self._tie()
        except Exception:  # noqa: BLE001 - logged
            # Others would take a closed listener for a death. Without ties leases decide, as between hosts.
            _log.exception("the connections to other agents ended in a way not foreseen")
            while not self._closing:
                time.sleep(_CLOSE_S / 4)
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._waker.close()
            self._selector.close()

    def _rest_s(self) -> float | None:
        """How long nothing is to be done unless something comes."""
        times = [at for peer in self._connections.values() for at in (peer.again_at, peer.until) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _wake(self, woken: socket.socket) -> None:
        woken.recv(4096)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(_REFUSED_AGAIN_S)  # no file descriptor is left, say
            return
        if self._held >= _HELD:
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
        self._held += 1
        self._selector.register(connection, selectors.EVENT_READ, self._greet)
        self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        """Say this node's name, once the handshake is over where there is peer."""
        try:
            waits_for = _shake(connection)
            if waits_for:
                self._selector.modify(connection, waits_for, self._greet)
                return
            connection.send(self._name)
        except OSError:
            self._drop(connection)
            return
        self._selector.modify(connection, selectors.EVENT_READ, self._drop)

    def _drop(self, connection: socket.socket) -> None:
        """Whoever was tied to this agent has gone, or says something, which nobody should."""
        self._held -= 1
        self._selector.unregister(connection)
        connection.close()

    def _tie(self) -> None:
        """Have the ties that are wanted."""
        wanted = self._wanted
        for node, peer in list(self._connections.items()):
            if wanted.get(node) != peer.address:
                self._cut(peer)
                del self._connections[node]
        now = time.monotonic()
        for node, address in wanted.items():
            peer = self._connections.setdefault(node, _PeerConnection(node, address))
            if peer.until is not None and now >= peer.until:
                self._cut(peer)  # no answer at all: the host is gone, or the way to it
                peer.again_at = now + _UNREACHED_AGAIN_S
            elif peer.again_at is not None and now >= peer.again_at:
                self._connect(peer)

    def _connect(self, peer: _PeerConnection) -> None:
        peer.again_at, peer.until = None, time.monotonic() + _CONNECT_S
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(*peer.address, type=socket.SOCK_STREAM)[0]
            peer.socket = socket.socket(family, kind, protocol)
            peer.socket.setblocking(False)
            _keep_alive(peer.socket)
            code = peer.socket.connect_ex(place)
        except (OSError, UnicodeError) as exc:  # UnicodeError: a host's name that is none
            code = getattr(exc, "errno", None) or errno.EIO
        if code == errno.EINPROGRESS and peer.socket is not None:
            self._selector.register(peer.socket, selectors.EVENT_WRITE, lambda _: self._connected(peer))
        else:
            self._settled(peer, code)

    def _connected(self, peer: _PeerConnection) -> None:
        assert peer.socket is not None
        self._selector.unregister(peer.socket)
        self._settled(peer, peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _settled(self, peer: _PeerConnection, code: int) -> None:
        """An attempt to connect has ended."""
        if code == 0 and peer.socket is not None:
            self._selector.register(peer.socket, selectors.EVENT_READ, lambda _: self._heard(peer))
            if self._tls is None:
                peer.until = None
            else:
                self._begin_tls(peer, self._tls)
            return
        self._cut(peer)
        peer.refusals = peer.refusals + 1 if code == errno.ECONNREFUSED and peer.proven else 0
        if peer.refusals >= _REFUSALS:
            _log.debug("nobody listens at %s:%d any more, where the agent of %s did", *peer.address, peer.node)
            self._gone(peer.node)
        else:
            peer.again_at = time.monotonic() + (_REFUSED_AGAIN_S if peer.refusals else _UNREACHED_AGAIN_S)

    def _begin_tls(self, peer: _PeerConnection, tls: PeerTLS) -> None:
        """`peer.until` still holds: a host that is silent here is as good as one that is not there."""
        assert peer.socket is not None
        self._selector.unregister(peer.socket)
        try:
            peer.socket = tls.connected(peer.socket, peer.address[0])
        except (OSError, ValueError):  # it has gone already, or its name is none
            self._cut(peer)
            peer.again_at = time.monotonic() + _UNREACHED_AGAIN_S
            return
        self._selector.register(peer.socket, selectors.EVENT_READ, lambda _: self._go_on_tls(peer))
        self._go_on_tls(peer)

    def _go_on_tls(self, peer: _PeerConnection) -> None:
        assert peer.socket is not None
        try:
            waits_for = _shake(peer.socket)
        except OSError as exc:
            # Not the agent, or not to be believed. A lease tells of its death, as between hosts that cannot connect.
            _log.debug("no connection to the agent of %s at %s:%d: %s", peer.node, *peer.address, exc)
            self._cut(peer)
            peer.again_at = time.monotonic() + _UNREACHED_AGAIN_S
            return
        if waits_for:
            self._selector.modify(peer.socket, waits_for, lambda _: self._go_on_tls(peer))
        else:
            peer.until = None
            self._selector.modify(peer.socket, selectors.EVENT_READ, lambda _: self._heard(peer))

    def _heard(self, peer: _PeerConnection) -> None:
        """The agent said its name, or the connection has ended: which proves nothing. Does anybody listen there?"""
        assert peer.socket is not None
        try:
            said = peer.socket.recv(4096)
        except ssl.SSLWantReadError:
            return  # TLS's own, such as the tickets of 1.3
        except OSError:
            said = b""
        if said:
            peer.proven = peer.proven or said == peer.node.encode()
            peer.refusals = 0
            return
        self._cut(peer)
        peer.again_at = time.monotonic() + (_REFUSED_AGAIN_S if peer.proven else _UNREACHED_AGAIN_S)

    def _cut(self, peer: _PeerConnection) -> None:
        if peer.socket is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(peer.socket)
            peer.socket.close()
            peer.socket = None
        peer.until = None


def _shake(connection: socket.socket) -> int:
    """Go on with the handshake of TLS, if there is one; the event that it waits for, 0 if it is over.

    Raises:
        OSError: it came to nothing.
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
