"""What only a served store does: pushes, limits, pauses of the server, restarts, TLS and tokens, foreign servers."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.discovery import open_store
from edl.discovery.keys import MAX_VALUE_BYTES
from edl.discovery.served.client import StoreClient
from edl.discovery.served.listening import ListenAddress, PortTakenError
from edl.discovery.served.server import StoreServer
from edl.discovery.served.servicer import StoreLimits
from edl.discovery.served.store import ServedStore
from edl.discovery.store import StoreSnapshot, StoreWatch
from edl.errors import ClosedError, DiscoveryError, LeaseLostError, SettingsError
from edl.protocol import store as messages
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.transport import grpc
from edl.settings import Credentials
from tests.certificates import HERE, Authority, put
from tests.fast.discovery.conformance.backends import eventually
from tests.interrupting import InterruptAt, deadline
from tests.plugins_consul import free_ports

Serve = Callable[..., StoreServer]
LOCAL = "127.0.0.1"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; they are closed at the end."""
    with ExitStack() as stack:

        def start(
            port: int = 0, credentials: Credentials | None = None, limits: StoreLimits | None = None
        ) -> StoreServer:
            files = None if credentials is None else CredentialFiles(credentials, serving=True)
            server = StoreServer(str(tmp_path / "served.sqlite"), ListenAddress(LOCAL, port), files, limits)
            stack.callback(server.close)
            return server

        yield start


def opened(server: StoreServer, credentials: Credentials | None = None) -> ServedStore:
    store = open_store(f"edl://{LOCAL}:{server.port}", timeout_s=20.0, credentials=credentials or Credentials())
    assert isinstance(store, ServedStore)
    return store


def next_snapshot(watch: StoreWatch) -> StoreSnapshot:
    return watch.get(30) or pytest.fail("nothing came")


def test_a_change_is_pushed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten changes reach a watcher that asks once: nothing is polled over the network."""
    server, calls = serve(), list[str]()
    with opened(server) as watcher, opened(server) as writer:
        with watcher.watch("a/") as watch:
            assert next_snapshot(watch) == StoreSnapshot({})
            asked, watched = StoreClient.call, StoreClient.watch

            def count_call(client: StoreClient, method: str, *rest: object) -> object:
                calls.append(method)
                return asked(client, method, *rest)  # type: ignore[arg-type, type-var]

            def count_watch(client: StoreClient, *rest: object, **more: object) -> object:
                calls.append("Watch")
                return watched(client, *rest, **more)  # type: ignore[arg-type]

            monkeypatch.setattr(StoreClient, "call", count_call)
            monkeypatch.setattr(StoreClient, "watch", count_watch)
            for number in range(10):
                entry = writer.put("a/b", b"%d" % number)
                assert next_snapshot(watch).entries == {"a/b": entry}
        assert calls == ["Set"] * 10


def test_only_what_changed_is_sent(serve: Serve) -> None:
    """Megabytes that stay as they are cross the network once, in messages below gRPC's limit."""
    with opened(serve()) as store:
        for number in range(20):
            store.put(f"a/{number}", b"x" * MAX_VALUE_BYTES)
        replies = iter(store.client.watch("a/"))
        first = [next(replies)]
        while first[-1].more:
            first.append(next(replies))
        assert len(first) > 4
        assert max(reply.ByteSize() for reply in first) < 2 << 20
        store.put("a/new", b"y")
        store.delete("a/3")
        found = [next(replies), next(replies)]
        assert [(list(reply.deleted), [entry.key for entry in reply.changed]) for reply in found] == [
            ([], ["a/new"]),
            (["a/3"], []),
        ]


