"""What only etcd has: members, a leader, compaction, users, certificates, servers that are full."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.discovery import Registry, Snapshot, Store, open_registry, open_store
from edl.discovery.etcd import EtcdClient, EtcdTarget
from edl.discovery.store import Lease
from edl.errors import LeaseLostError, SettingsError
from tests.certificates import Authority
from tests.fast.discovery.conformance.backends import EtcdBackend, teacher
from tests.fast.discovery.conformance.fixtures import PATIENT_S
from tests.fast.discovery.conformance.suite import LONG_S, refusal, seen, seen_values
from tests.interrupting import deadline
from tests.plugins_consul import free_ports
from tests.plugins_etcd import EtcdServer, etcd_cluster
from tests.waiting import DEADLINE_S, wait_until


def address(server: EtcdServer) -> str:
    return server.client_url.partition("//")[2]


@pytest.fixture
def backend(etcd_server: EtcdServer) -> EtcdBackend:
    return EtcdBackend(etcd_server)


# A server


def test_watch_of_lost_revisions_returns(etcd_server: EtcdServer, store: Store, service: str) -> None:
    """From before a compaction, and from one that etcd will reach in a long time, as it began anew."""
    first = store.put(f"{service}/a", b"0")
    for number in range(3):
        last = store.put(f"{service}/a", str(number).encode())
    etcd_server.ctl("compaction", str(last.version))
    prefix = f"edl/store/{service}/".encode()
    with contextlib.closing(EtcdClient(EtcdTarget((address(etcd_server),)))) as client:
        with deadline(DEADLINE_S, "told of the compaction"):
            client.await_change(prefix, first.version, 600.0)
        assert client.entries(prefix)[1][0].mod_revision == last.version
        with deadline(DEADLINE_S, "told that etcd is behind"):
            client.await_change(prefix, 1 << 40, 600.0)


def test_deleted_keys_are_registered_again(etcd_server: EtcdServer, registry: Registry, service: str) -> None:
    """And what others put there, which no service can be named, is left out."""
    for key in (f"edl/store/registry/{service} odd/records/claim/a", "edl/store/registry//records/claim/a"):
        etcd_server.ctl("put", key, "{}")
    with registry.register(teacher(service), 0.6):
        for kind in ("records", "alive"):
            etcd_server.ctl("del", "--prefix", f"edl/store/registry/{service}/{kind}/")
            wait_until(lambda: registry.snapshot(service) == Snapshot(service, (teacher(service),)))
        for name in registry.services():
            registry.snapshot(name)


def test_leases_of_others_are_refused(etcd_server: EtcdServer, store: Store, service: str) -> None:
    """Those of another etcd, whose number might be another's there, and those that it has ended."""
    with store.lease(LONG_S) as lease, open_store("etcd://127.0.0.1:1") as other:
        assert isinstance(lease, Lease)
        with pytest.raises(SettingsError, match="not a lease of"):
            other.put(f"{service}/a", b"x", lease)
        assert not lease.lost
        etcd_server.ctl("lease", "revoke", f"{lease.claim.number:x}")  # type: ignore[attr-defined]
        with pytest.raises(LeaseLostError):
            store.compare_and_set(f"{service}/a", b"x", None, lease)
        assert lease.lost
        assert store.get(f"{service}/a") is None


def test_full_etcd_keeps_who_is_there(tmp_path: Path, service: str) -> None:
    """A lease that nobody renews says when the length of all is over."""
    with (
        EtcdServer(tmp_path / "alone", options=("--quota-backend-bytes", "3000000")) as server,
        open_registry(server.url, timeout_s=PATIENT_S) as registry,
        open_store(server.url, timeout_s=PATIENT_S) as store,
        registry.register(teacher(service), 6.0) as registration,
        store.lease(6.0) as lease,
        store.lease(6.0) as left,
    ):
        entry = store.put(f"{service}/a", b"1", lease)
        store.put(f"{service}/left", b"1", left)
        for part in left._parts:  # type: ignore[attr-defined]
            part.close()
        large = (refusal(lambda: store.put(f"{service}/b", b"x" * 250_000)) for _ in range(100))
        assert "etcdctl alarm disarm" in next(filter(None, large))
        assert "etcdctl alarm disarm" in refusal(lambda: registry.register(teacher(service, "b")))
        wait_until(lambda: store.get(f"{service}/left") is None)
        assert (registration.error, lease.lost, store.get(entry.key)) == ("", False, entry)
        assert registry.snapshot(service) == Snapshot(service, (teacher(service),))
        assert store.delete(f"{service}/b")


# Members


def test_a_killed_leader_is_not_felt(tmp_path: Path, service: str) -> None:
    with etcd_cluster(tmp_path) as servers:
        url = "etcd://" + ",".join(address(server) for server in servers)
        with (
            open_registry(url, timeout_s=PATIENT_S) as registry,
            open_store(url, timeout_s=PATIENT_S) as store,
            registry.register(teacher(service), LONG_S) as registration,
            registry.watch(service) as watch,
            store.watch(f"{service}/") as entries,
            store.lease(LONG_S) as lease,
            store.elect(service, b"me", LONG_S) as election,
        ):
            entry = store.put(f"{service}/a", b"1", lease)
            assert election.wait(DEADLINE_S)
            seen_values(entries, {entry.key: b"1"})
            seen(watch, "a")
            wait_until(lambda: _leader(servers), "a leader among the members").kill()
            wait_until(lambda: not refusal(lambda: store.put(entry.key, b"2", lease)))
            seen_values(entries, {entry.key: b"2"})
            assert (lease.lost, registration.error, election.is_leader) == (False, "", True)
            wait_until(lambda: not refusal(lambda: registry.register(teacher(service, "b"), LONG_S)))
            seen(watch, "a", "b")


