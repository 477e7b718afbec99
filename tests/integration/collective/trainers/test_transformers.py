"""Hugging Face's Trainer under `edl run`: a worker is killed in a step, and nothing differs in the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.collective.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RUN_S = 250.0  # each worker imports transformers, which takes a minute on a busy machine
SCRIPT = Path(__file__).with_name("train_transformers.py")


def run(folder: Path, kill_at: int) -> dict[str, Any]:
    """What a job found out in the end."""
    folder.mkdir()
    command = [str(SCRIPT), str(folder), str(kill_at)]
    with Job(folder / "job", ("--nproc-per-node", "2"), command) as job:
        node = job.start()
        code, output = node.wait(RUN_S), node.output
    assert code == 0, output
    assert (folder / "killed").exists() is (kill_at >= 0), output
    begins = [int(line) for line in (folder / "begins").read_text().split()]
    assert begins[-1] > 0 or kill_at < 0, f"it began anew, which is no recovery: {begins}"
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_killed_in_a_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    whole = run(tmp_path / "whole", -1)
    killed = run(tmp_path / "killed", 7)  # the third step of four in an epoch
    assert killed["weights"] == whole["weights"]
    assert killed["logs"] == whole["logs"]