def test_a_server_has_limits(serve: Serve) -> None:
    with opened(serve(limits=StoreLimits(keys=2, nbytes=100, leases=1, watches=1))) as store:
        store.put("a", b"x" * 90)
        with pytest.raises(DiscoveryError, match="is full: its values would have more than 100 bytes"):
            store.put("b", b"x" * 11)
        store.put("b", b"")
        with pytest.raises(DiscoveryError, match="is full: it has 2 keys already"):
            store.put("c", b"")
        assert store.put("b", b"x").value == b"x", "a key that is there is no new one"
        with store.lease(), pytest.raises(DiscoveryError, match="is full: it has 1 leases"):
            store.lease()
        with store.watch("a") as first, store.watch("b") as second:
            snapshots = [next_snapshot(first), next_snapshot(second)]
            assert sum("is full: it has 1 watches" in snapshot.stale for snapshot in snapshots) == 1


def test_a_server_checks_what_it_gets(serve: Serve) -> None:
    """A client that is none of ours gets no key or value in that others could not read."""
    with opened(serve()) as store:
        for request in (
            messages.SetRequest(key="a//b", value=b""),
            messages.SetRequest(key="a\nb", value=b""),
            messages.SetRequest(key="a", value=b"x" * (MAX_VALUE_BYTES + 1)),
        ):
            with pytest.raises(DiscoveryError, match="store"):
                store.client.call("Set", request, messages.SetReply)
        with pytest.raises(DiscoveryError, match="ttl_s="):
            store.client.call("Grant", messages.GrantRequest(ttl_s=0.1), messages.GrantReply)
        with pytest.raises(DiscoveryError):
            store.client.call("Set", messages.SetRequest(key="a", value=b"x" * (2 << 20)), messages.SetReply)
        assert store.list("") == []


def test_a_server_s_pause_ends_no_lease(serve: Serve) -> None:
    """Renewals that came while the server stood still are read behind the pause, which does not count."""
    server = serve()
    with opened(server) as store:
        lease = store.client.call("Grant", messages.GrantRequest(ttl_s=3.0), messages.GrantReply).lease
        store.client.call("Set", messages.SetRequest(key="a", value=b"x", lease=lease), messages.SetReply)
        stopped = threading.Event()

        def stand_still() -> None:
            stopped.set()
            time.sleep(4.0)

        assert server._loop is not None
        server._loop.call_soon_threadsafe(stand_still)
        assert stopped.wait(20)
        renewed = store.client.call("Renew", messages.RenewRequest(lease=lease), messages.RenewReply)
        assert renewed.renewed
        entry = store.get("a")
        assert entry is not None
        assert entry.value == b"x"


def test_a_restarted_server_goes_on(serve: Serve, tmp_path: Path) -> None:
    """Leases, versions and watches outlive it; leases that were over meanwhile begin anew."""
    port = free_ports(1)[0]
    server = serve(port)
    with opened(server) as store, store.watch("") as watch, store.lease(60.0) as lease:
        entry = store.put("a", b"1", lease)
        short = store.client.call("Grant", messages.GrantRequest(ttl_s=60.0), messages.GrantReply).lease
        assert eventually(lambda: next_snapshot(watch).entries == {"a": entry})
        server.close()
        assert eventually(lambda: next_snapshot(watch).stale)
        with pytest.raises(DiscoveryError, match="cannot be reached"):
            store.get("a")
        with contextlib.closing(sqlite3.connect(tmp_path / "served.sqlite")) as connection, connection:
            connection.execute("UPDATE lease SET expires = 1.0")  # over long ago
        serve(port)
        assert eventually(lambda: next_snapshot(watch) == StoreSnapshot({"a": entry}))
        renewal = messages.RenewRequest(lease=short)
        assert store.client.call("Renew", renewal, messages.RenewReply).renewed
        assert not lease.lost
        later = store.compare_and_set("a", b"2", entry.version, lease)
        assert later is not None
        assert later.version > entry.version


def test_main_thread_makes_no_calls(serve: Serve) -> None:
    """gRPC holds a lock of the whole process in this file, which a signal handler's `close` would wait for."""
    server = serve()
    with (
        InterruptAt(1 << 30, lambda: None, "grpc/_observability") as lines,
        opened(server) as store,
        store.lease() as lease,
        store.watch("") as watch,
    ):
        store.put("a", b"1", lease)
        assert eventually(lambda: "a" in next_snapshot(watch).entries)
        assert [entry.key for entry in store.list("")] == ["a"]
        assert store.delete("a")
    assert lines.lines == 0


