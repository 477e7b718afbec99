"""What only etcd has: members, a leader, compaction, users, certificates, and answers that are none."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.discovery import Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.etcd import client as client_module
from edl.discovery.etcd.client import EtcdClient
from edl.discovery.etcd.target import EtcdTarget
from edl.discovery.store import StoreSnapshot
from edl.errors import ClosedError, DiscoveryError, LeaseLostError, SettingsError
from tests.certificates import Authority
from tests.fast.discovery.conformance.backends import eventually, registered, teacher
from tests.interrupting import InterruptAt, deadline
from tests.plugins_consul import free_ports
from tests.plugins_etcd import EtcdServer, etcd_cluster

pytestmark = pytest.mark.etcd
STEP = 37
PATIENT_S = 30.0  # for calls that must succeed on a busy machine; what cannot be reached is told at once


def calls_of(registry: Registry, store: Store, service: str) -> list[Callable[[], object]]:
    return [
        lambda: registry.snapshot(service),
        registry.services,
        lambda: registry.register(teacher(service)),
        lambda: store.get("a"),
        lambda: store.list("a"),
        lambda: store.put("a", b""),
        lambda: store.delete("a"),
        store.lease,
    ]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except DiscoveryError as exc:
        return str(exc)
    return ""


class TestServer:
    def test_all_survives_a_kill_and_a_restart(self, etcd_server: EtcdServer, service: str) -> None:
        with (
            open_registry(etcd_server.url, timeout_s=PATIENT_S) as registry,
            open_store(etcd_server.url, timeout_s=PATIENT_S) as store,
            registry.register(teacher(service), 8.0) as registration,
            registry.watch(service) as watch,
            store.watch(f"{service}/") as entries,
            store.lease(60.0) as lease,
            store.elect(service, b"me", 60.0) as election,
        ):
            entry = store.put(f"{service}/a", b"1", lease)
            assert eventually(lambda: (entries.get(1) or StoreSnapshot({})).entries == {entry.key: entry})
            assert election.wait(20)
            while not (healthy := watch.get(10) or pytest.fail("not seen")).instances:
                pass
            etcd_server.kill()
            history = [watch.get(20) or pytest.fail("the watcher does not notice")]
            assert eventually(lambda: registration.error)
            etcd_server.start()
            while history[-1] != healthy:
                history.append(watch.get(30) or pytest.fail("the watcher does not recover"))
            assert history[0].stale
            assert [snapshot.instances for snapshot in history] == [healthy.instances] * len(history)
            assert store.get(entry.key) == entry
            later = store.compare_and_set(entry.key, b"2", entry.version, lease) or pytest.fail("not set")
            assert later.version > entry.version
            assert eventually(lambda: (entries.get(1) or StoreSnapshot({})).entries == {later.key: later})
            assert not lease.lost
            assert election.is_leader
            assert eventually(lambda: not registration.error)

    def test_quiet_watch_asks_nothing(
        self, etcd_server: EtcdServer, service: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[object] = []
        ask = EtcdClient._ask
        monkeypatch.setattr(EtcdClient, "_ask", lambda self, *rest: asked.append(rest) or ask(self, *rest))
        with open_registry(etcd_server.url) as registry, registry.watch(service) as watch:
            assert watch.get(10) == Snapshot(service, ())
            assert watch.get(1.5) is None
            assert len(asked) == 1, asked

    def test_compacted_watch_returns(self, etcd_server: EtcdServer, service: str) -> None:
        prefix = f"edl/store/{service}/".encode()
        with open_store(etcd_server.url) as store:
            first = store.put(f"{service}/a", b"0")
            for number in range(3):
                last = store.put(f"{service}/a", str(number).encode())
            etcd_server.ctl("compaction", str(last.version))
            with contextlib.closing(EtcdClient(EtcdTarget((etcd_server.client_url.partition("//")[2],)))) as client:
                with deadline(20, "told of the compaction"):
                    client.await_change(prefix, first.version, 60.0)
                assert client.entries(prefix)[1][0].mod_revision == last.version

    def test_returns_where_memory_was_lost(self, etcd_server: EtcdServer, service: str) -> None:
        """A watch from a revision that etcd will reach in a long time, as it began anew."""
        target = EtcdTarget((etcd_server.client_url.partition("//")[2],))
        with contextlib.closing(EtcdClient(target)) as client, deadline(20, "told that etcd is behind"):
            client.await_change(b"edl/store/", 1 << 40, 60.0)

    def test_deleted_keys_are_registered_again(self, etcd_server: EtcdServer, service: str) -> None:
        with open_registry(etcd_server.url) as registry, registry.register(teacher(service), 0.6):
            for kind in ("records", "alive"):
                etcd_server.ctl("del", "--prefix", f"edl/registry/{service}/{kind}/")
                assert eventually(lambda: registry.snapshot(service).instances)
                assert eventually(lambda: not registry.snapshot(service).lapsed)

    def test_odd_names_of_others_are_left_out(self, etcd_server: EtcdServer, service: str) -> None:
        """Whoever asks for each service in the list gets an answer."""
        foreign = (f"edl/registry/{service} odd/records/claim/a", "edl/registry//records/claim/a")
        try:
            for key in foreign:
                etcd_server.ctl("put", key, "{}")
            with open_registry(etcd_server.url) as registry, registry.register(teacher(service)):
                assert service in registry.services()
                for name in registry.services():
                    registry.snapshot(name)
        finally:
            for key in foreign:
                etcd_server.ctl("del", key)

    def test_lapsed_etcd_lease_writes_nothing(self, etcd_server: EtcdServer, service: str) -> None:
        with open_store(etcd_server.url) as store, store.lease(60.0) as lease:
            etcd_server.ctl("lease", "revoke", f"{lease.claim.number:x}")  # type: ignore[attr-defined]
            with pytest.raises(LeaseLostError):
                store.compare_and_set(f"{service}/a", b"x", None, lease)
            assert lease.lost
            assert store.get(f"{service}/a") is None

    def test_foreign_lease_is_refused(self, etcd_server: EtcdServer, service: str) -> None:
        """Its number might be another one's there."""
        with open_store(etcd_server.url) as store, open_store("etcd://127.0.0.1:1") as other, store.lease() as lease:
            with pytest.raises(SettingsError, match="not a lease of"):
                other.put(f"{service}/a", b"x", lease)
            assert not lease.lost

    def test_hanging_etcd_is_an_error_in_time(self, etcd_server: EtcdServer, service: str) -> None:
        registry, store = open_registry(etcd_server.url, timeout_s=0.5), open_store(etcd_server.url, timeout_s=0.5)
        registration = eventually(lambda: registered(registry, service)) or pytest.fail("etcd is too slow")
        watch = registry.watch(service)
        assert watch.get(10) is not None
        os.kill(etcd_server.pid, signal.SIGSTOP)
        try:
            with deadline(30, "told in time"):
                for call in calls_of(registry, store, service):
                    with pytest.raises(DiscoveryError, match=r"timed out after 0\.5 s"):
                        call()
                for thing in (watch, registration, registry, store):
                    thing.close()
        finally:
            os.kill(etcd_server.pid, signal.SIGCONT)

    def test_closing_ends_a_call(self, etcd_server: EtcdServer) -> None:
        os.kill(etcd_server.pid, signal.SIGSTOP)
        try:
            store = open_store(etcd_server.url, timeout_s=60.0)
            threading.Timer(0.3, store.close).start()
            with deadline(20, "closed"), pytest.raises(ClosedError):
                store.get("a")
        finally:
            os.kill(etcd_server.pid, signal.SIGCONT)

    @pytest.mark.parametrize("files", ["edl/", "grpc/"])
    def test_closes_at_any_line(self, etcd_server: EtcdServer, service: str, files: str) -> None:
        """By a signal handler, in the middle of its own calls and of gRPC's functions."""
        over = (ClosedError, LeaseLostError)
        for number in itertools.count(1, STEP):
            with deadline(60, f"closed before line {number} of {files}"), contextlib.ExitStack() as opened:
                store = opened.enter_context(open_store(etcd_server.url, timeout_s=PATIENT_S))
                registry = opened.enter_context(open_registry(etcd_server.url, timeout_s=PATIENT_S))
                with InterruptAt(number, opened.close, files) as interrupt, contextlib.suppress(*over):
                    registry.register(teacher(service), 30.0)
                    lease = store.lease(30.0)
                    store.put(f"{service}/a", b"1", lease)
                    store.list(f"{service}/")
            if not interrupt.reached:
                assert number > 100, "nothing was interrupted"
                break
        with open_store(etcd_server.url) as store, open_registry(etcd_server.url) as registry:
            assert not store.list(f"{service}/"), "a lease was left behind"
            assert registry.snapshot(service) == Snapshot(service, ()), "a registration was left behind"

    def test_main_thread_makes_no_calls(self, etcd_server: EtcdServer, service: str) -> None:
        """gRPC holds a lock of the whole process in this file, which a signal handler's `close` would wait for."""
        with (
            InterruptAt(1 << 30, lambda: None, "grpc/_observability") as lines,
            open_store(etcd_server.url, timeout_s=PATIENT_S) as store,
            open_registry(etcd_server.url, timeout_s=PATIENT_S) as registry,
            registry.register(teacher(service)) as registration,
            store.lease() as lease,
            store.watch(f"{service}/") as watch,
        ):
            store.put(f"{service}/a", b"1", lease)
            assert watch.get(20)
            assert registry.snapshot(service).instances
            registration.update(teacher(service, state="draining"))
        assert lines.lines == 0

    def test_full_etcd_keeps_who_is_there(self, tmp_path: Path, service: str) -> None:
        server = EtcdServer(tmp_path / "alone", options=("--quota-backend-bytes", "3000000"))
        try:
            server.start()
            with (
                open_registry(server.url, timeout_s=PATIENT_S) as registry,
                open_store(server.url, timeout_s=PATIENT_S) as store,
                registry.register(teacher(service), 5.0) as registration,
                store.lease(5.0) as lease,
            ):
                entry = store.put(f"{service}/a", b"1", lease)
                large = (refusal(lambda: store.put(f"{service}/b", b"x" * 250_000)) for _ in range(100))
                assert "etcdctl alarm disarm" in next(filter(None, large))
                assert "etcdctl alarm disarm" in refusal(lambda: registry.register(teacher(service, "b")))
                time.sleep(6.0)  # longer than both leases
                assert (registration.error, lease.lost, store.get(entry.key)) == ("", False, entry)
                assert registry.snapshot(service) == Snapshot(service, (teacher(service),))
                assert store.delete(f"{service}/b")
        finally:
            server.kill()


