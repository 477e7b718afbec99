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
        arguments = ["--teachers", teacher.endpoint, "--input", "x", "--output", "y", *SHORT]
        assert main(["bench", "reader", "--json", *arguments]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["teacher_ms"][teacher.endpoint] >= 50
        assert told["teacher_cpu_us"] is None
        assert main(["bench", "reader", *arguments]) == 0
    text = capsys.readouterr().out
    assert "rows/s" in text
    assert "p99" in text


WRONG = [
    *("--shape 3,x", "--shape 0", "--dtype float33", "--dtype str", "--batch 0", "--seconds -1"),
    *("--teachers host:port", "--output other"),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_nonsense_is_one_line(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reader", *wrong.split()]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in wrong.split())
    assert error.count("\n") == 1
