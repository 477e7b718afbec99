"""Readers and teachers that show each other certificates and tokens, which may be replaced while they are used."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edl.distill import Credentials, DistillReader, Options
from edl.distill.engine import connection
from edl.errors import ClosedError
from edl.protocol import tls as files
from edl_serving import admission as authentication
from tests.certificates import HERE, Authority, Pair, put
from tests.fast.distill.conftest import Serve, Served, Start
from tests.fast.distill.reading import check, reader_of, sample, samples, why_unused
from tests.waiting import DEADLINE_S, wait_until

OLD, NEW = "old-token-0123456789", "new-token-0123456789"


@pytest.fixture
def ca() -> Authority:
    return Authority()


def serving(folder: Path, pair: Pair, ca: Authority | None = None) -> dict[str, Any]:
    """Settings of a teacher with this certificate, which takes those of `ca` only."""
    shown: dict[str, Any] = pair.save(folder, "teacher") | ({"ca": ca.save(folder, "teacher-ca")} if ca else {})
    return {"credentials": Credentials(**shown)}


def believing(folder: Path, ca: Authority, pair: Pair | None = None, **settings: Any) -> Credentials:
    """What a student sets that believes this CA and shows this certificate."""
    shown: dict[str, Any] = pair.save(folder, "student") if pair else {}
    return Credentials(ca=ca.save(folder, "student-ca"), **shown, **settings)


def reader(teacher: Any, credentials: Credentials | None) -> DistillReader:
    return reader_of(teacher, options=Options(credentials=credentials)).set_sample_generator(samples(40))


def read(teacher: Any, credentials: Credentials | None = None) -> None:
    with reader(teacher, credentials) as made:
        check(list(made()), 40)


def test_environment_is_enough(start: Start, tmp_path: Path, ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutual TLS of `edl serve` and a student; and what it does not begin with."""
    pair = ca.issue(*HERE).save(tmp_path)
    env = {"EDL_TLS_CA": ca.save(tmp_path), "EDL_TLS_CERT": pair["cert"], "EDL_TLS_KEY": pair["key"]}
    teacher = start("echo", env=env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    read(teacher)
    why_unused(reader(teacher, Credentials()), "speaks TLS, but this side has no CA set.*EDL_TLS_CA")
    Pair(ca.issue().cert, ca.issue().key).save(tmp_path)
    with pytest.raises(Exception, match=r"ended with code 2[\s\S]*does not match certificate"):
        start("echo", env=env)


def test_certificates_that_go_together(serve: Serve, tmp_path: Path, ca: Authority) -> None:
    """Clients' certificates may be of another CA; a file may hold several CAs, or a CA that vouches for a CA."""
    clients, link = Authority("clients"), ca.intermediate("link")
    leaf = link.issue()
    whole = Pair(leaf.cert + link.pem, leaf.key)
    student = clients.issue("student")
    clients.pem += Authority("another").pem
    read(serve(server=serving(tmp_path, whole, clients)), believing(tmp_path, ca, student))


def test_a_name_with_addresses(serve: Serve, tmp_path: Path, ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a teacher whose certificate has the name."""
    teacher = serve("echo", server={**serving(tmp_path, ca.issue("teachers.test")), "host": "0.0.0.0"})
    monkeypatch.setattr("edl.distill.teachers.addresses_of", lambda host: ["127.0.0.1", "127.0.0.2"])
    with reader(SimpleNamespace(endpoint=f"teachers.test:{teacher.port}"), believing(tmp_path, ca)) as made:
        check(list(made()), 40)
        wait_until(lambda: made.stats().teachers_live == 2)


Case = Callable[[Path, Authority], "tuple[dict[str, Any], Credentials]"]
REFUSED: dict[str, tuple[Case, str]] = {
    "client of a foreign CA": (
        lambda folder, ca: (serving(folder, ca.issue(), ca), believing(folder, ca, Authority("other").issue())),
        "does not accept this side's certificate.*no CA that the server trusts.*"
        "if an intermediate CA signed it, append that CA's certificate to the file",
    ),
    "foreign CA": (
        lambda folder, ca: (serving(folder, Authority("other").issue()), believing(folder, ca)),
        r"not signed by a CA in .*student-ca\.pem.*"
        "if that is an intermediate CA, append it to the certificate's own file",
    ),
    "another name": (
        lambda folder, ca: (serving(folder, ca.issue("teacher.example")), believing(folder, ca)),
        "is for a different name, not for '127.0.0.1'.*EDL_TLS_SERVER_NAME",
    ),
    # The registry names the host; who changes it must not be able to choose the certificate with it.
    "the host's name alone": (
        lambda folder, ca: (serving(folder, ca.issue(*HERE)), believing(folder, ca, server_name="teacher.example")),
        "not for 'teacher.example'",
    ),
    "a teacher without TLS": (lambda folder, ca: ({}, believing(folder, ca)), "does not speak TLS.*--tls-cert"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_a_handshake_failed(serve: Serve, tmp_path: Path, ca: Authority, name: str) -> None:
    case, words = REFUSED[name]
    server, credentials = case(tmp_path, ca)
    why_unused(reader(serve(server=server), credentials), words)


# Files that are replaced while they are used.


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Replaced files are noticed after a moment, in place of two seconds."""
    caplog.set_level(logging.INFO)
    for module in (files, connection, authentication):
        monkeypatch.setattr(module, "CHECK_EVERY_S", 0.05)


class Student:
    """A student that reads as much as it is told to, and checks each answer."""

    def __init__(self, teacher: Served, credentials: Credentials) -> None:
        self.reader = reader_of(teacher, options=Options(credentials=credentials, memory_bytes=1 << 20))
        self.reader.set_sample_generator(lambda: map(sample, itertools.count()))
        self._rows, self._read = self.reader(), 0
        self._reading: threading.Thread | None = None

    def read(self, rows: int = 100) -> None:
        for x, number, label in itertools.islice(self._rows, rows):
            assert x[0] == number == label[0] == self._read
            self._read += 1

    def read_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: self.read(4) or condition())  # type: ignore[func-returns-value]

    def _read_until_closed(self) -> None:
        with contextlib.suppress(ClosedError):
            self.read(1_000_000)

    def close(self) -> None:
        self.reader.close()
        if self._reading is not None:
            self._reading.join(DEADLINE_S)
            assert not self._reading.is_alive(), "the student hangs"

    def wait_shut_out(self, words: str) -> str:
        """Go on reading, and wait until this is why its teacher is not used."""
        self._reading = threading.Thread(target=self._read_until_closed)
        self._reading.start()

        def why() -> str:
            (teacher,) = self.reader.stats().teachers.values()
            return teacher.why if re.search(words, teacher.why) else ""

        return wait_until(why, words)


@pytest.fixture
def student(quick_looks: None, stack: contextlib.ExitStack) -> Callable[[Served, Credentials], Student]:
    def begin(teacher: Served, credentials: Credentials) -> Student:
        student = stack.enter_context(contextlib.closing(Student(teacher, credentials)))
        student.read()
        return student

    return begin


def replacements(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("credentials were replaced")


def test_new_certificate_without_restart(serve: Serve, tmp_path: Path, ca: Authority, student: Any) -> None:
    """A connection that exists goes on; the next one is shown the new certificate."""
    teacher = serve(server=serving(tmp_path, ca.issue("before.example", days=(-1, 3))))
    before = student(teacher, believing(tmp_path, ca, server_name="before.example"))
    expiry = teacher.metric("edl_teacher_certificate_expiry_seconds")
    ca.issue("after.example").save(tmp_path, "teacher")
    read(teacher, believing(tmp_path, ca, server_name="after.example"))
    before.read()
    later = teacher.metric("edl_teacher_certificate_expiry_seconds") - expiry
    assert later == pytest.approx(4 * 86400, abs=600), "what an alert looks at"
    why_unused(reader(teacher, believing(tmp_path, ca, server_name="before.example")), "name, not for 'before")


def test_client_ca_replaced_shuts_out(serve: Serve, tmp_path: Path, ca: Authority, student: Any) -> None:
    """Also a student with an open channel: it ends, and the next handshake fails. Over gRPC the age ends it."""
    first, second = Authority("first"), Authority("second")
    teacher = serve(server=serving(tmp_path, ca.issue(), first) | {"tensor_channel": True})
    shut_out = student(teacher, believing(tmp_path, ca, first.issue("student")))
    second.save(tmp_path, "teacher-ca")
    shut_out.wait_shut_out("no CA that the server trusts")
    read(teacher, believing(tmp_path, ca, second.issue("student")))


def test_student_that_trusts_no_more(serve: Serve, tmp_path: Path, ca: Authority, student: Any) -> None:
    """Its CA is replaced, and not the teacher's certificate: a connection from before is not gone on with."""
    shut_out = student(serve(server=serving(tmp_path, ca.issue())), believing(tmp_path, ca))
    Authority("other").save(tmp_path, "student-ca")
    shut_out.wait_shut_out("is not signed by a CA in")


def test_tokens_change_and_are_taken_back(
    serve: Serve, tmp_path: Path, student: Any, caplog: pytest.LogCaptureFixture
) -> None:
    valid, mine = put(tmp_path / "valid", f"{OLD}\n"), put(tmp_path / "mine", OLD)
    teacher = serve(server={"credentials": Credentials(token_file=valid)})
    stale = student(teacher, Credentials(token_file=put(tmp_path / "stale", OLD)))
    reading = student(teacher, Credentials(token_file=mine))
    put(tmp_path / "valid", f"# both, until all students have the new one\n{OLD}\n\n{NEW}\n")
    reading.read_until(lambda: replacements(caplog) >= 1)
    put(tmp_path / "mine", NEW)
    reading.read_until(lambda: replacements(caplog) >= 2)
    put(tmp_path / "valid", NEW)
    words = stale.wait_shut_out("the token is not valid here, or is no longer valid")
    assert "UNAUTHENTICATED" in words
    reading.read(400)
    assert OLD not in words + caplog.text, "a token in words or in the log"
