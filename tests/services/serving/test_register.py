"""`edl register` with the real Triton: in discovery while it is ready, with its statistics; and over TLS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.discovery import Instance, open_registry, open_store
from edl.distill import Credentials, DistillReader, Options, Teachers
from edl.errors import SettingsError
from edl.load_reporting import ServiceLoad, TeacherRate, read_service
from edl.protocol import names
from edl.testing import LocalTeacher
from tests.certificates import Authority, put
from tests.fast.serving.conftest import StartInside
from tests.fast.serving.models import Base, logits
from tests.plugins_triton import TritonFactory
from tests.waiting import DEADLINE_S, wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]
QUICK = ("--interval", "100ms", "--timeout", "5s", "--ttl", "60s")
LOAD = {"EDL_LOAD_INTERVAL_S": "0.1", "EDL_LOAD_WINDOW_S": "2"}
TOKEN = "token-of-a-test-0123456789"


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


def test_server_without_statistics_says_so(register: Start, url: str) -> None:
    with LocalTeacher("echo") as teacher:
        register(teacher.endpoint, "--model", "m", "--service", "s")
        found = until(url, lambda teacher: teacher.note)
        assert (found.rows_per_s, found.rate, found.compute_share) == (None, None, None)
        assert "no statistics" in found.note


def ask(teachers: Teachers, credentials: Credentials) -> list[Any]:
    """Outputs for ones."""
    options = Options(teacher_timeout_s=DEADLINE_S, credentials=credentials)
    with DistillReader(["x"], ["logits"], teachers=teachers, options=options) as reader:
        reader.set_batch_generator(lambda: ((np.ones((4, 4), np.float32),) for _ in range(3)))
        return [answer for _, answer in reader()]


def test_register_speaks_tls_with_a_token(inside: StartInside, register: Start, tmp_path: Path, url: str) -> None:
    """As a reader does, to a server whose operator chose the certificates and the token."""
    ca = Authority()
    saved, token = ca.save(tmp_path), put(tmp_path / "token", TOKEN)
    server = inside(Base(), credentials=Credentials(token_file=token, **ca.issue().save(tmp_path)))  # type: ignore[arg-type]
    register(server.target, "--model", "m", "--tls-ca", saved, "--token-file", token)
    (instance,) = seen(url, "m", 1)
    assert instance.meta[names.TLS_META] == "1"
    answers = ask(Teachers("m", discovery=url), Credentials(ca=saved, token_file=token))
    assert all((answer == logits(np.ones((4, 4), np.float32))).all() for answer in answers)
    with pytest.raises(SettingsError, match=r"refuses this student \(UNAUTHENTICATED\)"):
        ask(Teachers("m", discovery=url), Credentials(ca=saved))
