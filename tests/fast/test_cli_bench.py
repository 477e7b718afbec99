"""`edl bench reader`: against a teacher of its own, a given one, and with arguments that make no sense."""

from __future__ import annotations

import json

import pytest

from edl.cli import main
from edl.testing import LocalTeacher

SHORT = ["--seconds", "0.3", "--shape", "4", "--dtype", "float32", "--batch", "8"]


def test_it_starts_a_teacher_and_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reader", "--json", *SHORT]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] > 0
    assert told["rows_per_s"] == pytest.approx(told["rows"] / told["seconds"])
    assert told["mb_per_s"] == pytest.approx(told["rows_per_s"] * 16 / 1e6)
    assert 0 < told["latency_ms"]["p50"] <= told["latency_ms"]["p95"] <= told["latency_ms"]["p99"]
    assert told["reader_cpu_us"] > 0
    assert told["teacher_cpu_us"] >= 0
    assert len(told["teacher_ms"]) == 1


def test_it_measures_a_given_teacher(capsys: pytest.CaptureFixture[str]) -> None:
    with LocalTeacher("echo", delay_s=0.05) as teacher:
        arguments = ["--teachers", teacher.endpoint, "--input", "x", "--output", "y"]
        assert main(["bench", "reader", "--json", *arguments, *SHORT]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["teacher_ms"][teacher.endpoint] >= 50
    assert told["teacher_cpu_us"] is None


def test_people_get_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reader", *SHORT]) == 0
    text = capsys.readouterr().out
    assert "rows/s" in text
    assert "p99" in text


@pytest.mark.parametrize(
    "wrong",
    [
        ["--shape", "3,x"],
        ["--shape", "0"],
        ["--dtype", "float33"],
        ["--dtype", "str"],
        ["--batch", "0"],
        ["--seconds", "-1"],
        ["--output", "other"],
        ["--teachers", "host:port"],
    ],
)
def test_nonsense_is_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What makes no sense is said in one line."""
    assert main(["bench", "reader", *wrong]) == 2
    error = capsys.readouterr().err
    assert wrong[1] in error or wrong[0] in error
    assert error.count("\n") == 1
