"""examples/llm at small scale: as its README says, and with both teachers killed. The real vLLM is not started here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.jobs.examples.running import EXAMPLES, WAIT_S, Example

SMALL = ["--limit-files", "4", "--batch", "4", "--completion", "8"]


@pytest.mark.timeout(900)
def test_llm(tmp_path: Path) -> None:
    """A student learns, though both its teachers are killed, and the log shows it.

    400 is the perplexity of a model that has learned nothing.
    """
    pytest.importorskip("matplotlib", reason="report.py draws")
    example = Example("llm", tmp_path, "torch", "transformers", "tokenizers")
    train_teacher, serve, student = example.commands[:3]
    more = ["--limit-files", "4", "--epochs", "3", "--batch", "4", "--vocabulary", "400"]
    assert "written to teacher" in example.run(train_teacher, *more)
    with example.served("server", serve):
        assert "on-policy: perplexity" in example.run(student, *SMALL, "--steps", "10", "--out", "student.json")

    options = ["--arms", "killed", "--seeds", "0", "--student", " ".join([*SMALL, "--steps", "100"])]
    compare = ["python", "compare.py", *options, "--limit-s", str(WAIT_S)]
    example.run(compare)
    path = example.folder / "runs/killed-0.json"
    killed = json.loads(path.read_text())
    assert 1 < killed["perplexity"] < 200
    assert 0 < killed["own_text"] < 2
    assert [event["action"] for event in killed["events"]] == [
        "kill the second teacher",
        "start a teacher",
        "kill the first teacher",
    ]
    live = [line["teachers"] for line in killed["lines"]]
    assert max(live) == 2, live
    assert min(live) < 2, live
    assert killed["lines"][-1]["step"] == 100
    assert example.run(compare) == "", "runs that are done are not made again"
    assert json.loads(path.read_text()) == killed
    example.run(["python", "report.py", "--runs", "runs"])
    assert "| on-policy, both teachers killed | 1 |" in (example.folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["llm", "resnet"])
def test_table_is_of_runs(name: str, tmp_path: Path) -> None:
    """The README's table is what the report makes of the runs that lie beside it."""
    pytest.importorskip("matplotlib", reason="report.py draws")
    example = Example(name, tmp_path)
    shutil.copy(EXAMPLES / name / "runs.json", example.folder)
    example.run(["python", "report.py", "--folder", "."])
    assert (example.folder / "README.md").read_text() == (EXAMPLES / name / "README.md").read_text()
