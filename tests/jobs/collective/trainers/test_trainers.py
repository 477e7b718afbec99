"""Training loops under `edl run`: a worker is killed in a step, and nothing differs from a run without EDL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edl.testing import LocalTeacher
from tests.jobs.collective.job import ROOT, Job

pytestmark = pytest.mark.timeout(400)

RUN_S = 300.0  # each worker imports what it trains with, which takes a minute on a busy machine


def compare(script: str, folder: Path, kill_at: int, kind: tuple[bool, bool], **environ: str) -> None:
    """Run a script of this folder in a job of two workers, and compare what its two runs end with on each rank."""
    command = [str(Path(__file__).with_name(script)), str(folder), str(kill_at)]
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    with Job(folder / "job", ("--nproc-per-node", "2"), command, environ=environ) as job:
        node = job.start()
        assert node.wait(RUN_S) == 0, node.output
        assert (folder / "killed").exists()
        begins = [int(line) for line in (folder / "begins").read_text().split()]
        assert begins[-1] > max(begins[0], 0), f"it began anew, which is no recovery: {begins}"
    for rank in range(2):
        plain, elastic = (json.loads((folder / f"{run}-{rank}.json").read_text()) for run in ("plain", "elastic"))
        assert (plain["sharded"], plain["compiled"]) == kind
        for what in ("weights", "optimizer", "logs"):
            assert elastic[what] == plain[what], what


@pytest.mark.parametrize(
    ("needs", "version", "script", "kill_at", "kind"),
    [
        # Each rank reads what is its own of a stream from its place on, in the second epoch.
        ("torchdata.stateful_dataloader", None, "train_loop.py", 13, (False, False)),
        ("transformers", "5.23", "train_transformers.py", 7, (True, False)),  # the third step of four in an epoch
        ("lightning", None, "train_lightning.py", 13, (True, False)),  # the fifth batch of eight in an epoch
        ("accelerate", None, "train_accelerate.py", 7, (True, True)),  # the third step of four in an epoch
    ],
)
def test_killed_in_a_step(
    tmp_path: Path, needs: str, version: str | None, script: str, kill_at: int, kind: tuple[bool, bool]
) -> None:
    pytest.importorskip(needs, version, reason=f"{needs} is not installed, or too old")
    compare(script, tmp_path, kill_at, kind)


def test_distillation_killed_in_a_step(tmp_path: Path) -> None:
    """With the same labels: losses of every step are the same, and those of evaluations with teachers."""
    pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")
    with LocalTeacher("prefix_scores", vocabulary=31) as teacher:
        compare("train_transformers.py", tmp_path, 6, (False, False), EDL_TEACHERS=teacher.endpoint)
