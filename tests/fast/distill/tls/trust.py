"""What readers and teachers of the TLS tests set, and how a failure is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.distill import Credentials, DistillReader, Options
from edl.errors import NoTeacherError
from edl.testing import LocalTeacher
from tests.certificates import Authority, Pair
from tests.fast.distill.reading import check, reader_of, samples


def serving(folder: Path, pair: Pair, ca: Authority | None = None) -> dict[str, str]:
    """Options of a teacher with this certificate, that takes those of `ca` only."""
    saved = pair.save(folder, "teacher")
    told = {"tls-cert": saved["cert"], "tls-key": saved["key"]}
    return {**told, "tls-ca": ca.save(folder, "teacher-ca")} if ca else told


def believing(folder: Path, ca: Authority, pair: Pair | None = None, **settings: str) -> Credentials:
    """What a student sets that believes this CA and shows this certificate."""
    shown = pair.save(folder, "student") if pair else {}
    return Credentials(ca=ca.save(folder, "student-ca"), **shown, **settings)


def reader(*teachers: LocalTeacher, credentials: Credentials, timeout_s: float = 60.0) -> DistillReader:
    return reader_of(*teachers, options=Options(teacher_timeout_s=timeout_s, credentials=credentials))


def read(teacher: LocalTeacher, credentials: Credentials, timeout_s: float = 60.0) -> None:
    with reader(teacher, credentials=credentials, timeout_s=timeout_s) as made:
        made.set_sample_generator(samples(40))
        check(list(made()), 40)


def why_not(teacher: LocalTeacher, credentials: Credentials, expected: str = "") -> str:
    """Why a student gets no answer.

    On a starved machine a second may be over before the handshake is; then a student with more time is asked.
    """
    for timeout_s in (1.0, 4.0, 16.0):
        with pytest.raises(NoTeacherError) as caught:
            read(teacher, credentials, timeout_s=timeout_s)
        words = str(caught.value)
        if expected in words if expected else not any(unfinished in words for unfinished in _UNFINISHED):
            break
    return words


_UNFINISHED = (": connecting)", "failed to connect", "Deadline Exceeded")
"""Words of a student that has not found out yet."""
