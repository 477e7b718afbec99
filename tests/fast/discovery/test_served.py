"""A served store: pushes, limits, pauses and restarts of the server, TLS, tokens, foreign servers."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl.cli.servers import _alone
from edl.cli.servers import store as serve_file
from edl.discovery import Store, open_store
from edl.discovery.served import server as serving
from edl.discovery.served.addresses import ListenAddress
from edl.discovery.served.server import EVERY_S, KEPT_S, Sample, SeriesRings, StoreLimits, StoreServer
from edl.discovery.served.store import ServedStore
from edl.discovery.store import MAX_VALUE_BYTES, StoreSnapshot, StoreWatch
from edl.errors import DiscoveryError, SettingsError
from edl.protocol import store as messages
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc
from edl.settings import Credentials
from tests.certificates import HERE, Authority, put
from tests.fast.discovery.conformance.processes import ROOT
from tests.fast.discovery.conformance.suite import seen_values
from tests.plugins_consul import free_ports
from tests.waiting import DEADLINE_S, wait_until

Serve = Callable[..., StoreServer]
LOCAL = "127.0.0.1"


@pytest.fixture
def serve(stack: ExitStack, tmp_path: Path) -> Serve:
    """Starts servers; they are closed at the end."""

    def start(port: int = 0, credentials: Credentials | None = None, limits: StoreLimits | None = None) -> StoreServer:
        files = None if credentials is None else CredentialFiles(credentials, serving=True)
        server = StoreServer(str(tmp_path / "served.sqlite"), ListenAddress(LOCAL, port), files, limits)
        stack.callback(server.close)
        return server

    return start


def opened(server: StoreServer, credentials: Credentials | None = None) -> ServedStore:
    store = open_store(f"edl://{LOCAL}:{server.port}", timeout_s=60.0, credentials=credentials or Credentials())
    assert isinstance(store, ServedStore)
    return store


def next_snapshot(watch: StoreWatch) -> StoreSnapshot:
    return watch.get(DEADLINE_S) or pytest.fail("nothing came")


def test_only_what_changed_is_sent(serve: Serve) -> None:
    """Megabytes that stay as they are cross the network once, in messages below gRPC's limit."""
    with opened(serve()) as store:
        for number in range(12):
            store.put(f"a/{number}", b"x" * MAX_VALUE_BYTES)
        replies = iter(store.client.watch("a/"))
        first = [next(replies)]
        while first[-1].more:
            first.append(next(replies))
        assert len(first) > 2
        assert max(reply.ByteSize() for reply in first) < 2 << 20
        store.put("a/new", b"y")
        store.delete("a/3")
        found = [next(replies), next(replies)]
        assert [(list(reply.deleted), [entry.key for entry in reply.changed]) for reply in found] == [
            ([], ["a/new"]),
            (["a/3"], []),
        ]


def test_figures_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    rings = SeriesRings(lambda: now)
    for name in ("gone", "job"):
        rings.record({name: {"b": None, "a": 1.0}})
    for _ in range(serving._MOST_POINTS + 7):
        now += EVERY_S
        rings.record({"job": {"b": now, "a": 2.0}})
    (reply,) = rings.replies()
    width = len(reply.fields)
    assert (reply.name, list(reply.fields)) == ("job", ["t", "a", "b"]), "a series stays long after its last point"
    assert len(reply.values) == serving._MOST_POINTS * width
    assert [reply.values[0], *reply.values[-width:]] == [now - KEPT_S + EVERY_S, now, 2.0, now]
    rings.record({"job": {"c": 3.0}})
    assert [list(one.values) for one in rings.replies()] == [[now, 3.0]], "points of other fields are mixed"
    monkeypatch.setattr(serving, "_MOST_SERIES", 2)
    for name in ("x", "job", "y"):
        rings.record({name: {}})
    assert [one.name for one in rings.replies()] == ["job", "y"]


def test_figures_reach_clients(stack: ExitStack, tmp_path: Path) -> None:
    def sample(store: Store) -> Sample:
        return {"jobs/j": {"keys": float(len(store.list(""))), "unknown": None}}

    server = StoreServer(str(tmp_path / "s.sqlite"), ListenAddress(LOCAL, 0), sample=sample)
    stack.callback(server.close)
    with opened(server) as store:
        wait_until(lambda: bool(list(store.series())), "nothing is recorded")
        ((name, (row, *_)),) = store.series()
        assert (name, row["keys"], math.isnan(row["unknown"]), row["t"] > 1e9) == ("jobs/j", 0.0, True, True)


def test_a_server_has_limits(serve: Serve) -> None:
    with opened(serve(limits=StoreLimits(keys=2, nbytes=100, leases=1, watches=1))) as store:
        store.put("a", b"x" * 90)
        with pytest.raises(DiscoveryError, match="is full: its values would exceed 100 bytes"):
            store.put("b", b"x" * 11)
        store.put("b", b"")
        with pytest.raises(DiscoveryError, match="is full: it already has 2 keys"):
            store.put("c", b"")
        assert store.put("b", b"x").value == b"x", "a key that is there is no new one"
        with store.lease(), pytest.raises(DiscoveryError, match="is full: it already has 1 leases"):
            store.lease()
        with store.watch("a") as first, store.watch("b") as second:
            snapshots = [next_snapshot(first), next_snapshot(second)]
            assert sum("is full: it already has 1 watches" in snapshot.stale for snapshot in snapshots) == 1


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


