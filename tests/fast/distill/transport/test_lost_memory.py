"""A teacher that loses a student's shared memory, or a student that goes: every label right, and nothing left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as tritonclient
from tritonclient.utils import InferenceServerException

from edl.distill import DistillReader, Teachers
from edl.testing.models import fingerprint_of
from tests.fast.distill.conftest import Serve, Start
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
    assert reader._session is not None
    # In one step each, since the reader's own thread changes them.
    links = [link for engine in reader._session.labeller._engines for link in list(engine._pool.connections.values())]
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
        assert student.stdout is not None
        assert student.stdout.readline() == b"reads\n"
        assert min(memory_of(teacher.pid)) > 0, "shared memory was to be in use"
        student.kill()
    wait_until(lambda: memory_of(teacher.pid) == (0, 0))
    with reader_of(teacher.endpoint) as reader:
        check(list(reader()))
        teacher.pause()
    teacher.resume()  # the reader has not waited for it
    left = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"edl-arena-{student.pid}-")]
    assert not left, "the next reader was to sweep it"
