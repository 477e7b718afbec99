"""Shared memory: no slot twice, nothing left by those that go, and every label right where a teacher loses it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as tritonclient
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from edl.distill import DistillReader, Teachers
from edl.distill.transport.request import Payload
from edl.distill.transport.shm import SHM_FOLDER, Arena, ShmSlot
from edl.testing.models import fingerprint_of
from tests.descriptors import count_descriptors
from tests.fast.distill.conftest import Serve, Start
from tests.fast.test_linux import NEW_PID_NAMESPACE
from tests.waiting import wait_until

ROWS = 400


def row(number: int) -> np.ndarray:
    return (np.arange(4) * 7 + number).astype(np.float32)


def samples() -> Iterator[Any]:
    return ((row(number), number) for number in range(ROWS))


def reader_of(
    endpoint: str, source: Callable[[], Iterator[Any]] = samples, *, output: str = "y", model: str = ""
) -> DistillReader:
    teachers = [Teachers(endpoints=(endpoint,), model=model)]
    return DistillReader(["x", None], [output], teachers=teachers, teacher_batch_size=4).set_sample_generator(source)


def check(delivered: list[Any]) -> None:
    """Each in order, with its own label: a fingerprint, or the sum of the row."""
    assert [number for _, number, _ in delivered] == list(range(ROWS)), "lost, repeated or out of order"
    for x, number, label in delivered:
        assert (x == row(number)).all()
        assert label.tolist() in (fingerprint_of(x[None])[0].tolist(), [x.sum()] * 10)


def clients(reader: DistillReader) -> list[Any]:
    # In one step each, since the reader's own thread changes them.
    links = [link for engine in reader._session.labeller.engines for link in list(engine.pool.connections.values())]
    return [client for client in [link._client for link in links] if client is not None]


def registered_names(reader: DistillReader) -> list[str]:
    return [name for client in clients(reader) for name in list(client._regions._known.values())]


def unregister_all(endpoint: str, names: list[str]) -> None:
    """What a second client may do. Triton refuses while it computes a request in the region."""
    with tritonclient.InferenceServerClient(endpoint) as other:

        def is_done() -> bool:
            try:
                other.unregister_system_shared_memory()
                for name in names:
                    other.unregister_system_shared_memory(name)
            except InferenceServerException as exc:
                if "unregister" not in str(exc):
                    raise
                return False
            return True

        wait_until(is_done)


def lose_memory_in_an_epoch(endpoint: str, **names: str) -> None:
    lost: list[set[str]] = []

    def losing() -> Iterator[Any]:
        for number, found in enumerate(samples()):
            if number % 100 == 99:
                registered = registered_names(reader)
                lost.append(set(registered))
                unregister_all(endpoint, registered)
            yield found

    with reader_of(endpoint, losing, **names) as reader:
        check(list(reader()))
        failures = sum(found.failures for found in reader.stats().teachers.values())
        shared = [client.shares_memory for client in clients(reader)]
    assert all(lost), "shared memory was to be in use"
    assert len(set.union(*lost)) > len(lost[0]), "it was to be registered again under another name"
    assert failures == 0, "the memory is the student's own affair, not a failure of the request or the teacher"
    assert all(shared), "shared memory can still be had"


def test_memory_lost_in_mid_epoch(serve: Serve) -> None:
    lose_memory_in_an_epoch(serve("fingerprint", delay_s=0.001).endpoint)


def memory_of(pid: int) -> tuple[int, int]:
    """Students' shared memory that a process maps, in bytes, and that it has open."""

    def target(link: Path) -> str:
        try:
            return str(link.readlink())
        except FileNotFoundError:  # it was closed since it was listed
            return ""

    mapped = sum(found.size for found in psutil.Process(pid).memory_maps(grouped=False) if "edl-arena-" in found.path)
    return mapped, sum("edl-arena-" in target(link) for link in Path(f"/proc/{pid}/fd").iterdir())


STUDENT = """
import sys
import tempfile
import tests.fast.distill.transport.test_lost_memory as module

epoch = module.reader_of(sys.argv[1])()
next(epoch)
print("reads", flush=True)
sys.stdin.read()
"""