def test_a_server_s_pause_ends_no_lease(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals that came while the server stood still are read behind the pause, which does not count."""
    now = [1000.0]
    for module in ("served.server", "sqlite"):
        monkeypatch.setattr(f"edl.discovery.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))
    server = serve()
    with opened(server) as store:
        lease = store.client.call("Grant", messages.GrantRequest(ttl_s=3.0), messages.GrantReply).lease
        store.client.call("Set", messages.SetRequest(key="a", value=b"x", lease=lease), messages.SetReply)

        def renewed(passed_s: float) -> bool:
            now[0] += passed_s
            return store.client.call("Renew", messages.RenewRequest(lease=lease), messages.RenewReply).renewed

        assert renewed(40.0)
        assert (store.get("a") or pytest.fail("the pause counted")).value == b"x"
        for _ in range(11):
            now[0] += 0.28
            wait_until(lambda: server._servicer._ticked_at == now[0])  # type: ignore[union-attr]
        assert not renewed(0.0), "without a pause it is over after its length"
        assert store.get("a") is None


def test_a_restarted_server_goes_on(serve: Serve, tmp_path: Path) -> None:
    """Leases, versions and watches outlive it; leases that were over meanwhile begin anew."""
    port = free_ports(1)[0]
    server = serve(port)
    with opened(server) as store, store.watch("") as watch, store.lease(60.0) as lease:
        entry = store.put("a", b"1", lease)
        short = store.client.call("Grant", messages.GrantRequest(ttl_s=60.0), messages.GrantReply).lease
        seen_values(watch, {"a": b"1"})
        server.close()
        wait_until(lambda: next_snapshot(watch).stale)
        with pytest.raises(DiscoveryError, match="cannot be reached"):
            store.get("a")
        with contextlib.closing(sqlite3.connect(tmp_path / "served.sqlite")) as connection, connection:
            connection.execute("UPDATE lease SET expires = 1.0")  # over long ago
        serve(port)
        wait_until(lambda: next_snapshot(watch) == StoreSnapshot({"a": entry}))
        renewal = messages.RenewRequest(lease=short)
        assert store.client.call("Renew", renewal, messages.RenewReply).renewed
        assert not lease.lost
        later = store.compare_and_set("a", b"2", entry.version, lease)
        assert later is not None
        assert later.version > entry.version


SUSPENDED = """
import sys
from edl.discovery import Instance, open_registry, open_store

def follow(url):
    with open_registry(url) as registry, open_store(url) as store, store.lease() as lease:
        store.put("a", b"1", lease)
        with registry.register(Instance("s", "a", "h", 1)), store.elect("e", b"") as election:
            with registry.watch("s") as watch, store.watch("") as entries:
                yield from entries

states = follow(sys.argv[1])
print(sorted(next(states).entries)[0])
"""


def test_suspended_watch_ends_with_its_process(serve: Serve) -> None:
    """The interpreter closes the generator when its threads are frozen: what waits for them waits for ever."""
    command = [sys.executable, "-c", SUSPENDED, f"edl://{LOCAL}:{serve().port}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")


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
        wait_until(lambda: next_snapshot(watch).entries == {"a": entry})
    for half, words in (
        (Credentials(), "missing now: EDL_TLS_CA, EDL_TLS_CERT, EDL_TLS_KEY"),
        (Credentials(ca=own.ca), "requires a client certificate.*missing now: EDL_TLS_CERT, EDL_TLS_KEY"),
        (Credentials(cert=own.cert, key=own.key), "missing now: EDL_TLS_CA$"),
    ):
        with opened(server, half) as store, pytest.raises(DiscoveryError, match=words):
            store.get("a")
    strange = stranger.issue(*HERE).save(tmp_path, "strange")
    foreign = Credentials(ca=own.ca, **strange)  # type: ignore[arg-type]
    with opened(server, foreign) as store, pytest.raises(DiscoveryError, match="not accept this side's certificate"):
        store.get("a")
    plain = StoreServer(str(tmp_path / "plain.sqlite"), ListenAddress(LOCAL, 0))
    try:
        with opened(plain, own) as store, pytest.raises(DiscoveryError, match="does not speak TLS"):
            store.get("a")
    finally:
        plain.close()


def test_a_file_has_one_server(tmp_path: Path) -> None:
    """A second is told who has it; the lock goes with that process, and other commands use the file beside it."""
    path = tmp_path / "store.sqlite"
    command = [sys.executable, "-m", "edl", "store", "--file", str(path), "--host", LOCAL, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as first:
        try:
            assert first.stderr is not None
            assert "serving the store" in first.stderr.readline()
            with open_store(f"sqlite:///{path}") as store:
                assert store.put("a", b"1").value == b"1"
            (tmp_path / "link").symlink_to(path)
            (tmp_path / "hard").hardlink_to(path)
            named = f"process {first.pid} on .*"
            for same, holder in (
                (path, named),
                ("link", named),
                ("hard", "another process"),
                (path, "another process"),
            ):
                with pytest.raises(SettingsError, match=f"by {holder}: stop that one"), _alone(tmp_path / same):
                    pytest.fail("it is served twice")
                if same == "hard":
                    (tmp_path / "store.sqlite.lock").unlink()
        finally:
            first.kill()
    with _alone(path):
        assert path.exists()


@pytest.mark.parametrize(("file", "words"), [("sqlite:////x/q.db", "mean /x/q.db"), ("kubernetes://x", "path is exp")])
def test_a_file_is_no_url(file: str, words: str) -> None:
    with pytest.raises(SettingsError, match=f"a URL; .*{words}"):
        serve_file(["--file", file])


def test_other_servers_are_told_apart() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port(f"{LOCAL}:0")
    server.start()
    try:
        with open_store(f"edl://{LOCAL}:{port}") as store, pytest.raises(DiscoveryError, match="not an EDL store"):
            store.get("a")
    finally:
        server.stop(None).wait(DEADLINE_S)
