"""Slots of shared memory: never handed out twice, never more than allowed, nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.transport.request import Payload
from edl.distill.transport.shm import SHM_FOLDER, Arena, ShmSlot
from tests.descriptors import count_descriptors
from tests.waiting import wait_until


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


@contextmanager
def process_with_arena(code: str = "", prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds a slot of an arena, has said "ready" and its process id, and then runs `code`."""
    setup = "import os, sys; from edl.distill.transport.shm import Arena; a = Arena(1 << 20); s = a.take(5000)\n"
    said = "print('ready', os.getpid(), flush=True)\n"
    command = [*prefix, sys.executable, "-c", setup + said + code + "sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            if prefix and not line:
                pytest.skip(f"{prefix[0]} is not permitted here: {process.stderr.read().decode().strip()}")
            assert line.startswith(b"ready"), process.stderr.read().decode()
            yield process
        finally:
            process.kill()
            process.wait(10)


def test_what_a_killed_process_left_is_swept() -> None:
    with process_with_arena() as process:
        Arena(1 << 20).close()
        assert len(left_by(process.pid)) == 1, "a living process's memory is left alone"
    assert len(left_by(process.pid)) == 1
    Arena(1 << 20).close()
    assert left_by(process.pid) == []


AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
NEW_PID_NAMESPACE = ("unshare", *AS_ROOT, "--pid", "--fork", "--kill-child", "--mount-proc")


def test_arenas_survive_other_namespaces() -> None:
    """A process to whom the other's process id means nothing sweeps nothing of it."""
    arena = Arena(1 << 20)
    slot = arena.take(5000)
    assert slot is not None
    before = set(left_by(1))  # its id is 1 there; other tests' readers come and go here
    with process_with_arena(prefix=NEW_PID_NAMESPACE):
        made = set(left_by(1)) - before
        Arena(1 << 20).close()
        kept = {name for name in made if (SHM_FOLDER / name).exists()}
    del slot
    arena.close()
    assert made
    assert kept == made

    def is_swept() -> bool:
        Arena(1 << 20).close()
        return not any((SHM_FOLDER / name).exists() for name in kept)

    wait_until(is_swept, f"the end of {kept}, left by processes that ended")


@pytest.mark.parametrize(("module", "name"), [(os, "open"), (fcntl, "flock"), (os, "posix_fallocate"), (mmap, "mmap")])
def test_no_memory_is_no_slot(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """The request is then sent in the message; the next one may find memory again."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    descriptors = count_descriptors("/dev/shm/")
    arena = Arena(1 << 20)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        payload = Payload.of({"x": np.ones((1, 5000))}, arena)
        assert payload.slot is None
        assert [bytes(raw) for raw in payload.raw] == [np.ones(5000).tobytes()]
    assert left_by(os.getpid()) == [], "a file without an owner"
    slot = arena.take(5000)
    assert slot is not None, "one failure must not turn shared memory off"
    del slot
    arena.close()
    assert count_descriptors("/dev/shm/") == descriptors