def _leader(servers: list[EtcdServer]) -> EtcdServer | None:
    """The member that says that it leads; None while they elect another."""
    return next((server for server in servers if ", true, " in server.ctl("endpoint", "status")), None)


def test_members_are_passed_over(etcd_server: EtcdServer, store: Store, service: str) -> None:
    """Those that are away, and those that say nothing, however long a request may take."""
    good = address(etcd_server)
    with open_store(f"etcd://127.0.0.1:{free_ports(1)[0]},{good}", timeout_s=PATIENT_S) as away:
        assert away.put(f"{service}/a", b"1").value == b"1", "a write that reached no member is sent to the next"
        with away.watch(f"{service}/") as watch:
            assert (watch.get(DEADLINE_S) or pytest.fail("nothing came")).stale == ""
    with socket.create_server(("127.0.0.1", 0)) as silent, store.lease(LONG_S) as lease:
        member = f"127.0.0.1:{silent.getsockname()[1]}"
        with open_store(f"etcd://{member},{good}", timeout_s=6.0) as half:
            assert half.get(f"{service}/a"), "half of the time is left for the other member"
            with half.watch(f"{service}/") as watch:
                assert (watch.get(DEADLINE_S) or pytest.fail("nothing came")).stale == ""
        target = EtcdTarget((member, good), timeout_s=LONG_S)
        with contextlib.closing(EtcdClient(target)) as client, deadline(DEADLINE_S, "asked the other one"):
            assert client.renew(lease.claim.number, 2.0)  # type: ignore[attr-defined]


# Users and certificates

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
    with EtcdServer(folder / "alone", options=(*options, *own), tls=tls) as server:
        for user in ("root", "edl", "guest"):
            server.ctl("user", "add", f"{user}:{SECRET}")
        server.ctl("user", "grant-role", "root", "root")
        server.ctl("role", "add", "edl")
        server.ctl("role", "grant-permission", "edl", "--prefix=true", "readwrite", "edl/")
        server.ctl("user", "grant-role", "edl", "edl")
        server.ctl("auth", "enable")
        yield server, folder


@pytest.fixture
def variables(guarded: tuple[EtcdServer, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("CACERT", "ca.pem"), ("CERT", "client.pem"), ("KEY", "client.key")):
        monkeypatch.setenv(f"ETCDCTL_{name}", str(guarded[1] / file))
    monkeypatch.setenv("ETCDCTL_USER", "edl")
    monkeypatch.setenv("ETCDCTL_PASSWORD", SECRET)


@pytest.mark.usefixtures("variables")
def test_user_and_certificate_open_it(
    guarded: tuple[EtcdServer, Path], service: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server, _ = guarded
    with (
        open_registry(server.url, timeout_s=PATIENT_S) as registry,
        open_store(server.url, timeout_s=PATIENT_S) as store,
        registry.register(teacher(service), LONG_S) as registration,
        registry.watch(service) as watch,
        store.lease(LONG_S) as lease,
        store.elect(service, b"me", LONG_S) as election,
    ):
        seen(watch, "a")
        entry = store.put(f"{service}/a", b"1", lease)
        assert election.wait(DEADLINE_S)
        # etcd forgets its sessions where it starts again, and all log in anew.
        server.kill()
        server.start()
        wait_until(lambda: not refusal(lambda: registry.snapshot(service)))
        assert store.compare_and_set(entry.key, b"2", entry.version, lease)
        with registry.register(teacher(service, "b"), LONG_S):
            seen(watch, "a", "b")
        shown = "".join(repr(thing) + repr(vars(thing)) for thing in (registry, store, registration, watch, lease))
    assert SECRET not in shown + caplog.text


@pytest.mark.usefixtures("variables")
def test_who_may_not_is_told_the_remedy(
    guarded: tuple[EtcdServer, Path], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = guarded
    for name, value, remedy in (
        ("ETCDCTL_USER", "guest", "user guest needs `etcdctl role grant-permission"),
        ("ETCDCTL_PASSWORD", "wrong", "check ETCDCTL_USER and ETCDCTL_PASSWORD"),
        ("ETCDCTL_USER", "", "the user (ETCDCTL_USER or certificate) needs"),
        ("ETCDCTL_CACERT", Authority("another").save(folder, "other"), "ETCDCTL_CACERT"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            with (
                open_registry(server.url) as registry,
                open_store(server.url) as store,
                registry.watch(service) as watch,
            ):
                for call in (lambda: registry.snapshot(service), lambda: store.put(f"{service}/a", b"")):
                    words = refusal(call)
                    assert remedy in words
                    assert SECRET not in words
                assert remedy in (watch.get(DEADLINE_S) or pytest.fail("nothing came")).stale
    with open_store(server.url.replace("etcd+https", "etcd")) as store:
        assert "etcd+https" in refusal(lambda: store.get("a"))
    for name in ("CERT", "KEY"):
        monkeypatch.delenv(f"ETCDCTL_{name}")
    with open_store(server.url) as store:
        assert "cannot be reached" in refusal(lambda: store.get("a"))


@pytest.mark.usefixtures("variables")
def test_replaced_certificate_is_taken_up(
    guarded: tuple[EtcdServer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = guarded
    paths = Authority("of nobody").issue("127.0.0.1").save(tmp_path)
    monkeypatch.setenv("ETCDCTL_CERT", paths["cert"])
    monkeypatch.setenv("ETCDCTL_KEY", paths["key"])
    with open_store(server.url) as store:
        assert refusal(lambda: store.get("a")), "etcd knows no such CA"
        for name, file in (("key", "client.key"), ("cert", "client.pem")):
            Path(paths[name]).write_bytes((folder / file).read_bytes())
        wait_until(lambda: not refusal(lambda: store.get("a")))
