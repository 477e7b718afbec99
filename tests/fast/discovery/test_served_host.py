"""Which process of a host serves a store, which host that is, and why nothing answers."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.discovery import Store, open_store
from edl.discovery.served import host as hosting
from edl.discovery.served.diagnosis import diagnose
from edl.discovery.served.host import KEPT, StoreHost
from edl.discovery.served.listening import ListenAddress
from edl.discovery.served.own_host import is_own_host
from edl.discovery.store import StoreSnapshot, StoreWatch
from edl.errors import DiscoveryError, SettingsError
from tests.fast.discovery.conformance.backends import eventually
from tests.plugins_consul import free_ports

LOCAL = "127.0.0.1"
Begin = Callable[[], StoreHost]


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def begin(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Makes hosts of one port, as several processes of one host would; they are closed at the end."""
    monkeypatch.setattr(hosting, "_folder", lambda: tmp_path)
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(StoreHost(ListenAddress(LOCAL, port), None)))


def silent(line: str) -> None:
    raise AssertionError(f"nothing takes long here: {line}")


def put_and_see(store: Store, watch: StoreWatch, value: bytes) -> None:
    """Write once the store answers again, and wait until the watch, which was open before, shows it."""

    def written() -> bool:
        with contextlib.suppress(DiscoveryError):
            return store.put("a/seen", value).value == value
        return False

    def shown() -> bool:
        found = (watch.get(1.0) or StoreSnapshot({})).entries.get("a/seen")
        return found is not None and found.value == value

    assert eventually(written, 60.0)
    assert eventually(shown, 60.0)


def test_the_first_serves(begin: Begin, port: int) -> None:
    """Of three processes one serves; where it ends another one does, with keys and leases as they were."""
    hosts = [begin() for _ in range(3)]
    assert [bool(host.server) for host in hosts] == [True, False, False]
    with open_store(f"edl://{LOCAL}:{port}") as store, store.lease(60.0) as lease:
        entry = store.put("a", b"1", lease)
        with store.watch("a/") as watch:
            hosts[0].close()
            assert eventually(lambda: any(host.server for host in hosts[1:]))
            assert sum(bool(host.server) for host in hosts[1:]) == 1
            put_and_see(store, watch, b"again")
        assert store.get("a") == entry
        assert not lease.lost


def test_the_last_removes_the_file(begin: Begin, port: int) -> None:
    host = begin()
    with open_store(f"edl://{LOCAL}:{port}") as store:
        store.put("a", b"1")
    assert host.path.exists()
    host.leave(silent, 60.0)
    assert not list(host.path.parent.iterdir())
    with open_store(f"edl://{LOCAL}:{port}") as store:
        host.close()
        begin()
        assert store.get("a") is None, "the next job finds nothing of the one before"


def test_who_leaves_serves_until_others_end(begin: Begin, port: int) -> None:
    host, lines = begin(), list[str]()
    with open_store(f"edl://{LOCAL}:{port}") as store, store.watch("a/") as watch:
        put_and_see(store, watch, b"1")
        leaving = threading.Thread(target=host.leave, args=(lines.append, 60.0))
        leaving.start()
        assert eventually(lambda: lines)
        assert "until other nodes have ended" in lines[0]
        assert leaving.is_alive()
        assert store.put("a", b"2").value == b"2"
    leaving.join(60)
    assert not leaving.is_alive()
    assert not host.path.exists()


def test_who_leaves_hands_over(begin: Begin, port: int) -> None:
    """To a process of the same host, at once; and that one removes the file."""
    first, second = begin(), begin()
    with open_store(f"edl://{LOCAL}:{port}") as store, store.watch("a/") as watch:
        entry = store.put("a", b"1")
        put_and_see(store, watch, b"before")
        first.leave(silent, 60.0)
        first.close()
        assert eventually(lambda: second.server)
        put_and_see(store, watch, b"after")
        assert store.get("a") == entry
    second.leave(silent, 60.0)
    assert not second.path.exists()


