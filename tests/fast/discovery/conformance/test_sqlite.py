"""What only the SQLite file can suffer."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import open_registry, open_store
from edl.discovery.sqlite.file import SqliteFile
from edl.errors import DiscoveryError, SettingsError
from tests.fast.discovery.conformance.backends import (
    count_instances,
    eventually,
    remove_database,
    spoil_database,
    teacher,
)
from tests.fast.discovery.conformance.processes import ROOT, Member


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "discovery.sqlite"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, timeout=10)) as connection, connection:
        yield connection


def test_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b c#?%" / "d.sqlite"
    quoted = str(path).replace("%", "%25").replace("#", "%23").replace("?", "%3F").replace(" ", "%20")
    with open_store(f"sqlite:///{quoted}") as store:
        store.put("a", b"1")
        assert path.exists()
    assert sorted(path.parent.iterdir()) == [path], "a closed file leaves no journal behind"


def test_a_file_that_is_no_database_is_named(path: Path, url: str) -> None:
    path.write_bytes(random.Random(7).randbytes(10_000))
    content = path.read_bytes()
    for opened in (open_registry, open_store):
        with pytest.raises(SettingsError, match=rf"{path}.*not a database"):
            opened(url)
    assert path.read_bytes() == content


def test_foreign_database_is_left_alone(path: Path, url: str) -> None:
    with raw(path) as connection:
        connection.execute("CREATE TABLE precious (x)")
    with pytest.raises(SettingsError, match="another program's database"):
        open_registry(url)
    with raw(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("precious",)]


def test_a_newer_format_is_refused(path: Path, url: str) -> None:
    open_registry(url).close()
    with raw(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(SettingsError, match="format 99"):
        open_registry(url)


def test_impossible_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SettingsError, match=r"file/x\.sqlite: its folder cannot be made"):
        open_registry(f"sqlite:///{tmp_path}/file/x.sqlite")
    with pytest.raises(SettingsError, match=r"folder: unable to open"):
        open_registry(f"sqlite:///{tmp_path}/folder")


READ_ONLY = """
import os, sys
import edl.discovery.sqlite.registry  # before the change of user, who may not be able to read Python's library
from edl.discovery import open_registry
from edl.errors import SettingsError
if os.geteuid() == 0:  # root may write everything
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    open_registry(sys.argv[1])
except SettingsError as exc:
    print(exc)
"""


def test_unwritable_file_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        path = Path(folder) / "discovery.sqlite"
        open_registry(f"sqlite:///{path}").close()
        path.chmod(0o444)
        path.parent.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, f"sqlite:///{path}"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        path.parent.chmod(0o755)
    assert done.stdout.startswith(f"discovery file {path}: "), done


def test_a_boot_ends_leases_and_keeps_keys(path: Path, url: str) -> None:
    with open_registry(url) as registry, open_store(url) as store, store.lease(3600) as lease:
        registration = registry.register(teacher("digits"), 3600)
        store.put("leased", b"1", lease)
        kept = store.put("kept", b"2")
        with raw(path) as connection:
            connection.execute("UPDATE state SET boot = 'an earlier one'")
        with open_registry(url) as after, open_store(url) as store_after:
            assert after.snapshot("digits").instances == ()
            assert store_after.list("") == [kept]
            assert store_after.put("kept", b"3").version > kept.version
        registration.close()


def test_lease_of_an_earlier_boot_is_over(path: Path, url: str) -> None:
    with (
        open_registry(url) as registry,
        registry.register(teacher("digits", "often"), 4.0),
        registry.register(teacher("digits", "seldom"), 3600.0),
        registry.watch("digits") as watch,
    ):
        assert len(registry.snapshot("digits").instances) == 2
        with raw(path) as connection:
            connection.execute("UPDATE lease SET expires = expires + 1000000")
        # Who renews often finds out and comes back soon; the other one will with its next renewal.
        assert eventually(lambda: [entry.id for entry in registry.snapshot("digits").instances] == ["often"])
        while [entry.id for entry in (watch.get(10) or pytest.fail("not seen")).instances] != ["often"]:
            pass


@pytest.mark.parametrize("record", ["''", "'{'", "CAST(x'ff' AS TEXT)", "x'ff00'", "x''", "17", "'[]'"])
def test_rows_of_nonsense_are_left_out(path: Path, url: str, record: str) -> None:
    with (
        open_registry(url) as registry,
        registry.register(teacher("digits", "good")),
        registry.watch("digits") as watch,
    ):
        assert watch.get(5) is not None
        with raw(path) as connection:
            far = time.monotonic() + 1000
            connection.execute("INSERT INTO lease VALUES (1, 3600, ?)", (far,))
            connection.execute(f"INSERT INTO instance VALUES (1, 'digits', x'ff', 99, {record})")
            connection.execute("UPDATE state SET revision = revision + 1")
        snapshot = watch.get(5)
        assert snapshot is not None
        assert [instance.id for instance in snapshot.instances] == ["good"]
        assert len(snapshot.rejected) == 1
        assert snapshot == registry.snapshot("digits")


def test_wall_clock_jumps_do_not_matter(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = time.time
    with (
        open_registry(url) as registry,
        registry.register(teacher("digits"), 60.0),
        open_store(url) as store,
        store.lease(60.0) as lease,
    ):
        for jump in (1e9, -1e9):
            monkeypatch.setattr(time, "time", lambda jump=jump: true() + jump)
            time.sleep(0.2)
            assert not lease.lost
            assert registry.snapshot("digits").instances


def test_endless_writer_is_an_error(path: Path, url: str) -> None:
    """A writer that never ends is an error and not a hang."""
    with open_store(url, timeout_s=0.3) as store:
        store.put("a", b"1")
        with raw(path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            begun = time.monotonic()
            with pytest.raises(DiscoveryError, match="locked"):
                store.put("a", b"2")
            assert time.monotonic() - begun < 10
            entry = store.get("a")
            assert entry is not None
            assert entry.value == b"1", "reading goes on meanwhile"
            connection.rollback()
        store.put("a", b"2")


def test_watching_costs_next_to_nothing(url: str) -> None:
    with open_registry(url) as registry, registry.watch("digits") as watch:
        assert watch.get(5) is not None
        begun = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - begun < 0.5, "a watch polls ten times a second, it does not spin"


def test_deleted_file_is_made_again_for_all(path: Path, url: str) -> None:
    """A deleted file is made again and everybody meets there."""
    with (
        open_registry(url) as one,
        open_registry(url) as two,
        one.register(teacher("digits", "a"), 1.0),
        two.register(teacher("digits", "b"), 1.0),
        one.watch("digits") as watch,
        open_store(url) as store,
        store.lease(5.0) as lease,
    ):
        while len((watch.get(5) or pytest.fail("not seen")).instances) < 2:
            pass
        remove_database(path)
        assert eventually(lambda: count_instances(one, "digits") == 2)
        assert eventually(lambda: count_instances(two, "digits") == 2)
        assert eventually(lambda: lease.lost), "a lease is not made again"


def test_replaced_while_it_is_opened(path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to a file that another replaced at once is not taken for one to that other."""
    with open_store(url):
        pass
    connect = sqlite3.connect
    spoilt = []

    def connect_then_spoil(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        if not spoilt:
            spoil_database(path)
            spoilt.append(path.read_bytes())
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_then_spoil)
    for _ in range(2):
        with pytest.raises(SettingsError, match="not a database"):
            open_store(url).list("")
        assert [path.read_bytes()] == spoilt, "nobody's file is removed"