class TestMembers:
    def test_a_killed_leader_is_not_felt(self, tmp_path: Path, service: str) -> None:
        with etcd_cluster(tmp_path) as servers:
            url = "etcd://" + ",".join(server.client_url.partition("//")[2] for server in servers)
            with (
                open_registry(url, timeout_s=PATIENT_S) as registry,
                open_store(url, timeout_s=PATIENT_S) as store,
                registry.register(teacher(service), 60.0) as registration,
                registry.watch(service) as watch,
                store.watch(f"{service}/") as entries,
                store.lease(60.0) as lease,
                store.elect(service, b"me", 60.0) as election,
            ):
                entry = store.put(f"{service}/a", b"1", lease)
                assert election.wait(20)
                assert eventually(lambda: (entries.get(1) or StoreSnapshot({})).entries == {entry.key: entry})
                assert eventually(lambda: (watch.get(1) or Snapshot("", ())).instances)
                leader = eventually(lambda: _leader(servers)) or pytest.fail("the members elect no leader")
                leader.kill()
                later = eventually(lambda: _put_again(store, entry.key, lease), 30)
                assert later.version > entry.version
                assert eventually(lambda: (entries.get(1) or StoreSnapshot({})).entries == {later.key: later}, 30)
                assert eventually(lambda: registry.snapshot(service) == Snapshot(service, (teacher(service),)))
                assert (lease.lost, registration.error, election.is_leader) == (False, "", True)
                with registry.register(teacher(service, "b")):
                    assert eventually(lambda: len((watch.get(1) or Snapshot("", ())).instances) == 2, 30)

    def test_one_that_is_away_is_passed_over(self, etcd_server: EtcdServer, service: str) -> None:
        url = f"etcd://127.0.0.1:{free_ports(1)[0]},{etcd_server.client_url.partition('//')[2]}"
        with open_registry(url) as registry, open_store(url) as store:
            assert store.put(f"{service}/a", b"1").value == b"1", "a write that reached no member is sent to the next"
            with registry.register(teacher(service)), registry.watch(service) as watch:
                snapshots = [watch.get(20) or pytest.fail("nothing came")]
                assert not snapshots[0].stale
                assert registry.snapshot(service).instances == (teacher(service),)

    def test_one_that_is_silent_is_passed_over(self, etcd_server: EtcdServer, service: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            member = f"127.0.0.1:{silent.getsockname()[1]}"
            url = f"etcd://{member},{etcd_server.client_url.partition('//')[2]}"
            with open_store(url, timeout_s=6.0) as store:
                assert store.get(f"{service}/a") is None, "half of the time is left for the other member"
                assert store.put(f"{service}/a", b"1")
            with open_store(url, timeout_s=6.0) as store, store.watch(f"{service}/") as watch:
                assert (watch.get(20) or pytest.fail("nothing came")).stale == ""

    def test_a_silent_one_costs_no_lease(self, etcd_server: EtcdServer) -> None:
        """However long a request may take, the other member is asked while the lease lasts."""
        good = etcd_server.client_url.partition("//")[2]
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            open_store(etcd_server.url, timeout_s=PATIENT_S) as store,
            store.lease(60.0) as lease,
        ):
            target = EtcdTarget((f"127.0.0.1:{silent.getsockname()[1]}", good), timeout_s=100.0)
            with contextlib.closing(EtcdClient(target)) as client, deadline(40, "asked the other one"):
                assert client.renew(lease.claim.number, 2.0)  # type: ignore[attr-defined]