def test_leaving_hands_over_to_a_late_one(begin: Begin, port: int) -> None:
    """A node that begins while the host that leaves holds the lock of the waiting is handed the store as well."""
    first = begin()
    first._waiting.release()
    assert first._waiting.take(fcntl.LOCK_EX)
    second = begin()
    first._waiting.release()
    assert eventually(lambda: second._is_waiting)
    with open_store(f"edl://{LOCAL}:{port}") as store, store.watch("a/") as watch:
        put_and_see(store, watch, b"before")
        first.leave(silent, 60.0)
        first.close()
        assert eventually(lambda: second.server)
        put_and_see(store, watch, b"after")


def test_all_leave_at_once(begin: Begin, port: int) -> None:
    """The store is served until the last client has ended, whoever of the leaving ones does it."""
    hosts = [begin() for _ in range(3)]
    with open_store(f"edl://{LOCAL}:{port}") as store, store.watch("a/") as watch:
        put_and_see(store, watch, b"before")
        threads = [threading.Thread(target=host.leave, args=(lambda line: None, 60.0)) for host in hosts]
        for thread in threads:
            thread.start()
        assert eventually(lambda: sum(thread.is_alive() for thread in threads) == 1, 60.0)
        put_and_see(store, watch, b"after")
        assert sum(bool(host.server) for host in hosts) == 1
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not hosts[0].path.exists()


def test_what_somebody_kept_stays(begin: Begin, port: int) -> None:
    """The file outlives its server, which waits for whoever is to come for it; the next one removes it."""
    host = begin()
    with open_store(f"edl://{LOCAL}:{port}") as store:
        store.put(f"{KEPT}job/node", b"")
    host.leave(silent, 0.0)
    host.close()
    assert host.path.exists()
    again, lines = begin(), list[str]()
    leaving = threading.Thread(target=again.leave, args=(lines.append, 600.0))
    leaving.start()
    assert eventually(lambda: lines)
    with open_store(f"edl://{LOCAL}:{port}") as store:
        assert store.delete(f"{KEPT}job/node")
    leaving.join(60)
    assert not leaving.is_alive()
    assert not again.path.exists()


def test_a_taken_port_is_waited_for(begin: Begin, port: int) -> None:
    with socket.create_server((LOCAL, port)):
        host = begin()
        assert not host.server
    assert eventually(lambda: host.server)


def test_own_names_and_addresses() -> None:
    assert is_own_host("localhost")
    assert is_own_host("127.0.0.1")
    assert is_own_host("::1")
    assert is_own_host(socket.gethostname())
    assert not is_own_host("203.0.113.7")
    assert not is_own_host(f"{uuid.uuid4().hex}.invalid")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("203.0.113.1", 1))
        assert is_own_host(probe.getsockname()[0])


def test_why_nothing_answers(port: int) -> None:
    assert "nobody listens" in diagnose(LOCAL, port).words
    assert "cannot be resolved" in diagnose(f"{uuid.uuid4().hex}.invalid", port).words
    with socket.create_server((LOCAL, port)):
        found = diagnose(LOCAL, port)
        assert found.connected
        assert "says nothing" in found.words
        assert not found.final


@pytest.mark.parametrize(
    ("answer", "words", "final"),
    [
        (b"", "accepted and closed at once", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program than EDL", True),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "another program than EDL", True),
        (b"\0\0\0\4\0\0\0\0\0", "", False),
    ],
)
def test_who_answers_is_told_apart(answer: bytes, words: str, final: bool) -> None:
    with socket.create_server((LOCAL, 0)) as server:

        def respond() -> None:
            connection = server.accept()[0]
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=respond)
        thread.start()
        found = diagnose(LOCAL, server.getsockname()[1])
        thread.join()
    assert words in found.words
    assert bool(found.words) == bool(words)
    assert found.final is final


def test_an_address_of_others_is_refused() -> None:
    with pytest.raises(SettingsError, match="cannot listen at 203"):
        ListenAddress("203.0.113.1", 29400).check_free()
