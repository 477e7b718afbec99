"""What agents learn from their connections: that a process is gone, and nothing else counts as that; also with TLS."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import pytest

from edl.collective.agent.health import peer_monitor
from edl.collective.agent.health.peer_monitor import Address, PeerConnections, choose_peers
from edl.collective.job_records import JobState, Member, World
from edl.protocol.tls.peers import PeerTLS
from edl.settings import Credentials
from tests.certificates import Authority
from tests.plugins_consul import free_ports
from tests.waiting import DEADLINE_S, wait_until

OTHER = """
import signal, sys
from edl.collective.agent.health.peer_monitor import PeerConnections
print(PeerConnections(sys.argv[1], print).port, flush=True)
signal.pause()
"""
CA = Authority()
NAME = "agents.example"


class Peers(PeerConnections):
    """An agent's connections, and the nodes that it was told are gone."""

    def __init__(self, name: str = "me", tls: PeerTLS | None = None) -> None:
        self.gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        super().__init__(name, self.gone.put, tls)

    @property
    def address(self) -> Address:
        return ("127.0.0.1", self.port)

    def next_gone(self) -> str:
        return self.gone.get(timeout=DEADLINE_S)

    def wait_for(self, node: str, state: Callable[[peer_monitor._PeerConnection], object]) -> None:
        wait_until(lambda: node in self._connections and state(self._connections[node]), f"{node} is in that state")

    def wait_connected(self, *nodes: str) -> None:
        for node in nodes:
            self.wait_for(node, lambda peer: peer.proven and peer.socket is not None)


@pytest.fixture
def agent() -> Iterator[Callable[..., Peers]]:
    """Make agents in this process; to close one looks to others as if its process had ended."""
    with contextlib.ExitStack() as stack:

        def make(name: str = "me", tls: PeerTLS | None = None) -> Peers:
            made = Peers(name, tls)
            stack.callback(made.close)
            return made

        yield make


@contextmanager
def other_process(name: str) -> Iterator[tuple[Popen[str], Address]]:
    with Popen([sys.executable, "-c", OTHER, name], stdout=PIPE, stderr=DEVNULL, text=True) as process:
        try:
            yield process, ("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


def test_killed_is_gone_stopped_is_not(agent: Callable[..., Peers]) -> None:
    peers = agent()
    with other_process("a") as (a, to_a), other_process("b") as (b, to_b):
        peers.set_peers({"a": to_a, "b": to_b})
        peers.wait_connected("a", "b")
        os.kill(b.pid, signal.SIGSTOP)
        a.kill()
        assert peers.next_gone() == "a"
        b.kill()  # stopped or not
        assert peers.next_gone() == "b"
    peers.set_peers({})
    wait_until(lambda: not peers._connections, "nobody is followed any more")
    assert peers.gone.empty(), "each is told once"


def test_unknown_address_proves_nothing(agent: Callable[..., Peers]) -> None:
    """A firewall refuses, a port belongs to somebody else now, a node was told a wrong --local-addr."""
    peers, somebody, known = agent(), agent("somebody else"), agent("known")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()[:2]
    addresses = {"a": refused, "b": somebody.address, "c": ("node..example", 4000), "d": ("x" * 70, 4000)}
    peers.set_peers(addresses | {"known": known.address})
    peers.wait_connected("known")
    peers.wait_for("b", lambda peer: peer.socket is not None)
    somebody.close()
    peers.wait_for("b", lambda peer: peer.retry_at)
    known.close()
    assert peers.next_gone() == "known", "and nobody before it"
    assert peers.gone.empty()


def test_one_refusal_is_not_a_death(agent: Callable[..., Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between may begin anew, and refuse until it has."""
    monkeypatch.setattr(peer_monitor, "_REFUSED_RETRY_S", 600.0)  # so that this test says when it is tried again
    peers, address = agent(), ("127.0.0.1", free_ports(1)[0])

    def retry() -> None:
        peers.wait_for("a", lambda peer: peer.retry_at is not None)
        peers._connections["a"].retry_at = 0.0
        peers._interrupt()

    with socket.create_server(address) as first:
        peers.set_peers({"a": address})
        connection, _ = first.accept()
        connection.send(b"a")
        peers.wait_connected("a")
        first.close()
        connection.close()
        retry()
        peers.wait_for("a", lambda peer: peer.refusals == 1)
    with socket.create_server(address, reuse_port=False) as again:
        retry()
        again.settimeout(DEADLINE_S)
        connection, _ = again.accept()
        connection.send(b"a")
        peers.wait_for("a", lambda peer: peer.refusals == 0)
        connection.close()
    assert peers.gone.empty()


def test_ring_ties_to_those_behind() -> None:
    def world(size: int) -> World:
        members = tuple(Member(str(rank), "h", 1, 1, rank, tether_port=rank % 9 and 100 + rank) for rank in range(size))
        return World(0, JobState.RUNNING, members)

    assert choose_peers(world(1), 0) == {}
    assert choose_peers(world(3), 1) == {"2": ("h", 102)}, "0 has no port: it is of an older version"
    assert [*choose_peers(world(20), 15)] == ["16", "17", "19", "1", "2", "3"]


def tls_of(folder: Path, name: str = NAME, issuer: Authority = CA) -> PeerTLS:
    folder.mkdir(exist_ok=True)
    return PeerTLS(Credentials(ca=CA.save(folder), **issuer.issue(name).save(folder), server_name=NAME))


def test_death_is_seen_through_tls(tmp_path: Path, agent: Callable[..., Peers]) -> None:
    """Whichever strangers connect beside it: these are told nothing, and hold nobody up."""
    peers, other = agent(tls=tls_of(tmp_path / "mine")), agent("a", tls_of(tmp_path / "a"))
    with socket.create_connection(peers.address), socket.create_connection(peers.address, DEADLINE_S) as stranger:
        peers.set_peers({"a": other.address})
        peers.wait_connected("a")
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while more := stranger.recv(100):
                heard += more
        assert b"me" not in heard
        other.close()
        assert peers.next_gone() == "a"


@pytest.mark.parametrize("wrong", ["name", "CA", "plain"])
def test_impostor_is_not_believed(tmp_path: Path, agent: Callable[..., Peers], wrong: str) -> None:
    issuer, name = Authority() if wrong == "CA" else CA, "other.example" if wrong == "name" else NAME
    peers = agent(tls=tls_of(tmp_path / "mine"))
    impostor = agent("a", None if wrong == "plain" else tls_of(tmp_path / "a", name, issuer))
    peers.set_peers({"a": impostor.address})
    peers.wait_for("a", lambda peer: peer.retry_at)
    impostor.close()
    assert not peers._connections["a"].proven, "its death proves nothing of the agent's"
    assert peers.gone.empty()
