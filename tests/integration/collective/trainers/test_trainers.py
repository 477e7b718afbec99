"""Other libraries' training loops under `edl run`: a worker is killed in a step, and nothing differs in the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.collective.trainers.killed_job import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def compare(script: str, folder: Path, kill_at: int) -> None:
    """Compare what a script finds out undisturbed with what it does where one of its workers is killed."""
    folders = [run(script, folder / "whole", -1), run(script, folder / "killed", kill_at)]
    whole, killed = (json.loads((each / "result.json").read_text()) for each in folders)
    assert killed["weights"] == whole["weights"]
    assert killed["logs"] == whole["logs"]


def test_transformers_killed_in_a_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    compare("train_transformers.py", tmp_path, 7)  # the third step of four in an epoch


def test_lightning_killed_in_a_step(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    compare("train_lightning.py", tmp_path, 13)  # the fifth batch of eight in an epoch


def test_accelerate_killed_in_a_step(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    compare("train_accelerate.py", tmp_path, 7)  # the third step of four in an epoch
