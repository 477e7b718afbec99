"""Other libraries' training loops under `edl run`: a worker is killed in a step, and nothing differs in the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.testing import LocalTeacher
from tests.jobs.collective.trainers.killed_job import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


OPTIONS = [(), ("--fsdp2",), ("--compile", "aot_eager")]  # another backend's C++ would be most of the time


def compare(script: str, folder: Path, kill_at: int, options: tuple[str, ...], **environ: str) -> None:
    """Compare what a script finds out undisturbed with what it does where one of its workers is killed."""
    moments = (("whole", -1), ("killed", kill_at))
    folders = [run(script, folder / name, moment, *options, environ=environ) for name, moment in moments]
    whole, killed = (json.loads((each / "result.json").read_text()) for each in folders)
    assert (whole["sharded"], whole["compiled"]) == ("--fsdp2" in options, "--compile" in options)
    for what in ("weights", "optimizer", "logs"):
        assert killed[what] == whole[what], what


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_transformers_killed_in_a_step(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    compare("train_transformers.py", tmp_path, 7, options)  # the third step of four in an epoch


def test_distillation_killed_in_a_step(tmp_path: Path) -> None:
    """With the same labels: losses of every step are the same, and those of evaluations with teachers."""
    pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    with LocalTeacher("prefix_scores", vocabulary=31) as teacher:
        compare("train_distill.py", tmp_path, 6, (), EDL_TEACHERS=teacher.endpoint)  # the second of four in an epoch


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_lightning_killed_in_a_step(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    compare("train_lightning.py", tmp_path, 13, options)  # the fifth batch of eight in an epoch


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_accelerate_killed_in_a_step(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    compare("train_accelerate.py", tmp_path, 7, options)  # the third step of four in an epoch
