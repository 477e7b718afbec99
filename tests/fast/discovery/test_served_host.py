"""Which process of a host serves a store, which host that is, and why nothing answers."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.background import start_call
from edl.discovery import Store, open_store
from edl.discovery.served import addresses
from edl.discovery.served import host as hosting
from edl.discovery.served import server as serving
from edl.discovery.served.addresses import ListenAddress, diagnose, is_own_host
from edl.discovery.served.host import KEPT, StoreHost
from edl.discovery.store import StoreSnapshot, StoreWatch
from edl.errors import DiscoveryError
from tests.plugins_consul import free_ports
from tests.waiting import DEADLINE_S, wait_until

LOCAL = "127.0.0.1"
Begin = Callable[[], StoreHost]


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def begin(port: int, stack: contextlib.ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Makes hosts of one port, as several processes of one host would; they are closed at the end."""
    monkeypatch.setattr(hosting, "_folder", lambda: tmp_path)
    monkeypatch.setattr(hosting, "_END_S", 0.2)
    monkeypatch.setattr(hosting, "_HAND_OVER_S", DEADLINE_S)
    return lambda: stack.enter_context(contextlib.closing(StoreHost(ListenAddress(LOCAL, port), None)))


def put_and_see(store: Store, watch: StoreWatch, value: bytes) -> None:
    """Write once the store answers again, and wait until the watch, which was open before, shows it."""

    def written() -> bool:
        with contextlib.suppress(DiscoveryError):
            return store.put("a/seen", value).value == value
        return False

    def shown() -> bool:
        found = (watch.get(DEADLINE_S) or StoreSnapshot({})).entries.get("a/seen")
        return found is not None and found.value == value

    wait_until(written)
    wait_until(shown)


def ignore(line: str) -> None:
    """What a host says while it takes long: on a busy machine it may."""


def test_the_first_serves(begin: Begin, port: int) -> None:
    """Of three processes one serves; where it ends another one does, with keys and leases as they were."""
    hosts = [begin() for _ in range(3)]
    assert [bool(host.server) for host in hosts] == [True, False, False]
    with open_store(f"edl://{LOCAL}:{port}") as store, store.lease(600.0) as lease:
        entry = store.put("a", b"1", lease)
        with store.watch("a/") as watch:
            hosts[0].close()
            wait_until(lambda: any(host.server for host in hosts[1:]))
            assert sum(bool(host.server) for host in hosts[1:]) == 1
            put_and_see(store, watch, b"again")
        assert store.get("a") == entry
        assert not lease.lost


def test_who_leaves_serves_until_others_end(begin: Begin, port: int) -> None:
    """And then removes the file: the next job finds nothing of the one before."""
    host, lines = begin(), list[str]()
    with open_store(f"edl://{LOCAL}:{port}") as store, store.watch("a/") as watch:
        put_and_see(store, watch, b"1")
        leaving = start_call("edl-test", lambda: host.leave(lines.append, DEADLINE_S))
        wait_until(lambda: lines)
        assert "until other nodes have ended" in lines[0]
        assert not leaving.done()
        assert store.put("a", b"2").value == b"2"
    leaving.result(DEADLINE_S)
    assert not list(host.path.parent.iterdir())
    host.close()
    begin()
    with open_store(f"edl://{LOCAL}:{port}") as store:
        assert store.get("a") is None


@pytest.mark.parametrize("late", [False, True])
def test_who_leaves_hands_over(begin: Begin, port: int, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a process of the same host, at once; also to one that begins while the lock of the waiting is held."""
    monkeypatch.setattr(serving, "_RETURN_S", 0.1)
    first = begin()
    if late:
        first._waiting.release()
        assert first._waiting.take(fcntl.LOCK_EX)
    second = begin()
    if late:
        first._waiting.release()
        wait_until(lambda: second._is_waiting)
    with open_store(f"edl://{LOCAL}:{port}") as store, store.watch("a/") as watch:
        entry = store.put("a", b"1")
        put_and_see(store, watch, b"before")
        first.leave(ignore, DEADLINE_S)
        first.close()
        wait_until(lambda: second.server)
        put_and_see(store, watch, b"after")
        assert store.get("a") == entry
    second.leave(ignore, DEADLINE_S)
    assert not second.path.exists()


def test_what_somebody_kept_stays(begin: Begin, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file outlives its server, which waits for whoever is to come for it; the next one removes it."""
    monkeypatch.setattr(serving, "_RETURN_S", 0.1)
    host = begin()
    with open_store(f"edl://{LOCAL}:{port}") as store:
        store.put(f"{KEPT}job/node", b"")
    host.leave(ignore, 0.0)
    host.close()
    assert host.path.exists()
    again, lines = begin(), list[str]()
    leaving = start_call("edl-test", lambda: again.leave(lines.append, 600.0))
    wait_until(lambda: lines)
    with open_store(f"edl://{LOCAL}:{port}") as store:
        assert store.delete(f"{KEPT}job/node")
    leaving.result(DEADLINE_S)
    assert not again.path.exists()


def test_a_taken_port_is_waited_for(begin: Begin, port: int) -> None:
    with socket.create_server((LOCAL, port)):
        host = begin()
        assert not host.server
    wait_until(lambda: host.server)


def test_own_names_and_addresses() -> None:
    for name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        assert is_own_host(name)
    assert not is_own_host("203.0.113.7")
    assert not is_own_host(f"{uuid.uuid4().hex}.invalid")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("203.0.113.1", 1))  # sends nothing
        assert is_own_host(probe.getsockname()[0])


def test_why_nothing_answers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_TIMEOUT_S", 0.3)
    assert "nothing listens" in diagnose(LOCAL, port).words
    assert "cannot be resolved" in diagnose(f"{uuid.uuid4().hex}.invalid", port).words
    with socket.create_server((LOCAL, port)):
        found = diagnose(LOCAL, port)
        assert (found.connected, found.final) == (True, False)
        assert "sends nothing" in found.words
