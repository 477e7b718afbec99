"""examples/llm at small scale: as its README says. The real vLLM is not started here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.jobs.examples.running import EXAMPLES, Example

SMALL = ["--limit-files", "4", "--batch", "4", "--completion", "8"]


@pytest.mark.timeout(900)
def test_llm(tmp_path: Path) -> None:
    example = Example("llm", tmp_path, "torch", "transformers", "tokenizers")
    train_teacher, serve, student = example.commands[:3]
    more = ["--limit-files", "4", "--epochs", "1", "--batch", "4", "--vocabulary", "400"]
    assert "written to teacher" in example.run(train_teacher, *more)
    with example.served("server", serve):
        assert "on-policy: perplexity" in example.run(student, *SMALL, "--steps", "10", "--out", "student.json")


@pytest.mark.parametrize("name", ["llm", "resnet"])
def test_table_is_of_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="report.py draws")
    example = Example(name, tmp_path)
    shutil.copy(EXAMPLES / name / "runs.json", example.folder)
    example.run(["python", "report.py", "--folder", "."])
    assert (example.folder / "README.md").read_text() == (EXAMPLES / name / "README.md").read_text()
