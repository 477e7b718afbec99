"""The vision example at small scale: its commands, and its comparison with teachers and a node killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.examples.running import Example, right


@pytest.mark.timeout(900)
def test_resnet(tmp_path: Path) -> None:
    """The README's commands for digits train a student, and one reaches its last step while teachers and a node die."""
    example = Example("resnet", tmp_path, "torch", "sklearn")
    train_teacher, serve, student, *_ = example.commands
    assert right(example.run(train_teacher, "--epochs", "5")) > 0.8
    with example.served("serve", serve):
        output = example.run(student, "--epochs", "3")
    assert right(output) > 0.5, output
    assert "1 teacher" in output

    options = ["--seeds", "0", "--epochs", "10", "--limit-s", "280", "--lease-ttl", "10", "--arms", "killed"]
    compare = ["python", "compare.py", *options]
    assert right(example.run(compare)) > 0.8
    assert example.run(compare) == "", "what is done is not done again"
    killed = json.loads((example.folder / "runs" / "killed-0.json").read_text())
    assert killed["lines"][-1]["step"] == killed["lines"][-1]["of"] == 10 * (1497 // 64)
    assert "kill all teachers" in [event["action"] for event in killed["events"]]
    assert {line["nodes"] for line in killed["lines"]} >= {1}
    example.run(["python", "report.py", "--runs", "runs", "--folder", "."])
    table = (example.folder / "README.md").read_text().partition("<!-- table by report.py -->")[2]
    assert "| distilled, two nodes; teachers and a node killed | 1 | " in table
    assert (example.folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
