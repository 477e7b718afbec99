"""What only a SQLite file can suffer: other files in its place, lost parts, full disks, locks, boots."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edl.discovery import Registry, Store, open_registry, open_store
from edl.discovery.sqlite import SqliteStore
from edl.discovery.store import Lease
from edl.errors import DiscoveryError, SettingsError
from tests.fast.discovery.conformance.backends import remove_database, teacher
from tests.fast.discovery.conformance.processes import Member
from tests.fast.discovery.conformance.suite import LONG_S, ids, seen
from tests.waiting import DEADLINE_S, wait_until

Start = Callable[..., Member]


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection, connection:
        yield connection


def found_ids(registry: Registry) -> list[str]:
    """Who is registered; nobody while the file is removed, or made anew."""
    with contextlib.suppress(DiscoveryError):
        return ids(registry.snapshot("s").instances)
    return []


# Leases


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the file's leases, which no other clock moves."""
    now = [1000.0]
    for module in ("sqlite", "registry"):
        monkeypatch.setattr(f"edl.discovery.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_leases_end_unless_they_are_renewed(registry: Registry, store: Store, clock: list[float]) -> None:
    """Instances are remembered for a minute, and until a process writes; keys are not."""
    lease, registration = store.lease(LONG_S), registry.register(teacher("s"), LONG_S)
    assert isinstance(lease, Lease)
    entry = store.put("a", b"1", lease)
    for _ in range(2):
        clock[0] += 0.9 * LONG_S
        assert lease.claim.renew()
        assert registration._claim.renew()
        assert store.list("a") == [entry]
        assert ids(registry.snapshot("s").instances) == ["a"]
    clock[0] += LONG_S
    assert store.get("a") is None
    assert store.list("a") == []
    assert ids(registry.snapshot("s").lapsed) == ["a"]
    assert registry.services() == ("s",)
    assert not lease.claim.renew()
    clock[0] += 76.0
    assert ids(registry.snapshot("s").lapsed) == ["a"], "nobody can renew while nobody can write"
    store.put("b", b"")
    assert registry.snapshot("s").lapsed == ()
    assert registry.services() == ()


@pytest.mark.parametrize(
    "sql", ["UPDATE state SET boot = 'an earlier one'", "UPDATE lease SET expires = expires + 1000000"]
)
def test_a_boot_ends_leases_and_keeps_keys(path: Path, url: str, sql: str) -> None:
    with open_registry(url) as registry, open_store(url) as store, store.lease(3600) as lease:
        registration = registry.register(teacher("s"), 3600)
        store.put("leased", b"1", lease)
        kept = store.put("kept", b"2")
        with raw(path) as connection:
            connection.execute(sql)
        with open_registry(url) as after, open_store(url) as store_after:
            assert after.snapshot("s").instances == ()
            assert store_after.list("") == [kept]
            assert store_after.put("kept", b"3").version > kept.version
        registration.close()


def test_a_lease_of_another_file_is_refused(store: Store, tmp_path: Path) -> None:
    with (
        open_store(f"sqlite:///{tmp_path}/other") as other,
        other.lease() as foreign,
        pytest.raises(SettingsError, match="not a lease of"),
    ):
        store.put("a", b"x", foreign)


# Other writers


def test_endless_writer_is_borne(path: Path, url: str) -> None:
    """Or a disk that is full: who cannot renew lapses, is not forgotten, and is back by itself; reading goes on."""
    with (
        open_registry(url, timeout_s=0.3) as registry,
        open_registry(url) as onlooker,
        open_store(url, timeout_s=0.3) as store,
        registry.register(teacher("s"), 0.6) as registration,
        onlooker.watch("s") as watch,
    ):
        shown = seen(watch, "a")
        wait_until(lambda: _is_put(store, b"1"))
        with raw(path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(DiscoveryError, match="locked"):
                store.put("a", b"2")
            assert (store.get("a") or pytest.fail("gone")).value == b"1"
            wait_until(lambda: ids(onlooker.snapshot("s").lapsed) == ["a"] and registration.error)
            connection.rollback()
        wait_until(lambda: _is_put(store, b"3"))
        wait_until(lambda: found_ids(onlooker) == ["a"] and not registration.error)
        with onlooker.register(teacher("s", "late"), LONG_S):
            while "late" not in ids(shown.instances):
                shown = watch.get(DEADLINE_S) or pytest.fail("the watch does not recover")
                assert shown.instances or shown.lapsed, "never an empty list"


def _is_put(store: Store, value: bytes) -> bool:
    with contextlib.suppress(DiscoveryError):
        return store.put("a", value).value == value
    return False


# Files that are removed or replaced in use


@pytest.mark.parametrize("fault", ["file", "folder", "-wal", "-shm", "truncated"])
def test_lost_parts_are_made_again(
    fault: str, path: Path, tmp_path: Path, member: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """All meet in the new file, this process and another, and a watch never shows an empty list."""
    path = tmp_path / "a" / "b" / "discovery.sqlite"
    url = f"sqlite:///{path}"
    other = Member(url, "register", "s", "b", "0.6")
    try:
        assert other.hear() == "ready"
        with (
            open_registry(url) as registry,
            registry.register(teacher("s"), 0.6) as registration,
            registry.watch("s") as watch,
            open_store(url) as store,
            store.lease(0.6) as lease,
        ):
            shown = seen(watch, "a", "b")
            if fault == "file":
                remove_database(path)
            elif fault == "folder":
                path.parent.parent.rename(tmp_path / "moved")  # in a single step: it is made again at any moment
            elif fault == "truncated":
                os.truncate(path, 0)
            else:
                path.with_name(path.name + fault).unlink()
            wait_until(lambda: found_ids(registry) == ["a", "b"])
            wait_until(lambda: lease.lost, "a lease to be lost, which is not made again")
            with registry.register(teacher("s", "late"), LONG_S):
                while "late" not in ids(shown.instances):
                    shown = watch.get(DEADLINE_S) or pytest.fail(f"a watch of the time before stopped at {shown}")
                    assert shown.instances or shown.lapsed, "its students would drop all"
            wait_until(lambda: not registration.error)
    finally:
        other.end()
    assert ("while in use; the file is created again" in caplog.text) == (fault not in ("file", "folder"))


def test_a_lost_write_is_told(path: Path) -> None:
    """A commit into a file that was removed during the transaction is no answer."""
    with SqliteStore(str(path)) as store:
        with pytest.raises(DiscoveryError, match="removed or replaced while in use"), store.file.write():
            remove_database(path)
        assert store.put("a", b"1").value == b"1", "the next goes to a new file"
