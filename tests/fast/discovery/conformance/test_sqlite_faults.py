"""The kernel refuses what SQLite asks for, for a while: real limits, a real full disk, a real lock.

What a limit does: RLIMIT_FSIZE 0 fails each write to the file (EFBIG, an I/O error to SQLite), RLIMIT_NOFILE each
opening (EMFILE).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edl.discovery import open_registry
from tests.fast.discovery.conformance.backends import count_instances, eventually, spoil_database, teacher
from tests.fast.discovery.conformance.processes import ROOT

PROGRAM = """
import os, resource, sqlite3, subprocess, sys, time
from pathlib import Path
from edl.discovery import open_registry, open_store
from edl.errors import EDLError
from tests.fast.discovery.conformance.backends import eventually, teacher

fault, folder = sys.argv[1], Path(sys.argv[2])
if fault == "disk":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
url = f"sqlite:///{folder}/discovery.sqlite"

def begin():
    if fault == "disk":
        with open(folder / "fill", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return lambda: os.unlink(folder / "fill")
    if fault == "lock":
        other = sqlite3.connect(folder / "discovery.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        return other.close
    limit = {"write": resource.RLIMIT_FSIZE, "open": resource.RLIMIT_NOFILE}[fault]
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (0, hard))
    return lambda: resource.setrlimit(limit, (soft, hard))

def refused(call):
    try:
        call()
    except EDLError as exc:
        return str(exc)
    return ""

with (
    open_registry(url, timeout_s=2.0) as registry,  # its threads wait for each other's transactions as well
    open_registry(url, timeout_s=2.0) as onlooker,
    open_store(url, timeout_s=2.0) as store,
    registry.register(teacher("s"), 0.6) as registration,
    onlooker.watch("s") as watch,
):
    while not watch.get(10).instances:  # a process that stood still has lapsed, and registers again
        pass
    store.put("k", b"1")
    end = begin()
    if fault == "open":  # what is open goes on
        assert refused(lambda: open_registry(url))
        time.sleep(1.0)  # longer than the lease
        assert eventually(lambda: not registration.error)
        assert eventually(lambda: onlooker.snapshot("s").instances)
    else:
        assert refused(lambda: store.put("k", b"2"))
        assert eventually(lambda: onlooker.snapshot("s").lapsed), "it lapses, and is not forgotten"
        assert eventually(lambda: registration.error)
        assert store.get("k").value == b"1", "reading goes on"
        history = [watch.get(10)]
        assert history[-1].lapsed or history[-1].instances
    end()
    assert eventually(lambda: not refused(lambda: store.put("k", b"3")))
    assert eventually(lambda: onlooker.snapshot("s").instances), "it registers again by itself"
    assert eventually(lambda: not registration.error)
    while (found := watch.get(1.0)) is not None:
        assert found.instances or found.lapsed, "never an empty list"
    store.put("k", b"4")
    assert store.get("k").value == b"4"
print("borne")
"""


def namespace() -> list[str]:
    """What runs a program with mounts of its own, as root or not; empty where that is not allowed."""
    for command in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return command
    return []


@pytest.mark.parametrize("fault", ["write", "open", "lock", "disk"])
def test_a_fault_is_borne_and_then_forgotten(fault: str, tmp_path: Path) -> None:
    command: list[str] = []
    if fault == "disk" and not (command := namespace()):
        fault = "write"  # no mounts here: the next best, which fails the same calls
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM, fault, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines()[-1:] == ["borne"], done.stdout + done.stderr


def test_vanished_folder_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    url = f"sqlite:///{folder}/discovery.sqlite"
    with open_registry(url) as registry, registry.register(teacher("s"), 0.6), registry.watch("s") as watch:
        seen = watch.get(10) or pytest.fail("nothing came")
        assert seen.instances or seen.lapsed
        folder.parent.rename(tmp_path / "moved")  # in a single step: its users make the folder again at any moment
        assert eventually(lambda: (folder / "discovery.sqlite").exists())
        assert eventually(lambda: registry.snapshot("s").instances)
        while (seen := watch.get(1.0)) is not None:
            assert seen.instances or seen.lapsed, f"its students would drop it: {seen}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Hours to add to what this process takes for the wall clock."""
    hours, true = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: true() + 3600 * hours[0])
    return hours


def test_clocks_that_jump_move_nothing(tmp_path: Path, clock: list[float]) -> None:
    with (
        open_registry(f"sqlite:///{tmp_path}/d.sqlite") as registry,
        registry.register(teacher("s"), 4.0) as registration,
        registry.watch("s") as watch,
    ):
        first = watch.get(10)
        for clock[0] in (24.0, -24.0, 1e6, 0.0):
            assert watch.get(1.1) is None, "together longer than its lease, and nothing happened"
            assert not registration.error
        assert first is not None
        assert registry.snapshot("s") == first


def test_a_spoilt_file_keeps_the_last_known(tmp_path: Path) -> None:
    path = tmp_path / "d.sqlite"
    with (
        open_registry(f"sqlite:///{path}") as registry,
        registry.register(teacher("s"), 4.0),
        registry.watch("s") as watch,
    ):
        healthy = watch.get(10) or pytest.fail("nothing came")
        spoil_database(path)
        spoilt = watch.get(10) or pytest.fail("it is not noticed")
        assert spoilt.stale
        assert spoilt.instances == healthy.instances
        os.truncate(path, 0)  # an empty file is a new database
        while (seen := watch.get(20) or pytest.fail("it does not recover")).stale:
            assert seen.instances == healthy.instances
        assert seen == healthy


LIST = """
import sys
from edl.discovery import open_registry
with open_registry(sys.argv[1]) as registry:
    print(*(found.id for found in registry.snapshot("s").instances))
"""


@pytest.mark.parametrize("fault", ["wal", "shm", "both", "truncated"])
def test_parts_of_the_file_are_lost(fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "discovery.sqlite"
    url = f"sqlite:///{file}"
    with (
        open_registry(url) as registry,
        registry.register(teacher("s"), 4.0) as registration,
        open_registry(url) as onlooker,
        onlooker.watch("s") as watch,
    ):
        seen = watch.get(10) or pytest.fail("nothing came")
        assert seen.instances
        if fault == "truncated":
            os.truncate(file, 0)
        for side in ("wal", "shm"):
            if fault in (side, "both"):
                Path(f"{file}-{side}").unlink()

        def listed() -> bool:
            found = subprocess.run([sys.executable, "-c", LIST, url], cwd=ROOT, capture_output=True, text=True)
            return bool(found.stdout.strip())

        assert eventually(listed), "another process sees the teacher again"
        assert eventually(lambda: count_instances(onlooker, "s"))
        with registry.register(teacher("s", "late"), 4.0):
            while "late" not in {found.id for found in seen.instances}:
                seen = watch.get(10) or pytest.fail(f"a watch of the time before stopped at {seen}")
        assert eventually(lambda: not registration.error)
    assert "while in use; it is made anew" in caplog.text
