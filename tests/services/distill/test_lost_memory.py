"""A teacher that loses a student's shared memory: registered again, and every label right."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as tritonclient
from tritonclient.utils import InferenceServerException

from edl.distill import DistillReader, Options, Teachers
from edl.testing import LocalTeacher
from edl.testing.models import fingerprint_of
from tests.fast.distill.conftest import Start, until
from tests.plugins_triton import TritonFactory, TritonServer

WIDTH, ROWS = 4, 600
BATCH = 4


def row(number: int) -> np.ndarray:
    return (np.arange(WIDTH) * 7 + number).astype(np.float32)


def samples() -> Iterator[Any]:
    for number in range(ROWS):
        yield row(number), number


def reader_of(teacher: LocalTeacher | TritonServer, source: Callable[[], Iterator[Any]] = samples) -> DistillReader:
    ours = isinstance(teacher, LocalTeacher)
    reader = DistillReader(
        ["x", None],
        ["y" if ours else "logits"],
        teachers=[Teachers(endpoints=(teacher.endpoint,), model="" if ours else teacher.model)],
        teacher_batch_size=BATCH,
        options=Options(teacher_timeout_s=60),
    )
    return reader.set_sample_generator(source)


def is_right(x: np.ndarray, label: np.ndarray) -> bool:
    wanted = fingerprint_of(x[None])[0] if label[0] != x.sum() else np.full(10, x.sum())
    return bool((label == wanted).all())


def check(delivered: list[Any]) -> None:
    assert [number for _, number, _ in delivered] == list(range(ROWS)), "lost, repeated or out of order"
    assert all((x == row(number)).all() and is_right(x, label) for x, number, label in delivered)


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

        until(is_done, 20)


def lose_memory_in_an_epoch(teacher: LocalTeacher | TritonServer) -> None:
    lost = []

    def losing() -> Iterator[Any]:
        for number, found in enumerate(samples()):
            if number % 100 == 99:
                names = registered_names(reader)
                lost.append(set(names))
                unregister_all(teacher.endpoint, names)
            yield found

    with reader_of(teacher, losing) as reader:
        check(list(reader()))
        failures = sum(found.failures for found in reader.stats().teachers.values())
        shared = [client.shares_memory for client in clients(reader)]
    assert all(lost), "shared memory was to be in use"
    assert len(set.union(*lost)) > len(lost[0]), "it was to be registered again under another name"
    assert failures == 0, "the memory is the student's own affair, not a failure of the request or the teacher"
    assert all(shared), "shared memory can still be had"


def test_ours_loses_memory_in_mid_epoch(start: Start) -> None:
    lose_memory_in_an_epoch(start("fingerprint", delay_s=0.002))


@pytest.mark.triton
def test_triton_loses_memory_in_mid_epoch(triton: TritonFactory) -> None:
    server = triton.start()
    try:
        lose_memory_in_an_epoch(server)
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.triton
def test_a_triton_restarted_while_idle(triton: TritonFactory) -> None:
    """gRPC connects again by itself, to a server that knows nothing of the memory."""
    server = triton.start()
    with reader_of(server) as reader:
        check(list(reader()))
        server.stop()
        server = triton.start(port=server.port)
        check(list(reader()))
        assert all(client.shares_memory for client in clients(reader))
    server.stop()


@pytest.mark.triton
def test_triton_lets_go_when_readers_close(triton: TritonFactory) -> None:
    server = triton.start()
    try:
        for number in range(3):
            with reader_of(server) as reader:
                epoch = reader()
                for _ in itertools.islice(epoch, 30):  # number 1 is closed with requests under way
                    pass
                if number != 1:
                    list(epoch)
                assert registered_names(reader), "shared memory was to be in use"
            with tritonclient.InferenceServerClient(server.endpoint) as other:
                left = other.get_system_shared_memory_status(as_json=True)
                assert not left.get("regions"), f"Triton keeps it for ever: {left}"
    finally:
        server.stop()


def memory_of(pid: int) -> tuple[int, int]:
    """Students' shared memory that a process maps, in bytes, and that it has open."""
    mapped = sum(found.size for found in psutil.Process(pid).memory_maps(grouped=False) if "edl-arena-" in found.path)
    return mapped, sum("edl-arena-" in target(link) for link in Path(f"/proc/{pid}/fd").iterdir())


def target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # it was closed since it was listed
        return ""


@pytest.mark.parametrize("delay_s", [0.0, 0.002], ids=["on the loop", "in a thread"])
def test_readers_that_close_leave_nothing(start: Start, delay_s: float) -> None:
    teacher = start("fingerprint", delay_s=delay_s)
    for _ in range(5):
        with reader_of(teacher) as reader:
            check(list(reader()))
            assert min(memory_of(teacher.pid)) > 0, "shared memory was to be in use"
        until(lambda: memory_of(teacher.pid) == (0, 0), 20)


STUDENT = """
import sys
import tests.services.distill.test_lost_memory as module

reader = module.DistillReader(["x", None], ["y"], teachers=[sys.argv[1]], teacher_batch_size=4)
epoch = reader.set_sample_generator(module.samples)()
next(epoch)
print("reads", flush=True)
sys.stdin.read()
"""


def test_a_killed_students_memory_goes(start: Start) -> None:
    teacher = start("fingerprint")
    command = [sys.executable, "-c", STUDENT, teacher.endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as student:
        assert student.stdout is not None
        assert student.stdout.readline() == b"reads\n"
        assert min(memory_of(teacher.pid)) > 0, "shared memory was to be in use"
        student.kill()
    until(lambda: memory_of(teacher.pid) == (0, 0), 30)
    with reader_of(teacher) as reader:
        check(list(reader()))
    left = [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"edl-arena-{student.pid}-")]
    assert not left, "the next reader was to sweep it"


def test_a_teacher_that_hangs_keeps_nobody(start: Start) -> None:
    """To have it let go of the memory is tried, for a while that nobody minds."""
    teacher = start("fingerprint")
    with reader_of(teacher) as reader:
        check(list(reader()))
        teacher.pause()
        started = time.monotonic()
    took_s = time.monotonic() - started
    teacher.resume()
    assert took_s < 9, f"{took_s:.1f} s, which is what the reader waits for its whole engine"


IN_SMALL_MEMORY = """
import tests.services.distill.test_lost_memory as module
from edl.testing import LocalTeacher

with LocalTeacher("fingerprint", shape=[1000]) as teacher:
    reader = module.DistillReader(["x", None], ["y"], teachers=[teacher.endpoint], teacher_batch_size=4)
    rows = [module.np.full(1000, number, "f4") for number in range(200)]
    with reader:
        reader.set_sample_generator(lambda: ((row, number) for number, row in enumerate(rows)))
        for x, number, label in reader():
            assert x[0] == number
            assert (label == module.fingerprint_of(x[None])[0]).all()
        assert number == 199
print("all right")
"""


def test_a_dev_shm_that_is_full(tmp_path: Path) -> None:
    """Inputs that find no room in shared memory go in the message."""
    program = tmp_path / "program.py"
    program.write_text(IN_SMALL_MEMORY)
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = 'mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 99; exec "$@"'
    command = ["unshare", *as_root, "--mount", "sh", "-c", inside, "sh", sys.executable, str(program)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": "."})
    if run.returncode == 99 or "unshare failed" in run.stderr:
        pytest.skip(f"mounts are not permitted here: {run.stderr.strip()}")
    assert run.stdout == "all right\n", run.stderr
