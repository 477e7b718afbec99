"""`edl serve` with Consul away; `edl register` with the real Triton."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.discovery import Instance, open_registry, open_store
from edl.distill import DistillReader, Options, ReaderStats, Teachers
from edl.load_reporting import ServiceLoad, TeacherRate, read_service
from edl.testing import LocalTeacher
from tests.fast.serving.conftest import Client, outputs_of
from tests.fast.test_cli_teachers import watching
from tests.plugins_consul import ConsulAgent
from tests.plugins_triton import TritonFactory
from tests.waiting import DEADLINE_S, wait_until

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def ask(endpoint: str) -> np.ndarray:
    with contextlib.closing(Client(endpoint)) as client:
        return outputs_of(client.start(X).result())["y"]


def test_outage_is_reported_and_not_felt(tmp_path: Path) -> None:
    """Of a registry that is away when a teacher starts, and later under a student and `edl teachers --watch`."""
    agent = ConsulAgent(tmp_path / "consul")

    def source() -> Iterator[Any]:
        for number in itertools.count():
            yield np.full(4, number, np.float32), number

    delivered: list[Any] = []
    with LocalTeacher("echo", service="s", discovery=agent.url, wait=False, serve={"ttl": "4s"}) as teacher:
        wait_until(lambda: "discovery does not answer" in teacher.log)
        served = wait_until(lambda: re.findall(r"served on (127.0.0.1:\d+)", teacher.log))
        np.testing.assert_array_equal(ask(served[0]), X)
        agent.start()
        reader = DistillReader(["x", None], ["y"], teacher_batch_size=4, options=Options(teacher_timeout_s=60))
        reader.set_dynamic_teacher(agent.url, "s").set_sample_generator(source)
        try:
            teacher.wait_ready(DEADLINE_S)
            assert teacher.endpoint == served[0]
            with watching("s", "--discovery", agent.url) as wait_for, reader:
                rows = reader()

                def step(condition: Callable[[ReaderStats], object]) -> Callable[[], bool]:
                    def pull() -> bool:
                        delivered.extend(itertools.islice(rows, 20))
                        return bool(condition(reader.stats()))

                    return pull

                wait_for(" ready ")
                wait_until(step(lambda stats: stats.teachers_live == 1))
                agent.kill()
                wait_until(step(lambda stats: stats.discovery))
                assert reader.stats().teachers_live == 1, "the teacher last known is kept"
                wait_for("last known state: ")
                agent.start()
                wait_until(step(lambda stats: not stats.discovery))
                wait_for(" ready ")
                with LocalTeacher("echo", service="s", discovery=agent.url):
                    wait_until(step(lambda stats: stats.teachers_live == 2))
        finally:
            agent.kill()
        teacher.terminate()
        assert teacher.wait(DEADLINE_S) == 0
        assert "Traceback" not in teacher.log
    assert [number for _, number, _ in delivered] == list(range(len(delivered)))
    assert all(label[0] == number for _, number, label in delivered)


Start = Callable[..., "subprocess.Popen[bytes]"]
QUICK = ("--interval", "100ms", "--timeout", "5s", "--ttl", "60s")
LOAD = {"EDL_LOAD_INTERVAL_S": "0.1", "EDL_LOAD_WINDOW_S": "2"}


@pytest.fixture
def register(url: str, stack: ExitStack, tmp_path: Path) -> Start:
    """Starts `edl register` in the background; its log is `register.log`."""

    def start(endpoint: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "edl", "register", endpoint, "--discovery", url, *QUICK, *arguments]
        command += ["--exit-with", str(os.getpid())]
        with (tmp_path / "register.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env={**os.environ, **LOAD})
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    return start


def seen(url: str, service: str, count: int) -> tuple[Instance, ...]:
    """The instances of `service` once there are so many."""
    with open_registry(url) as registry:
        wait_until(lambda: len(registry.snapshot(service).instances) == count, f"{count} instances of {service}")
        return registry.snapshot(service).instances


def load(url: str) -> ServiceLoad:
    with open_store(url) as store:
        return read_service(store, "s")


def until(url: str, holds: Callable[[TeacherRate], object]) -> TeacherRate:
    return wait_until(lambda: next((teacher for teacher in load(url).teachers if holds(teacher)), None))  # type: ignore[return-value]


def test_triton_enters_leaves_and_returns(triton: TritonFactory, register: Start, url: str, tmp_path: Path) -> None:
    """With its statistics, as far as it goes on."""
    server = triton.start("sums")
    process = register(server.endpoint, "--model", "sums", "--service", "s", "--priority", "lowest")
    (instance,) = seen(url, "s", 1)
    assert (instance.endpoint, instance.model) == (server.endpoint, "sums")
    assert instance.meta == {"version": "1", "priority": "lowest"}
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
    seen(url, "s", 0)
    until(url, lambda teacher: teacher.state == "unhealthy")
    assert process.poll() is None
    triton.start("sums", port=server.port)
    assert seen(url, "s", 1) == (instance,)
    found = until(url, lambda teacher: teacher.state == "ready" and teacher.rows_per_s is not None)
    assert found.rows_per_s == 0, "counters that began again are no negative rate, and no rate either"
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    seen(url, "s", 0)
    assert load(url).teachers == ()
    assert "Traceback" not in (tmp_path / "register.log").read_text()
