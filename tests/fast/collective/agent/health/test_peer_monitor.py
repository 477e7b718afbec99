"""What agents learn from their ties: that a process is gone, and nothing else for that."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import DEVNULL, PIPE, Popen

import pytest

from edl.collective.agent.health import peer_monitor
from edl.collective.agent.health.peer_monitor import Address, PeerConnections, choose_peers
from edl.collective.job_records import JobState, Member, World
from tests.plugins_consul import free_ports

DEADLINE_S = 60.0  # a handshake of TLS that a busy machine has no time for is tried again ten seconds later
QUIET_S = 0.5

OTHER = """
import sys, time
from edl.collective.agent.health.peer_monitor import PeerConnections
print(PeerConnections(sys.argv[1], print).port, flush=True)
time.sleep(600)
"""


@contextmanager
def other_agent(name: str) -> Iterator[tuple[Popen[str], Address]]:
    process = Popen([sys.executable, "-c", OTHER, name], stdout=PIPE, stderr=DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process, ("127.0.0.1", int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def gone() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def peers(gone: queue.SimpleQueue[str]) -> Iterator[PeerConnections]:
    made = PeerConnections("me", gone.put)
    yield made
    made.close()


def connected(peers: PeerConnections, *names: str) -> Callable[[], bool]:
    return lambda: all(name in peers._connections and peers._connections[name].proven for name in names)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_peers_over_ipv6(peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    with other_agent("six") as (process, (_, port)):
        peers.set_peers({"six": ("::1", port)})
        wait_for(connected(peers, "six"))
        process.kill()
        assert gone.get(timeout=DEADLINE_S) == "six"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def nothing(gone: queue.SimpleQueue[str]) -> bool:
    try:
        return gone.get(timeout=QUIET_S) is None
    except queue.Empty:
        return True


def test_killed_is_gone_stopped_is_not(peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    """A killed process is gone and one that is stopped is not."""
    with other_agent("a") as (a, to_a), other_agent("b") as (b, to_b):
        peers.set_peers({"a": to_a, "b": to_b})
        wait_for(connected(peers, "a", "b"))
        os.kill(b.pid, signal.SIGSTOP)
        assert nothing(gone)
        a.kill()
        assert gone.get(timeout=DEADLINE_S) == "a"
        b.kill()  # stopped or not
        assert gone.get(timeout=DEADLINE_S) == "b"
        assert nothing(gone), "each is told once"


def test_unknown_address_proves_nothing(peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    """A firewall refuses, another node has 127.0.0.1 for its address, a port belongs to somebody else now."""
    with other_agent("somebody else") as (process, to_other), socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()[:2]
        closed.close()
        peers.set_peers({"a": refused, "b": to_other})
        wait_for(lambda: "b" in peers._connections and peers._connections["b"].socket is not None)
        assert nothing(gone)
        process.kill()
        assert nothing(gone)


def test_cut_connection_is_made_again(peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    """By something in between: the agent lives. Later it dies, and that is seen."""
    with other_agent("a") as (process, to_a):
        peers.set_peers({"a": to_a})
        wait_for(connected(peers, "a"))
        first = peers._connections["a"].socket
        assert first is not None
        first.shutdown(socket.SHUT_RDWR)
        wait_for(lambda: peers._connections["a"].socket not in (None, first))
        assert nothing(gone)
        process.kill()
        assert gone.get(timeout=DEADLINE_S) == "a"


def test_unfollowed_peer_is_ignored(peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    """Whoever is not followed any more is nobodys business."""
    with other_agent("a") as (process, to_a):
        peers.set_peers({"a": to_a})
        wait_for(connected(peers, "a"))
        peers.set_peers({})
        wait_for(lambda: not peers._connections)
        process.kill()
        assert nothing(gone)


def test_error_ends_no_connections() -> None:
    """An error that was not foreseen leaves the listener open, and the other connections as they are."""
    reported: list[str] = []

    def fail_first(node: str) -> None:
        reported.append(node)
        if len(reported) == 1:
            raise ValueError("not foreseen")

    peers = PeerConnections("me", fail_first)
    try:
        with other_agent("a") as (a, to_a), other_agent("b") as (b, to_b):
            peers.set_peers({"a": to_a, "b": to_b})
            wait_for(connected(peers, "a", "b"))
            a.kill()
            wait_for(lambda: reported == ["a"])
            b.kill()
            wait_for(lambda: reported == ["a", "b"])
            with socket.create_connection(("127.0.0.1", peers.port), DEADLINE_S) as other:
                assert other.recv(10) == b"me"
    finally:
        peers.close()


def test_strangers_do_no_harm(peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    with socket.create_connection(("127.0.0.1", peers.port), DEADLINE_S) as stranger:
        assert stranger.recv(10) == b"me"
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
    assert nothing(gone)


def test_ring_ties_to_those_behind() -> None:
    """Everybody is tied to those behind in a ring."""

    def world(size: int) -> World:
        members = tuple(Member(str(rank), "h", 1, 1, rank, tether_port=rank % 9 and 100 + rank) for rank in range(size))
        return World(0, JobState.RUNNING, members)

    assert choose_peers(world(1), 0) == {}
    assert choose_peers(world(3), 1) == {"2": ("h", 102)}, "0 has no port: it is of an older version"
    assert [*choose_peers(world(20), 15)] == ["16", "17", "19", "1", "2", "3"]


def test_bad_name_harms_nobody(peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    """Of a node that was told a wrong --local-addr."""
    with other_agent("a") as (process, to_a):
        peers.set_peers({"b": ("node..example", 4000), "c": ("x" * 70, 4000), "a": to_a})
        wait_for(connected(peers, "a"))
        with socket.create_connection(("127.0.0.1", peers.port), DEADLINE_S) as other:
            assert other.recv(10) == b"me"
        process.kill()
        assert gone.get(timeout=DEADLINE_S) == "a"
        assert nothing(gone)


def test_one_refusal_is_not_a_death(
    peers: PeerConnections, gone: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands between may begin anew, and refuse until it has."""
    monkeypatch.setattr(peer_monitor, "_REFUSED_RETRY_S", 600.0)  # so that this test says when it is tried again

    def retry() -> None:
        wait_for(lambda: refused.retry_at is not None)
        refused.retry_at = 0.0
        peers._interrupt()

    address = ("127.0.0.1", free_ports(1)[0])
    with socket.create_server(address) as first:
        peers.set_peers({"a": address})
        connection, _ = first.accept()
        connection.send(b"a")
        wait_for(connected(peers, "a"))
        refused = peers._connections["a"]
        first.close()
        connection.close()
        retry()
        wait_for(lambda: refused.refusals == 1)
    with socket.create_server(address, reuse_port=False) as again:
        retry()
        again.settimeout(DEADLINE_S)
        connection, _ = again.accept()
        connection.send(b"a")
        assert nothing(gone)
        connection.close()