def test_new_file_has_memory_of_its_own(path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who removes a database leaves its journal and memory there, which others have open and read yet."""
    prepare = SqliteFile._prepare
    left = []

    def prepare_and_note(file: SqliteFile, connection: sqlite3.Connection) -> None:
        left.extend(path.with_name(path.name + side).exists() for side in ("-wal", "-shm"))
        prepare(file, connection)

    with open_store(url) as store:
        store.put("old", b"1")
        path.unlink()
        monkeypatch.setattr(SqliteFile, "_prepare", prepare_and_note)
        with open_store(url) as again:
            assert left == [False, False], "two databases share a journal and memory"
            assert again.list("") == []


def test_opening_waits_for_another(path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite looks for the memory by its name, when another database may have taken the place of the opened one."""
    monkeypatch.setattr("edl.discovery.sqlite.identity._LOCK_WAIT_S", 60.0)
    prepare = SqliteFile._prepare
    others: list[threading.Thread] = []
    made = []

    def prepare_late(file: SqliteFile, connection: sqlite3.Connection) -> None:
        if not others:
            path.unlink()
            others.append(threading.Thread(target=lambda: open_store(url).close()))
            others[0].start()
            others[0].join(0.5)
            made.append(path.exists())
        prepare(file, connection)

    monkeypatch.setattr(SqliteFile, "_prepare", prepare_late)
    with open_store(url) as store:
        others[0].join(60)
        assert made == [False], "another database lay there before the memory of the first was found"
        assert store.list("") == []


def test_leaving_a_deleted_file_is_harmless(path: Path, url: str) -> None:
    """Leaving a deleted file does not harm its successor."""
    with open_store(url) as store:
        store.put("old", b"1")
        remove_database(path)
        successor = Member(url, "hold", "new", "60")
        try:
            assert successor.hear() == "ready"
            assert [entry.key for entry in store.list("")] == ["new"]
            store.close()
            assert successor.ask("?") == "kept"
            with open_store(url) as again:
                assert [entry.key for entry in again.list("")] == ["new"]
        finally:
            successor.end()
    with raw(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_processes_make_the_file_at_once(url: str) -> None:
    members = [Member(url, "register", "digits", f"m{number}", "60") for number in range(4)]
    try:
        assert [member.hear() for member in members] == ["ready"] * 4
        with open_registry(url) as registry:
            assert len(registry.snapshot("digits").instances) == 4
    finally:
        for member in members:
            member.end()


def test_killed_writers_damage_nothing(path: Path, url: str) -> None:
    chance = random.Random(3)
    with open_store(url) as store:
        store.put("count", b"0")
        for _ in range(4):
            adders = [Member(url, "add", "count", "100000") for _ in range(2)]
            for adder in adders:
                assert adder.hear() == "ready"
                adder.say("go")
            before = int((store.get("count") or pytest.fail("gone")).value)
            assert eventually(lambda before=before: int((store.get("count") or pytest.fail("gone")).value) > before)
            time.sleep(chance.uniform(0, 0.02))
            for adder in adders:
                adder.end()
            entry = store.get("count")
            assert entry is not None
            assert store.compare_and_set("count", entry.value, entry.version), "the lock of the dead is free"
    with raw(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_threads_open_files_side_by_side(tmp_path: Path) -> None:
    before, errors = sys.getswitchinterval(), []
    held = [open_store(f"sqlite:///{tmp_path}/held{number}.sqlite") for number in range(200)]

    def open_some(thread: int) -> None:
        for number in range(100):
            try:
                open_store(f"sqlite:///{tmp_path}/{thread}-{number % 3}.sqlite").close()
            except Exception as exc:  # noqa: BLE001 - whatever it is, another thread caused it
                errors.append(exc)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=open_some, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
        for store in held:
            store.close()
    assert errors == []