def _leader(servers: list[EtcdServer]) -> EtcdServer | None:
    """The member that says that it leads; None while they elect another."""
    return next((server for server in servers if ", true, " in server.ctl("endpoint", "status")), None)


def _put_again(store: Store, key: str, lease: object) -> object:
    try:
        return store.put(key, b"2", lease)  # type: ignore[arg-type]
    except DiscoveryError:  # the members elect a leader
        return None


class TestAnswers:
    def test_nobody_there_is_an_error(self, service: str) -> None:
        url = f"etcd://127.0.0.1:{free_ports(1)[0]}"
        with open_registry(url) as registry, open_store(url) as store, registry.watch(service) as watch:
            for call in calls_of(registry, store, service):
                with pytest.raises(DiscoveryError, match="cannot be reached"):
                    call()
            snapshot = watch.get(10)
            assert snapshot is not None
            assert "cannot be reached" in snapshot.stale

    @pytest.mark.parametrize(
        "answer",
        [b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\n\x1b[2J", b"\0\0\0\4\0\0\0\0\0" * 9, b"x" * 70000],
        ids=["silent", "http", "settings", "noise"],
    )
    def test_bad_answer_is_an_error_in_time(self, answer: bytes, service: str) -> None:
        with (
            _answering(answer) as port,
            open_registry(f"etcd://127.0.0.1:{port}", timeout_s=0.5) as registry,
            open_store(f"etcd://127.0.0.1:{port}", timeout_s=0.5) as store,
            deadline(60, "told in time"),
        ):
            for call in calls_of(registry, store, service):
                words = refusal(call)
                assert words
                assert words.isprintable()
                assert len(words) < 1500
            with registry.watch(service) as watch:
                assert (watch.get(20) or pytest.fail("nothing came")).stale

    def test_too_large_an_answer_is_an_error(
        self, etcd_server: EtcdServer, service: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open_store(etcd_server.url) as store:
            for number in range(20):
                store.put(f"{service}/{number}", b"x" * 256 * 1024)
            assert len(store.list(f"{service}/")) == 20, "5 MiB, more than gRPC takes unless it is told to"
            monkeypatch.setattr(client_module, "_MOST_BYTES", 1_000_000)
            with open_store(etcd_server.url) as small:
                assert "larger than max" in refusal(lambda: small.list(f"{service}/"))
            for number in range(20):
                store.delete(f"{service}/{number}")


@contextlib.contextmanager
def _answering(answer: bytes) -> Iterator[int]:
    """A server that says one thing to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])
                    with contextlib.suppress(OSError):
                        taken[-1].sendall(answer)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            for connection in taken:
                connection.close()


SECRET = "s3cret:w0rd"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdServer, Path]]:
    """An etcd that asks for certificates, and knows two users: `edl`, who may use our keys, and `guest`."""
    folder = tmp_path_factory.mktemp("etcd-guarded")
    authority = Authority()
    authority.save(folder)
    for name in ("server", "client"):
        authority.issue("127.0.0.1").save(folder, name)
    files = {name: str(folder / name) for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")}
    options = ("--client-cert-auth", "--trusted-ca-file", files["ca.pem"], "--bcrypt-cost", "4")
    own = ("--cert-file", files["server.pem"], "--key-file", files["server.key"])
    tls = ("--cacert", files["ca.pem"], "--cert", files["client.pem"], "--key", files["client.key"])
    server = EtcdServer(folder / "alone", options=(*options, *own), tls=tls)
    try:
        server.start()
        for user in ("root", "edl", "guest"):
            server.ctl("user", "add", f"{user}:{SECRET}")
        server.ctl("user", "grant-role", "root", "root")
        server.ctl("role", "add", "edl")
        server.ctl("role", "grant-permission", "edl", "--prefix=true", "readwrite", "edl/")
        server.ctl("user", "grant-role", "edl", "edl")
        server.ctl("auth", "enable")
        yield server, folder
    finally:
        server.kill()


class TestGuarded:
    @pytest.fixture(autouse=True)
    def _variables(self, guarded: tuple[EtcdServer, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        _, folder = guarded
        for name, file in (("CACERT", "ca.pem"), ("CERT", "client.pem"), ("KEY", "client.key")):
            monkeypatch.setenv(f"ETCDCTL_{name}", str(folder / file))
        monkeypatch.setenv("ETCDCTL_USER", "edl")
        monkeypatch.setenv("ETCDCTL_PASSWORD", SECRET)

    def test_user_and_certificate_open_it(
        self, guarded: tuple[EtcdServer, Path], service: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        server, _ = guarded
        shown = []
        with (
            open_registry(server.url, timeout_s=PATIENT_S) as registry,
            open_store(server.url, timeout_s=PATIENT_S) as store,
            registry.register(teacher(service), 2.0) as registration,
            registry.watch(service) as watch,
            store.lease(60.0) as lease,
            store.elect(service, b"me", 60.0) as election,
        ):
            assert eventually(lambda: (watch.get(1) or Snapshot("", ())).instances)
            entry = store.put(f"{service}/a", b"1", lease)
            assert election.wait(20)
            # etcd forgets its sessions where it starts again, and all log in anew.
            server.kill()
            server.start()
            assert eventually(lambda: not refusal(lambda: registry.snapshot(service)))
            entry = store.compare_and_set(entry.key, b"2", entry.version, lease) or pytest.fail("not set")
            with registry.register(teacher(service, "b")):
                assert eventually(lambda: len((watch.get(1) or Snapshot("", ())).instances) == 2)
            assert eventually(lambda: not registration.error)
            shown += [repr(thing) + repr(vars(thing)) for thing in (registry, store, registration, watch, lease)]
        shown += [record.getMessage() for record in caplog.records]
        assert not [text for text in shown if SECRET in text]

    def test_who_may_not_is_told_the_remedy(
        self, guarded: tuple[EtcdServer, Path], service: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server, folder = guarded
        for name, value, remedy in (
            ("ETCDCTL_USER", "guest", "user guest needs `etcdctl role grant-permission"),
            ("ETCDCTL_PASSWORD", "wrong", "see ETCDCTL_USER and ETCDCTL_PASSWORD"),
            ("ETCDCTL_USER", "", "set ETCDCTL_USER"),
            ("ETCDCTL_CACERT", Authority("another").save(folder, "other"), "ETCDCTL_CACERT"),
        ):
            with monkeypatch.context() as changed:
                changed.setenv(name, value)
                with open_registry(server.url) as registry, open_store(server.url) as store:
                    for call in (lambda: registry.snapshot(service), lambda: store.put(f"{service}/a", b"")):
                        words = refusal(call)
                        assert remedy in words
                        assert SECRET not in words
                    with registry.watch(service) as watch:
                        assert remedy in (watch.get(20) or pytest.fail("nothing came")).stale
        with open_store(server.url.replace("etcd+https", "etcd")) as store:
            assert "etcd+https" in refusal(lambda: store.get("a"))
        for name in ("CERT", "KEY"):
            monkeypatch.delenv(f"ETCDCTL_{name}")
        with open_store(server.url) as store:
            assert "cannot be reached" in refusal(lambda: store.get("a"))

    def test_replaced_certificate_is_taken_up(
        self, guarded: tuple[EtcdServer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server, folder = guarded
        paths = Authority("of nobody").issue("127.0.0.1").save(tmp_path)
        monkeypatch.setenv("ETCDCTL_CERT", paths["cert"])
        monkeypatch.setenv("ETCDCTL_KEY", paths["key"])
        with open_store(server.url) as store:
            assert refusal(lambda: store.get("a")), "etcd knows no such CA"
            for name, file in (("key", "client.key"), ("cert", "client.pem")):
                Path(paths[name]).write_bytes((folder / file).read_bytes())
            assert eventually(lambda: not refusal(lambda: store.get("a")))
            begun = time.monotonic()
            assert store.get("a") is None
            assert time.monotonic() - begun < 20.0
