"""Training loops under `edl run`: a worker is killed in a step, and nothing differs from a run without EDL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.testing import LocalTeacher
from tests.jobs.collective.job import ROOT, Job

pytestmark = pytest.mark.timeout(400)

RUN_S = 300.0  # each worker imports what it trains with, which takes a minute on a busy machine
AOT = ("--compile", "aot_eager")  # another backend's C++ would be most of the time


def compare(script: str, folder: Path, kill_at: int, options: tuple[str, ...], **environ: str) -> None:
    """Run a script of this folder in a job of two workers, and compare what its two runs end with on each rank."""
    command = [str(Path(__file__).with_name(script)), str(folder), str(kill_at), *options]
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    with Job(folder / "job", ("--nproc-per-node", "2"), command, environ=environ) as job:
        node = job.start()
        assert node.wait(RUN_S) == 0, node.output
        assert (folder / "killed").exists()
        begins = [int(line) for line in (folder / "begins").read_text().split()]
        assert begins[-1] > max(begins[0], 0), f"it began anew, which is no recovery: {begins}"
    for rank in range(2):
        plain, elastic = (json.loads((folder / f"{run}-{rank}.json").read_text()) for run in ("plain", "elastic"))
        assert (plain["sharded"], plain["compiled"]) == ("--fsdp2" in options, "--compile" in options)
        for what in ("weights", "optimizer", "logs"):
            assert elastic[what] == plain[what], what


@pytest.mark.parametrize("options", [(), ("--fsdp2",)], ids=" ".join)
def test_loop_killed_in_a_step(tmp_path: Path, options: tuple[str, ...]) -> None:
    """And each rank reads what is its own of the stream from its place on."""
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    compare("train_loop.py", tmp_path, 13, options)  # in the second epoch


@pytest.mark.parametrize("options", [AOT, ("--fsdp2",)], ids=" ".join)
def test_transformers_killed_in_a_step(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    compare("train_transformers.py", tmp_path, 7, options)  # the third step of four in an epoch


def test_distillation_killed_in_a_step(tmp_path: Path) -> None:
    """With the same labels: losses of every step are the same, and those of evaluations with teachers."""
    pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    with LocalTeacher("prefix_scores", vocabulary=31) as teacher:
        compare("train_transformers.py", tmp_path, 6, (), EDL_TEACHERS=teacher.endpoint)


@pytest.mark.parametrize("options", [AOT, ("--fsdp2",)], ids=" ".join)
def test_lightning_killed_in_a_step(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    compare("train_lightning.py", tmp_path, 13, options)  # the fifth batch of eight in an epoch


@pytest.mark.parametrize("options", [(), ("--fsdp2", *AOT)], ids=" ".join)
def test_accelerate_killed_in_a_step(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    compare("train_accelerate.py", tmp_path, 7, options)  # the third step of four in an epoch
