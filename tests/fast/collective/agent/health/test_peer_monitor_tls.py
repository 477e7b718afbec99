"""Ties between agents that speak TLS: only agents of the job are told a name, and only theirs is believed."""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import pytest

from edl.collective.agent.health.peer_monitor import Address, PeerConnections
from edl.protocol.tls.peers import PeerTLS
from edl.settings import Credentials
from tests.certificates import Authority
from tests.fast.collective.agent.health.test_peer_monitor import DEADLINE_S, connected, nothing, wait_for

CA = Authority()
NAME = "agents.example"
OTHER = """
import sys, time
from edl.collective.agent.health.peer_monitor import PeerConnections
from edl.protocol.tls.peers import PeerTLS
from edl.settings import Credentials
ca, cert, key, name = sys.argv[1:]
print(PeerConnections("a", print, PeerTLS(Credentials(ca, cert, key, name))).port, flush=True)
time.sleep(600)
"""


def credentials(folder: Path, name: str = NAME, issuer: Authority = CA) -> Credentials:
    folder.mkdir(exist_ok=True)
    return Credentials(ca=CA.save(folder), **issuer.issue(name).save(folder), server_name=NAME)


@contextlib.contextmanager
def other_agent(told: Credentials) -> Iterator[tuple[Popen[str], Address]]:
    arguments = [told.ca, told.cert, told.key, told.server_name]
    command = [sys.executable, "-c", OTHER, *(str(each) for each in arguments)]
    with Popen(command, stdout=PIPE, stderr=DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, ("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


@pytest.fixture
def gone() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def peers(tmp_path: Path, gone: queue.SimpleQueue[str]) -> Iterator[PeerConnections]:
    made = PeerConnections("me", gone.put, PeerTLS(credentials(tmp_path / "mine")))
    yield made
    made.close()


def test_death_is_seen_through_tls(tmp_path: Path, peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    with other_agent(credentials(tmp_path / "a")) as (process, to_a):
        peers.set_peers({"a": to_a})
        wait_for(connected(peers, "a"))
        assert nothing(gone)
        process.kill()
        assert gone.get(timeout=DEADLINE_S) == "a"


@pytest.mark.parametrize("wrong", ["name", "CA"])
def test_impostor_is_not_believed(
    tmp_path: Path, peers: PeerConnections, gone: queue.SimpleQueue[str], wrong: str
) -> None:
    told = credentials(
        tmp_path / "a", "other.example" if wrong == "name" else NAME, Authority() if wrong == "CA" else CA
    )
    with other_agent(told) as (process, to_a):
        peers.set_peers({"a": to_a})
        wait_for(lambda: "a" in peers._connections and bool(peers._connections["a"].retry_at))
        assert not peers._connections["a"].proven
        process.kill()
        assert nothing(gone), "its death proves nothing of the agent's"


def test_strangers_learn_nothing(peers: PeerConnections) -> None:
    with socket.create_connection(("127.0.0.1", peers.port), DEADLINE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while more := stranger.recv(100):
                heard += more
        assert b"me" not in heard


def test_silent_stranger_holds_nobody_up(tmp_path: Path, peers: PeerConnections) -> None:
    """It connects, and says nothing: the thread serves others."""
    with socket.create_connection(("127.0.0.1", peers.port)), other_agent(credentials(tmp_path / "a")) as (_, to_a):
        peers.set_peers({"a": to_a})
        wait_for(connected(peers, "a"))


def test_plain_agent_is_not_believed(tmp_path: Path, peers: PeerConnections, gone: queue.SimpleQueue[str]) -> None:
    plain = PeerConnections("a", gone.put)
    try:
        peers.set_peers({"a": ("127.0.0.1", plain.port)})
        wait_for(lambda: "a" in peers._connections and bool(peers._connections["a"].retry_at))
        assert not peers._connections["a"].proven
    finally:
        plain.close()
    assert nothing(gone)
