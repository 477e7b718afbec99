"""What a hostile or broken teacher says: its words are one short line, and its hints do not make a student hurry."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from edl.distill import DistillReader
from edl.errors import EDLError, NoTeacherError
from edl.protocol.transport import grpc
from tests.fast.distill.answers.hostile import NASTY, HostileServer
from tests.fast.distill.reading import reader_of, samples, words_of_failure


def fails(reader: DistillReader) -> str:
    with reader.set_sample_generator(samples(4)), pytest.raises(EDLError) as caught:
        list(reader())
    return str(caught.value)


def assert_fit(texts: list[str]) -> None:
    assert texts
    for text in texts:
        assert text.isprintable(), f"as it would reach a log: {text!r:.200}"
        assert len(text) < 5000, f"{len(text)} characters, beginning {text:.80}"


@pytest.mark.parametrize("streams", [False, True])
def test_words_of_errors_are_one_short_line(streams: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "edl")
    # A status's words go as a header, which gRPC limits; on the stream they may have any length.
    details = NASTY + ("x" * 3_000_000 if streams else "x" * 3000)
    with HostileServer(details=details, code=grpc.StatusCode.INVALID_ARGUMENT, streams=streams) as server:
        words = fails(reader_of(server))
    assert r"ok\r\n12:00 ERROR all lost\x1b[2J" in words, "what was said can still be read"
    assert_fit([words, *(record.getMessage() for record in caplog.records)])


@pytest.mark.parametrize("fields", [{"version": NASTY}, {"version": "9" * 100_000}, {"output": NASTY}])
def test_nonsense_in_metadata_is_refused(fields: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "edl")
    from edl.distill import Options

    with HostileServer(**fields) as server:

        def make(timeout_s: float) -> DistillReader:
            return reader_of(server, options=Options(teacher_timeout_s=timeout_s)).set_sample_generator(samples(4))

        words = words_of_failure("no name and no version", make)
    assert "no name and no version" in words
    assert_fit([words, *(record.getMessage() for record in caplog.records)])


@pytest.mark.parametrize(
    ("streams", "hint"), [(False, "nan"), (False, "-1"), (False, "soon"), (True, -5), (True, "nan")]
)
def test_senseless_hint_is_ignored(streams: bool, hint: Any) -> None:
    """A senseless hint is no reason to hurry."""
    from edl.distill import Options, Policy

    with HostileServer(hint=hint, streams=streams) as server:
        for timeout_s in (0.5, 4.0, 16.0):  # in half a second a starved machine may not connect
            options = Options(teacher_timeout_s=timeout_s, policy=Policy(request_timeout_s=timeout_s))
            reader = reader_of(server, options=options).set_sample_generator(samples(4))
            with reader, pytest.raises(NoTeacherError):
                list(reader())
            if server.asked:
                break
    assert 1 <= server.asked <= 24 * timeout_s, f"{server.asked} requests of one batch within {timeout_s} s and more"