@pytest.mark.timeout(300)
def test_a_handler_closes_at_any_line(serve: Serve) -> None:
    server = serve()
    for number in itertools.count(1, 17):
        with (
            deadline(60, f"closed before line {number}"),
            opened(server) as store,
            InterruptAt(number, store.close, "edl/") as interrupt,
            contextlib.suppress(ClosedError, LeaseLostError),
        ):
            store.put("a", b"1", store.lease(30.0))
            store.list("")
        if not interrupt.reached:
            assert number > 100, "nothing was interrupted"
            break


def test_a_second_server_is_refused(serve: Serve, tmp_path: Path) -> None:
    port = serve().port
    with pytest.raises(PortTakenError, match=f"port {port} of this host is taken"):
        StoreServer(str(tmp_path / "other.sqlite"), ListenAddress(LOCAL, port))
    with pytest.raises(SettingsError, match="cannot listen at 203"):
        StoreServer(str(tmp_path / "other.sqlite"), ListenAddress("203.0.113.1", port))


def test_tokens_of_a_served_store(serve: Serve, tmp_path: Path) -> None:
    tokens = put(tmp_path / "tokens", "# of the store\nfirst-token-0123456789\nsecond-token-0123456789\n")
    other = put(tmp_path / "other", "another-token-0123456789\n")
    server = serve(credentials=Credentials(token_file=tokens))
    with opened(server, Credentials(token_file=tokens)) as store:
        store.put("a", b"1")
    for credentials in (Credentials(), Credentials(token_file=other)):
        with opened(server, credentials) as store, pytest.raises(DiscoveryError, match="EDL_TOKEN_FILE"):
            store.get("a")
        with opened(server, credentials) as store, store.watch("") as watch:
            assert "EDL_TOKEN_FILE" in next_snapshot(watch).stale
    with pytest.raises(SettingsError, match="gets no token over a connection without TLS"):
        open_store("edl://store.example", credentials=Credentials(token_file=tokens))


def test_tls_of_a_served_store(serve: Serve, tmp_path: Path) -> None:
    """Mutual TLS: who shows no certificate, or one of another CA, is refused, with words that say what to do."""
    ca, stranger = Authority(), Authority("another CA")
    files = ca.issue(*HERE).save(tmp_path)
    own = Credentials(ca=ca.save(tmp_path), **files)  # type: ignore[arg-type]
    server = serve(credentials=own)
    with opened(server, own) as store, store.watch("") as watch:
        entry = store.put("a", b"1")
        assert eventually(lambda: next_snapshot(watch).entries == {"a": entry})
    with opened(server) as store, pytest.raises(DiscoveryError, match="speaks TLS, and this side has no CA set"):
        store.get("a")
    strange = stranger.issue(*HERE).save(tmp_path, "strange")
    foreign = Credentials(ca=own.ca, **strange)  # type: ignore[arg-type]
    with opened(server, foreign) as store, pytest.raises(DiscoveryError, match="does not take this side's certificate"):
        store.get("a")
    plain = StoreServer(str(tmp_path / "plain.sqlite"), ListenAddress(LOCAL, 0))
    try:
        with opened(plain, own) as store, pytest.raises(DiscoveryError, match="does not speak TLS"):
            store.get("a")
    finally:
        plain.close()


def test_another_grpc_server_is_told_apart() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port(f"{LOCAL}:0")
    server.start()
    try:
        with open_store(f"edl://{LOCAL}:{port}") as store, pytest.raises(DiscoveryError, match="no store of EDL"):
            store.get("a")
    finally:
        server.stop(None).wait(20)


def test_a_web_server_is_an_error() -> None:
    with http.server.ThreadingHTTPServer((LOCAL, 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"edl://{LOCAL}:{server.server_port}"
            with open_store(url, timeout_s=5.0) as store, pytest.raises(DiscoveryError, match="the store at 127"):
                store.get("a")
        finally:
            server.shutdown()
            thread.join()
