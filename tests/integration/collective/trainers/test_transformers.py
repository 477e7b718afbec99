"""Hugging Face's Trainer under `edl run`: a worker is killed in a step, and nothing differs in the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.collective.trainers.killed_job import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_killed_in_a_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    folders = [
        run("train_transformers.py", tmp_path / "whole", -1),
        run("train_transformers.py", tmp_path / "killed", 7),  # the third step of four in an epoch
    ]
    whole, killed = (json.loads((folder / "result.json").read_text()) for folder in folders)
    assert killed["weights"] == whole["weights"]
    assert killed["logs"] == whole["logs"]
