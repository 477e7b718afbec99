"""Certificates and tokens that are replaced while teachers and students use them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.discovery.registry import Instance
from edl.distill import Credentials, DistillReader
from edl.distill.engine.connection import TeacherConnection
from edl.distill.engine.event_loop import EventLoopThread
from edl.distill.transport.schema import OutputSpec
from edl.protocol.tls.credentials import CredentialFiles
from edl.testing import LocalTeacher
from tests.certificates import Authority, put
from tests.fast.distill.answers.hostile import HostileServer
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.tls.trust import believing, read, reader, serving, why_not

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


class Reading:
    """A student that reads for as long as the test wants, in a thread, and checks each answer."""

    def __init__(self, made: DistillReader) -> None:
        self._made, self._ended = made, threading.Event()
        self.rows, self.error = 0, None
        made.set_batch_generator(self._batches)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _batches(self) -> Any:
        for number in itertools.count():
            if self._ended.wait(0.01):
                return
            yield np.full((4, 4), number, np.float32), np.full(4, number)

    def _read(self) -> None:
        try:
            with self._made as made:
                for x, number, y in made():
                    assert (x[:, 0] == number).all()
                    assert (y[:, 0] == number).all(), "a label of another input"
                    self.rows += len(x)
        except BaseException as exc:  # noqa: BLE001 - told by the test
            self.error = exc

    def more(self, rows: int = 40) -> None:
        """Wait until so many more rows were answered."""
        wanted = self.rows + rows
        until(lambda: self.rows >= wanted or not self._thread.is_alive(), 60)
        assert self._thread.is_alive(), f"the student ended: {self.error!r}"

    def end(self) -> BaseException | None:
        self._ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the student hangs"
        return self.error


@pytest.fixture
def reading() -> Any:
    begun: list[Reading] = []

    def begin(made: DistillReader) -> Reading:
        begun.append(Reading(made))
        return begun[-1]

    yield begin
    for one in begun:
        one.end()


def days_left(teacher: LocalTeacher) -> float:
    """What an alert looks at."""
    with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    (expiry,) = (line.split()[-1] for line in lines if line.startswith("edl_teacher_certificate_expiry_seconds"))
    return (float(expiry) - time.time()) / 86400


def test_new_certificate_without_restart(start: Start, tmp_path: Path, reading: Any) -> None:
    ca = Authority()
    told = {**serving(tmp_path, ca.issue("before.example", days=(-1, 3))), "metrics-port": 0}
    teacher = start("echo", serve=told)
    assert "a certificate for before.example, valid until" in teacher.log
    assert 2.9 < days_left(teacher) < 3.1
    before = reading(reader(teacher, credentials=believing(tmp_path, ca, server_name="before.example")))
    before.more()
    ca.issue("after.example").save(tmp_path, "teacher")
    read(teacher, believing(tmp_path, ca, server_name="after.example"))
    before.more()
    assert 6.9 < days_left(teacher) < 7.1
    other = "another name ('after.example')"
    assert other in why_not(teacher, believing(tmp_path, ca, server_name="before.example"), other)
    assert before.end() is None, "a connection that exists goes on"


def test_client_ca_replaced_shuts_out(start: Start, tmp_path: Path, reading: Any) -> None:
    """Also who has a stream open: it ends, and the next handshake fails."""
    ca, first, second = Authority(), Authority("first"), Authority("second")
    teacher = start("echo", serve=serving(tmp_path, ca.issue(), first))
    old = reader(teacher, credentials=believing(tmp_path, ca, first.issue("student")), timeout_s=4.0)
    shut_out = reading(old)
    shut_out.more()
    second.save(tmp_path, "teacher-ca")
    until(lambda: shut_out.error is not None, 60)
    assert "signed by no CA that the server knows" in str(shut_out.error)
    read(teacher, believing(tmp_path, ca, second.issue("student")))


@pytest.mark.slow
def test_student_takes_up_new_files(start: Start, tmp_path: Path, reading: Any) -> None:
    """Both sides move to another CA, in the order in which it is done: nobody is shut out, nothing restarts."""
    old, new = Authority("old"), Authority("new")
    both = Authority("unused")
    both.pem = old.pem + new.pem
    teacher = start("echo", serve=serving(tmp_path, old.issue(), old))
    student = reading(reader(teacher, credentials=believing(tmp_path, old, old.issue("student")), timeout_s=20.0))
    student.more()
    both.save(tmp_path, "teacher-ca")
    both.save(tmp_path, "student-ca")
    student.more()
    until(lambda: teacher.log.count("credentials were replaced") == 1, 30)
    new.issue("student").save(tmp_path, "student")
    new.issue().save(tmp_path, "teacher")
    student.more()
    until(lambda: teacher.log.count("credentials were replaced") >= 2, 30)
    new.save(tmp_path, "teacher-ca")
    new.save(tmp_path, "student-ca")
    until(lambda: teacher.log.count("credentials were replaced") >= 3, 30)
    student.more(2000)
    assert student.end() is None


def test_student_that_trusts_no_more(start: Start, tmp_path: Path, reading: Any) -> None:
    """Its CA is replaced, and not the teacher's certificate: a connection from before is not gone on with."""
    ca = Authority()
    teacher = start("echo", serve=serving(tmp_path, ca.issue()))
    student = reading(reader(teacher, credentials=believing(tmp_path, ca), timeout_s=4.0))
    student.more()
    Authority("other").save(tmp_path, "student-ca")
    until(lambda: student.error is not None, 60)
    assert "is signed by no CA in" in str(student.error)


