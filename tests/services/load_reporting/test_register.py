"""What `edl register` publishes of a server: Triton's own statistics, or that there are none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.discovery import open_store
from edl.distill import DistillReader, Teachers
from edl.load_reporting import ServiceLoad, TeacherRate, read_service
from edl.testing import LocalTeacher
from tests.plugins_triton import TritonFactory
from tests.waiting import DEADLINE_S, wait_until

QUICK = {"EDL_LOAD_INTERVAL_S": "0.1", "EDL_LOAD_WINDOW_S": "2"}
Register = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def register(url: str, tmp_path: Path) -> Iterator[Register]:
    """Starts `edl register` in the background."""
    started: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str, model: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "edl", "register", endpoint, "--discovery", url, "--interval", "100ms"]
        command += ["--model", model, "--service", "s", "--exit-with", str(os.getpid())]
        with (tmp_path / "register.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env={**os.environ, **QUICK})
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def load(url: str) -> ServiceLoad:
    with open_store(url) as store:
        return read_service(store, "s")


def until(url: str, holds: Callable[[TeacherRate], object]) -> TeacherRate:
    return wait_until(lambda: next((teacher for teacher in load(url).teachers if holds(teacher)), None))  # type: ignore[return-value]


def test_tritons_statistics_are_published(triton: TritonFactory, register: Register, url: str, tmp_path: Path) -> None:
    server = triton.start("sums")
    process = register(server.endpoint, "sums")
    until(url, lambda teacher: teacher.state == "ready" and teacher.rows_per_s == 0)
    teachers = Teachers(endpoints=(server.endpoint,), model="sums")
    with DistillReader(["x"], ["logits"], teachers=teachers, teacher_batch_size=10) as reader:
        reader.set_sample_generator(lambda: ((np.ones(4, np.float32),) for _ in range(500)))
        assert len(list(reader())) == 500
    found = until(url, lambda teacher: teacher.rate and teacher.rows == 500)  # rows, not requests or batches
    assert (found.model, found.note, found.queue_rows, found.workers) == ("sums", "", None, 1)
    assert found.compute_s is not None
    assert 0 < found.compute_s < DEADLINE_S, "in seconds"

    server.stop()
    until(url, lambda teacher: teacher.state == "unhealthy")
    triton.start("sums", port=server.port)
    found = until(url, lambda teacher: teacher.state == "ready" and teacher.rows_per_s is not None)
    assert found.rows_per_s == 0, "counters that began again are no negative rate, and no rate either"
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert load(url).teachers == ()
    assert "Traceback" not in (tmp_path / "register.log").read_text()


def test_server_without_statistics_says_so(register: Register, url: str) -> None:
    with LocalTeacher("echo") as teacher:
        register(teacher.endpoint, "m")
        found = until(url, lambda teacher: teacher.note)
        assert (found.rows_per_s, found.rate, found.compute_share) == (None, None, None)
        assert "no statistics" in found.note
