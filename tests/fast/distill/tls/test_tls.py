"""Readers and teachers that show each other certificates: real processes, real handshakes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edl.distill import Credentials, DistillReader, Options
from edl.errors import NoTeacherError, SettingsError
from edl.protocol.transport import grpc
from tests.certificates import HERE, Authority, Pair
from tests.fast.distill.conftest import Start
from tests.fast.distill.reading import check, reader_of, samples, words_of_failure
from tests.fast.distill.tls.trust import believing, read, serving, why_not


@pytest.fixture
def ca() -> Authority:
    return Authority()


def test_tls(start: Start, tmp_path: Path, ca: Authority) -> None:
    teacher = start("echo", serve=serving(tmp_path, ca.issue()))
    read(teacher, believing(tmp_path, ca))


def test_mutual_tls(start: Start, tmp_path: Path, ca: Authority) -> None:
    teacher = start("echo", serve=serving(tmp_path, ca.issue(), Authority()))
    words = why_not(teacher, believing(tmp_path, ca))
    assert "wants a client certificate" in words
    assert "EDL_TLS_CERT" in words


def test_mutual_tls_of_two_cas(start: Start, tmp_path: Path, ca: Authority) -> None:
    clients = Authority("clients")
    teacher = start("echo", serve=serving(tmp_path, ca.issue(), clients))
    read(teacher, believing(tmp_path, ca, clients.issue("student")))


def test_environment_is_enough(start: Start, tmp_path: Path, ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = ca.issue(*HERE).save(tmp_path)
    env = {"EDL_TLS_CA": ca.save(tmp_path), "EDL_TLS_CERT": pair["cert"], "EDL_TLS_KEY": pair["key"]}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    teacher = start("echo", env=env)
    with reader_of(teacher) as made:
        made.set_sample_generator(samples(40))
        check(list(made()), 40)
    words = why_not(teacher, Credentials())
    assert "speaks TLS, and this side has no CA set" in words, "mutual TLS was not what the teacher speaks"


def test_wrong_name_is_named(start: Start, tmp_path: Path, ca: Authority) -> None:
    teacher = start("echo", serve=serving(tmp_path, ca.issue("teacher.example")))
    words = why_not(teacher, believing(tmp_path, ca))
    assert "is for another name ('teacher.example'), not for '127.0.0.1'" in words
    assert "EDL_TLS_SERVER_NAME" in words
    read(teacher, believing(tmp_path, ca, server_name="teacher.example"))


def test_certificate_without_names(start: Start, tmp_path: Path, ca: Authority) -> None:
    words = why_not(start("echo", serve=serving(tmp_path, ca.issue(nameless=True))), believing(tmp_path, ca))
    assert "is for no host name or address (none is in its subjectAltName), not for '127.0.0.1'" in words


def test_intermediate_ca_that_is_left_out(start: Start, tmp_path: Path, ca: Authority) -> None:
    """Of the teacher's certificate, then of the student's; both go through as soon as the file holds the link."""
    link = ca.intermediate("link")
    leaf = link.issue()
    whole = Pair(leaf.cert + link.pem, leaf.key)
    teacher = start("echo", serve=serving(tmp_path, leaf, ca))
    words = why_not(teacher, believing(tmp_path, ca, whole))
    assert "if that is an intermediate one, put it behind the certificate in the certificate's own file" in words
    whole.save(tmp_path, "teacher")
    words = why_not(teacher, believing(tmp_path, ca, leaf))
    assert "if an intermediate CA signed it, put that one's certificate behind it in the file" in words
    read(teacher, believing(tmp_path, ca, whole))


def test_expected_name_is_all_that_counts(start: Start, tmp_path: Path, ca: Authority) -> None:
    """The registry names the host; who changes it must not be able to choose the certificate with it."""
    teacher = start("echo", serve=serving(tmp_path, ca.issue(*HERE)))
    words = why_not(teacher, believing(tmp_path, ca, server_name="teacher.example"))
    assert "not for 'teacher.example'" in words


def test_foreign_ca_is_named(start: Start, tmp_path: Path, ca: Authority) -> None:
    teacher = start("echo", serve=serving(tmp_path, Authority("other").issue()))
    words = why_not(teacher, believing(tmp_path, ca))
    assert "signed by no CA in" in words
    assert "student-ca.pem" in words


def test_plain_student_of_a_tls_teacher(start: Start, tmp_path: Path, ca: Authority) -> None:
    teacher = start("echo", serve=serving(tmp_path, ca.issue()))
    words = why_not(teacher, Credentials())
    assert "speaks TLS, and this side has no CA set" in words
    assert "EDL_TLS_CA" in words


def test_tls_student_of_a_plain_teacher(start: Start, tmp_path: Path, ca: Authority) -> None:
    words = why_not(start("echo"), believing(tmp_path, ca))
    assert "does not speak TLS" in words
    assert "--tls-cert" in words


def test_client_of_a_foreign_ca(start: Start, tmp_path: Path, ca: Authority) -> None:
    teacher = start("echo", serve=serving(tmp_path, ca.issue(), ca))
    words = why_not(teacher, believing(tmp_path, ca, Authority("other").issue()))
    assert "does not take this side's certificate" in words
    assert "no CA that the server knows" in words


def test_several_cas_in_one_file(start: Start, tmp_path: Path, ca: Authority) -> None:
    old = Authority("old")
    old.pem += ca.pem
    teacher = start("echo", serve=serving(tmp_path, ca.issue(), old))
    read(teacher, believing(tmp_path, old, ca.issue("student")))


def test_teacher_with_bad_files_says_why(start: Start, tmp_path: Path, ca: Authority) -> None:
    pair = Pair(ca.issue().cert, ca.issue().key)
    with pytest.raises(Exception, match=r"ended with code 2[\s\S]*does not match certificate"):
        start("echo", serve=serving(tmp_path, pair))


def test_student_with_bad_files_says_why(tmp_path: Path, ca: Authority) -> None:
    expired = believing(tmp_path, ca, ca.issue("student", days=(-5, -1)))
    made = DistillReader(["x", None], ["y"], teachers="127.0.0.1:1", options=Options(credentials=expired))
    made.set_sample_generator(samples(4))
    with made, pytest.raises(SettingsError, match=r"student\.pem' has expired: have a new one issued"):
        list(made())


BAD = {
    "expired": (((-5, -1)), "has expired: have a new one issued"),
    "not yet valid": (((1, 5)), "is not valid yet: see its dates, and the clock of this host"),
}


@pytest.mark.parametrize(("days", "words"), BAD.values(), ids=BAD)
def test_certificate_of_another_time(tmp_path: Path, ca: Authority, days: tuple[float, float], words: str) -> None:
    """Of a server that is not ours: `edl serve` would not begin with it."""
    pair = ca.issue(*HERE, days=days)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pair.key, pair.cert)]))
    server.start()
    try:
        made = DistillReader(
            ["x", None],
            ["y"],
            teachers=[f"127.0.0.1:{port}"],
            options=Options(teacher_timeout_s=4.0, credentials=believing(tmp_path, ca)),
        )
        made.set_sample_generator(samples(4))
        with made, pytest.raises(NoTeacherError) as caught:
            list(made())
    finally:
        server.stop(0).wait()
    assert f"the certificate of 127.0.0.1:{port} {words}" in str(caught.value)


def test_teacher_that_is_away_is_not_tls(tmp_path: Path, ca: Authority) -> None:
    """The reason is gRPC's: connection refused."""

    def make(timeout_s: float) -> DistillReader:
        options = Options(teacher_timeout_s=timeout_s, credentials=believing(tmp_path, ca))
        made = DistillReader(["x", None], ["y"], teachers="127.0.0.1:9", options=options)
        return made.set_sample_generator(samples(4))

    assert "Connection refused" in words_of_failure("Connection refused", make)