def test_bad_files_do_not_replace_good(start: Start, tmp_path: Path) -> None:
    ca = Authority()
    teacher = start("echo", serve=serving(tmp_path, ca.issue()))
    ca.issue(days=(-5, -1)).save(tmp_path, "teacher")
    read(teacher, believing(tmp_path, ca))
    until(lambda: "those before stay in use" in teacher.log, 30)
    assert "has expired: have a new one issued" in teacher.log


@pytest.mark.slow
def test_token_rotation(start: Start, tmp_path: Path, reading: Any) -> None:
    valid, mine = put(tmp_path / "valid", f"{OLD}\n"), put(tmp_path / "mine", OLD)
    teacher = start("echo", serve={"token-file": valid})
    student = reading(reader(teacher, credentials=Credentials(token_file=mine), timeout_s=20.0))
    student.more()
    put(tmp_path / "valid", f"# both, until all students have the new one\n{OLD}\n\n{NEW}\n")
    until(lambda: teacher.log.count("credentials were replaced") == 1, 30)
    student.more()
    put(tmp_path / "mine", NEW)
    put(tmp_path / "valid", NEW)
    until(lambda: teacher.log.count("credentials were replaced") == 2, 30)
    student.more(2000)
    assert student.end() is None
    words = why_not(teacher, Credentials(token_file=put(tmp_path / "stale", OLD)))
    assert "the token is not valid here, or no more" in words


def test_token_taken_back_ends_streams(start: Start, tmp_path: Path, reading: Any) -> None:
    valid, mine = put(tmp_path / "valid", f"{OLD}\n{NEW}"), put(tmp_path / "mine", OLD)
    teacher = start("echo", serve={"token-file": valid})
    student = reading(reader(teacher, credentials=Credentials(token_file=mine), timeout_s=4.0))
    student.more()
    put(tmp_path / "valid", NEW)
    until(lambda: student.error is not None, 60)
    assert "UNAUTHENTICATED" in str(student.error)
    assert OLD not in str(student.error) + teacher.log, "a token in words or in the log"


@pytest.mark.parametrize("turns", range(4))
def test_closed_as_it_breaks(tmp_path: Path, turns: int) -> None:
    """A connection that breaks as its reader closes ends: it went on connecting for ever, which nobody waited out."""
    files = CredentialFiles(Credentials(token_file=put(tmp_path / "token", OLD)))
    connected: list[TeacherConnection] = []
    broken: list[TeacherConnection] = []

    async def run(server: HostileServer) -> None:
        host, _, port = server.endpoint.rpartition(":")
        connection = TeacherConnection(
            Instance("s", "teacher", host, int(port)),
            OutputSpec(("y",)),
            shared_memory=False,
            files=files,
            check_model=lambda *_: "",
            on_connected=connected.append,
            on_disconnected=broken.append,
            on_connect_failed=lambda _: None,
        )
        deadline = time.monotonic() + 60
        while not connected:
            assert time.monotonic() < deadline, connection.why
            await asyncio.sleep(0.01)
        connection.reconnect("it breaks")
        for _ in range(turns):
            await asyncio.sleep(0)
        await connection.close()

    thread = EventLoopThread.acquire()
    try:
        with HostileServer() as server:
            thread.run(run(server), 90)
    finally:
        thread.release()
    assert (len(connected), len(broken)) == (1, 1)
