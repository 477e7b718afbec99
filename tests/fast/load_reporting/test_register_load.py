"""What `edl register` publishes of a server: Triton's own statistics, or that there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.discovery import open_store
from edl.distill import DistillReader, Teachers
from edl.load_reporting import ServiceLoad, TeacherRate, read_service
from edl.testing import LocalTeacher
from tests.plugins_triton import TritonFactory

QUICK = {"EDL_LOAD_INTERVAL_S": "0.1", "EDL_LOAD_WINDOW_S": "2"}
Register = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def register(url: str, tmp_path: Path) -> Iterator[Register]:
    """Starts `edl register` in the background."""
    started: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "edl", "register", endpoint, "--discovery", url, "--interval", "100ms"]
        with (tmp_path / "register.log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    [*command, *arguments, "--exit-with", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                    env={**os.environ, **QUICK},
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def load(url: str) -> ServiceLoad:
    with open_store(url) as store:
        return read_service(store, "s")


def until(url: str, wanted: Callable[[TeacherRate], object], within_s: float = 90.0) -> TeacherRate:
    deadline = time.monotonic() + within_s
    while not (found := load(url).teachers) or not wanted(found[0]):
        assert time.monotonic() < deadline, f"not within {within_s} s: {found}"
        time.sleep(0.05)
    return found[0]


def ask(endpoint: str, rows: int) -> None:
    teachers = Teachers(endpoints=(endpoint,), model="sums")
    with DistillReader(["x"], ["logits"], teachers=teachers, teacher_batch_size=10) as reader:
        reader.set_sample_generator(lambda: ((np.ones(4, np.float32),) for _ in range(rows)))
        assert len(list(reader())) == rows


@pytest.mark.triton
def test_tritons_statistics_are_published(triton: TritonFactory, register: Register, url: str, tmp_path: Path) -> None:
    server = triton.start("sums")
    process = register(server.endpoint, "--model", "sums", "--service", "s")
    until(url, lambda teacher: teacher.state == "ready" and teacher.rows_per_s == 0)
    begun = time.monotonic()
    ask(server.endpoint, 500)
    asked_s = time.monotonic() - begun
    found = until(url, lambda teacher: teacher.rate and teacher.rows == 500)  # rows, not requests or batches
    assert (found.model, found.note, found.queue_rows, found.workers) == ("sums", "", None, 1)
    assert found.compute_s is not None
    assert 0 < found.compute_s < asked_s, "a worker computes while it is asked, and a batch at a time"

    server.stop()
    until(url, lambda teacher: teacher.state == "unhealthy")
    triton.start("sums", port=server.port)
    found = until(url, lambda teacher: teacher.state == "ready" and teacher.rows_per_s is not None)
    assert found.rows_per_s == 0, "counters that began again are no negative rate, and no rate either"
    process.terminate()
    assert process.wait(20) == 0
    assert load(url).teachers == ()
    assert "Traceback" not in (tmp_path / "register.log").read_text()


def test_server_without_statistics_says_so(register: Register, url: str) -> None:
    with LocalTeacher("echo") as teacher:
        register(teacher.endpoint, "--model", "m", "--service", "s")
        found = until(url, lambda teacher: teacher.note)
        assert (found.rows_per_s, found.rate, found.compute_share) == (None, None, None)
        assert "no statistics" in found.note
