"""examples/nlp, run as its README says but on few texts, with a teacher that is killed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.jobs.examples.running import EXAMPLES, WAIT_S, Example, right
from tests.waiting import wait_until


@pytest.mark.timeout(600)
def test_nlp(tmp_path: Path) -> None:
    example = Example("nlp", tmp_path, "torch", "transformers", "tokenizers")
    train_teacher, serve, student, paddle_student = example.commands[:4]
    results = ("--results", "results.jsonl")
    assert right(example.run(train_teacher, "--epochs", "2", *results)) > 0.9
    one, two = (tmp_path / f"{name}.requests" for name in ("one", "two"))

    def answered(log: Path) -> int:
        return log.read_text().count('"OK"') if log.exists() else 0

    with (
        example.served("one", serve, "--access-log", str(one)) as teacher,
        example.served("two", serve, "--access-log", str(two)),
    ):
        with example.started("student", student, *results) as trained:
            wait_until(lambda: min(answered(one), answered(two)) >= 3, "answers of both", WAIT_S)
            assert trained.process.poll() is None
            teacher.signal_all(signal.SIGKILL)
            before = answered(two)
            assert trained.wait(WAIT_S) == 0, trained.output
        assert answered(two) > before
        assert right(trained.output) > 0.7
        if any((Path(entry) / "paddle").is_dir() for entry in sys.path):
            assert right(example.run(paddle_student, "--cache", "--steps", "200", *results)) > 0.6
        teacher.process.wait()
    kept = [json.loads(line) for line in (example.folder / "results.jsonl").read_text().splitlines()]
    assert [line["model"] for line in kept[:2]] == ["teacher", "cnn"]


def test_nlp_readme_has_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the table's program draws as well")
    example = Example("nlp", tmp_path)
    out = example.run(["python", "table.py", "--results", str(EXAMPLES / "nlp" / "results.jsonl")])
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 13
    readme = (EXAMPLES / "nlp" / "README.md").read_text().splitlines()
    assert [row for row in rows if row not in readme] == []
    assert (example.folder / "accuracy.png").stat().st_size > 5_000