def test_students_that_go_leave_nothing(start: Start) -> None:
    """Those that close, one that is killed, and one whose teacher hangs, which keeps nobody."""
    teacher = start("fingerprint")
    for _ in range(2):
        with reader_of(teacher.endpoint) as reader:
            check(list(reader()))
            assert min(memory_of(teacher.pid)) > 0, "shared memory was to be in use"
        wait_until(lambda: memory_of(teacher.pid) == (0, 0))
    command = [sys.executable, "-c", STUDENT, teacher.endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as student:
        assert student.stdout.readline() == b"reads\n"
        assert min(memory_of(teacher.pid)) > 0, "shared memory was to be in use"
        student.kill()
    wait_until(lambda: memory_of(teacher.pid) == (0, 0))
    with reader_of(teacher.endpoint) as reader:
        check(list(reader()))
        teacher.pause()
    teacher.resume()  # the reader has not waited for it
    assert not left_by(student.pid), "the next reader was to sweep it"


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for this test's arenas: other tests' readers may still be closing theirs in /dev/shm."""
    with tempfile.TemporaryDirectory(dir=SHM_FOLDER) as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr("edl.distill.transport.shm.SHM_FOLDER", Path(folder))
        yield Path(folder)


def left_by(pid: int) -> list[str]:
    return [path.name for path in SHM_FOLDER.iterdir() if path.name.startswith(f"edl-arena-{pid}-")]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60))
def test_slots_in_use_never_overlap(steps: list[tuple[bool, int]]) -> None:
    held: list[tuple[ShmSlot, int]] = []
    with own_folder() as folder, closing(Arena(4 << 20)) as arena:
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
        held.clear()
        arena.close()
        assert not list(folder.iterdir())


def test_returned_memory_is_used_again() -> None:
    arena = Arena(64 * 1024)
    slots = [slot for _ in range(40) if (slot := arena.take(4096)) is not None]
    assert len(slots) == 16
    assert arena.take(1) is None
    arena.give(slots.pop())
    again = arena.take(100)
    assert again.memory.nbytes == 100
    del slots, again
    arena.close()
    assert arena.take(1) is None


@contextmanager
def process_elsewhere(folder: Path) -> Iterator[None]:
    """A process with process ids of its own that holds a slot of an arena in `folder`."""
    code = (
        "import sys; from pathlib import Path; from edl.distill.transport import shm\n"
        "shm.SHM_FOLDER = Path(sys.argv[1]); arena = shm.Arena(1 << 20); slot = arena.take(5000)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [*NEW_PID_NAMESPACE, sys.executable, "-c", code, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        try:
            line = process.stdout.readline()
            if not line:
                pytest.skip(f"a process namespace is not permitted here: {process.stderr.read().decode().strip()}")
            assert line == b"ready\n"
            yield
        finally:
            process.kill()
            process.wait(10)


def test_arenas_survive_other_namespaces() -> None:
    """A process to whom the other's process id means nothing sweeps nothing of it."""
    with own_folder() as folder:
        with process_elsewhere(folder):
            made = list(folder.iterdir())
            assert [path.name.split("-")[2] for path in made] == ["1"], "its process id there"
            Arena(1 << 20).close()
            assert list(folder.iterdir()) == made

        def is_swept() -> bool:
            Arena(1 << 20).close()
            return not list(folder.iterdir())

        wait_until(is_swept, f"the end of {made}, left by a process that ended")


@pytest.mark.parametrize(("module", "name"), [(os, "open"), (fcntl, "flock"), (os, "posix_fallocate"), (mmap, "mmap")])
def test_no_memory_is_no_slot(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """The request is then sent in the message; the next one may find memory again."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with own_folder() as folder, closing(Arena(1 << 20)) as arena:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, fail)
            payload = Payload.of({"x": np.ones((1, 5000))}, arena)
            assert payload.slot is None
            assert [bytes(raw) for raw in payload.raw] == [np.ones(5000).tobytes()]
        assert not list(folder.iterdir()), "a file without an owner"
        slot = arena.take(5000)
        assert slot is not None, "one failure must not turn shared memory off"
        del slot
        arena.close()
        assert count_descriptors(str(folder)) == 0
