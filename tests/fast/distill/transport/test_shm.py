"""Slots of shared memory: never handed out twice, never more than allowed, nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.transport.shm import SHM_FOLDER, Arena, ShmSlot
from tests.descriptors import count_descriptors


def left_by(pid: int) -> list[str]:
    return [path.name for path in SHM_FOLDER.iterdir() if path.name.startswith(f"edl-arena-{pid}-")]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60))
def test_slots_in_use_never_overlap(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(4 << 20)
    held: list[tuple[ShmSlot, int]] = []
    try:
        for number, (take, nbytes) in enumerate(steps):
            if take or not held:
                slot = arena.take(nbytes)
                if slot is not None:
                    assert slot.memory.nbytes == nbytes
                    slot.memory[:] = number % 251
                    held.append((slot, number % 251))
            else:
                slot, mark = held.pop(nbytes % len(held))
                assert (slot.memory == mark).all()
                arena.give(slot)
        assert all((slot.memory == mark).all() for slot, mark in held)
    finally:
        held.clear()
        arena.close()
    assert left_by(os.getpid()) == []


def test_returned_memory_is_used_again() -> None:
    """The limit holds, and what is given back is used again."""
    arena = Arena(64 * 1024)
    slots = [slot for _ in range(40) if (slot := arena.take(4096)) is not None]
    assert len(slots) == 16
    assert arena.take(1) is None
    arena.give(slots.pop())
    again = arena.take(100)
    assert again is not None
    assert again.memory.nbytes == 100
    del slots, again
    arena.close()
    assert arena.take(1) is None


def test_what_a_killed_process_left_is_swept() -> None:
    code = (
        "import time; from edl.distill.transport.shm import Arena; a = Arena(1 << 20); s = a.take(5000)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == b"ready\n"
            Arena(1 << 20).close()
            assert len(left_by(process.pid)) == 1, "a living process's memory is left alone"
        finally:
            process.kill()
            process.wait(10)
    assert len(left_by(process.pid)) == 1
    Arena(1 << 20).close()
    assert left_by(process.pid) == []


def test_views_may_outlive_the_arena() -> None:
    arena = Arena(1 << 20)
    slot = arena.take(8)
    assert slot is not None
    memory = slot.memory
    memory[:] = 5
    arena.close()
    assert np.array_equal(memory, [5] * 8)


@contextmanager
def process_with_arena(code: str = "time.sleep(60)", prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds a slot of an arena, has said "ready" and its process id, and then runs `code`."""
    setup = "import os, time; from edl.distill.transport.shm import Arena; a = Arena(1 << 20); s = a.take(5000)\n"
    said = "print('ready', os.getpid(), flush=True)\n"
    command = [*prefix, sys.executable, "-c", setup + said + code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            line = process.stdout.readline()
            if prefix and not line:
                pytest.skip(f"{prefix[0]} is not permitted here: {process.stderr.read().decode().strip()}")
            assert line.startswith(b"ready"), process.stderr.read().decode()
            yield process
        finally:
            process.kill()
            process.wait(10)


AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
NEW_PID_NAMESPACE = ("unshare", *AS_ROOT, "--pid", "--fork", "--kill-child", "--mount-proc")


def test_an_arena_survives_other_namespaces() -> None:
    arena = Arena(1 << 20)
    try:
        slot = arena.take(5000)
        assert slot is not None
        with process_with_arena(prefix=NEW_PID_NAMESPACE):
            assert slot.region.path.exists(), "swept by a process to whom our process id means nothing"
    finally:
        arena.close()


def test_a_namespaces_arena_survives_us() -> None:
    before = set(left_by(1))  # its id is 1 there; other tests' readers come and go here
    with process_with_arena(prefix=NEW_PID_NAMESPACE):
        made = set(left_by(1)) - before
        Arena(1 << 20).close()
        kept = {name for name in made if (SHM_FOLDER / name).exists()}
    assert made
    assert kept == made, "the process in the other namespace has lost its memory"
    wait_until_swept(kept)


def test_a_forked_child_keeps_the_memory() -> None:
    code = "pid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(60)"
    with process_with_arena(code) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait(10)
            Arena(1 << 20).close()
            left = left_by(process.pid)
            assert len(left) == 1, "a child still maps the memory: to unlink it would free nothing"
        finally:
            os.kill(child, 9)
        wait_until_swept(set(left))


def wait_until_swept(names: set[str]) -> None:
    deadline = time.monotonic() + 20
    while any((SHM_FOLDER / name).exists() for name in names):
        assert time.monotonic() < deadline, f"{names} are left by processes that ended"
        Arena(1 << 20).close()
        time.sleep(0.01)


@pytest.mark.parametrize("code", ["ENOSPC", "EROFS", "EMFILE", "ENFILE", "EACCES", "ENOMEM", "EINTR"])
@pytest.mark.parametrize(("module", "name"), [(os, "open"), (fcntl, "flock"), (os, "posix_fallocate"), (mmap, "mmap")])
def test_no_memory_is_no_slot(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: str) -> None:
    """The request is then sent in the message; the next one may find memory again."""
    number = getattr(errno, code)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    descriptors = count_descriptors("/dev/shm/")
    arena = Arena(1 << 20)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        assert arena.take(5000) is None
    assert left_by(os.getpid()) == [], "a file without an owner"
    slot = arena.take(5000)
    assert slot is not None, "one failure must not turn shared memory off"
    del slot
    arena.close()
    assert count_descriptors("/dev/shm/") == descriptors


def test_a_folder_that_cannot_be_read() -> None:
    """Sweeping is a favour to others: that it fails is nothing to this reader."""
    code = (
        "import os, pathlib; from edl.distill.transport import shm as arena\n"
        "def fail(*_): raise OSError(24, os.strerror(24))\n"
        "pathlib.Path.iterdir = fail; arena.Arena(1 << 20).close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
