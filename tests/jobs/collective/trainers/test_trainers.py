"""Training under `edl run`: a worker is killed in a step, and nothing differs from a run without that."""

from __future__ import annotations

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.testing import LocalTeacher
from edl.testing.models import fingerprint_of
from tests.jobs.collective.job import ROOT, Job
from tests.jobs.collective.trainers.student_with_teachers import row
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(500)
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


@pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")
def test_keras_killed_in_a_step(tmp_path: Path) -> None:
    """Weights, optimizer, metrics and losses with soft labels are those of a run without a kill, on each rank."""
    outcomes = []
    with LocalTeacher("fingerprint") as teacher:
        for kill_at in (0, 9):  # the third step of six in an epoch
            folder = tmp_path / str(kill_at)
            command = [str(Path(__file__).with_name("train_keras.py")), str(folder), str(kill_at)]
            environ = {"EDL_TEACHERS": teacher.endpoint, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
            with Job(folder, ("--nproc-per-node", "2"), command, environ=environ) as job:
                node = job.start()
                assert node.wait(RUN_S) == 0, node.output
                assert ("generation 1" in node.output) == (kill_at > 0), node.output
            outcomes.append([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)])
    for calm, killed in zip(*outcomes, strict=True):
        assert killed["epochs"] == calm["epochs"][1:]
        assert killed["variables"] == calm["variables"]
        assert killed["logs"] == calm["logs"]
        assert calm["logs"] == outcomes[0][0]["logs"], "of all ranks' rows"


PADDLE_SCRIPT = str(Path(__file__).with_name("train_paddle.py"))
KILLS = [(0, 1, 4, "before the update"), (1, 0, 9, "before the save"), (2, 0, 11, "after the save")]


def said(job: Job, what: str) -> list[dict[str, Any]]:
    """What trainers said, of one kind."""
    path = job.folder / "said.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if what in line]


@pytest.mark.skipif(find_spec("paddle") is None, reason="PaddlePaddle is not installed")
def test_killed_trainers_end_the_same(tmp_path: Path) -> None:
    """With the parameters of a run without EDL. Then an error of the script ends the job.

    Though the other trainer, whose peer is gone, ends by a signal: Paddle's gloo aborts it.
    """
    options, environ = ("--framework", "paddle", "--nproc-per-node", "2"), {"OMP_NUM_THREADS": "1"}
    with Job(tmp_path, options, [PADDLE_SCRIPT], environ={**environ, "KILLS": json.dumps(KILLS)}) as killed:
        node = killed.start()
        assert node.wait(RUN_S) == 1, node.output
        assert "LookupError: the user's own mistake" in node.output
        killed.nothing_is_left()
    # The step in which one was killed counts if another had finished it.
    restored = {(line["generation"], line["rank"]): line["restored"] for line in said(killed, "restored")}
    assert sorted(restored) == [(generation, rank) for generation in range(4) for rank in range(2)]
    assert [restored[(generation, 0)] == restored[(generation, 1)] for generation in range(4)] == [True] * 4
    assert restored[(0, 0)] == -1
    assert restored[(1, 0)] in (3, 4)
    assert restored[(2, 0)] in (8, 9)
    assert restored[(3, 0)] == 11
    calm, ended = (
        {line["rank"]: (line[what], line["loss"]) for line in said(killed, what)} for what in ("calm", "ended")
    )
    assert ended == calm
    assert calm[0][0] == calm[1][0]
    assert calm[0][1] != calm[1][1], "each has data of its own"


STUDENT = str(Path(__file__).with_name("student_with_teachers.py"))
SAMPLES, EPOCHS, STEPS = 600, 2, 2 * 38


def entries(folder: Path) -> dict[int, list[dict[int, dict]]]:
    """Generation -> for each of its ranks: step -> what it had to train in it, and whether it got to its end."""
    found: dict[int, list[dict[int, dict]]] = {}
    for path in sorted(folder.glob("[0-9]-*.jsonl")):
        steps: dict[int, dict] = {}
        for line in path.read_text().split("\n")[:-1]:
            told = json.loads(line)
            steps.setdefault(told["step"], {}).update(told)
        found.setdefault(int(path.stem.split("-")[0]), []).append(steps)
    return found


def last_step(folder: Path) -> int:
    return max((step for ranks in entries(folder).values() for rank in ranks for step in rank), default=-1)


def test_worker_and_teacher_die_in_one_epoch(tmp_path: Path) -> None:
    """What counts of a step is the last generation in which a rank got to its end: then every rank's share is in it.

    A step that was begun and not finished, or that an earlier generation made and lost, changed nothing that is left.
    """
    discovery = f"sqlite:///{tmp_path}/discovery.sqlite"
    command = [STUDENT, str(tmp_path), discovery, str(SAMPLES), str(EPOCHS), "0.03"]
    teachers = [LocalTeacher("fingerprint", service="teachers", discovery=discovery, wait=False) for _ in range(2)]
    options = ("--nproc-per-node", "2")
    with teachers[0], teachers[1], Job(tmp_path, options, command, environ={"OMP_NUM_THREADS": "1"}) as job:
        for teacher in teachers:
            teacher.wait_ready()
        node = job.start()
        wait_until(lambda: last_step(tmp_path) >= 10, "ten steps")
        teachers[0].kill()
        os.kill(node.workers[0], signal.SIGKILL)
        (tmp_path / "on").touch()
        assert node.wait() == 0, node.output
    found = entries(tmp_path)
    assert set(found) == {0, 1}, node.output
    trained: dict[int, list[dict]] = {}
    for _, ranks in sorted(found.items()):
        for step in sorted({step for rank in ranks for step in rank}):
            shares = [rank[step] for rank in ranks if step in rank]
            if any("done" in share for share in shares):
                trained[step] = shares
    assert sorted(trained) == list(range(STEPS))
    assert all(len(shares) == 2 for shares in trained.values())
    for epoch in range(EPOCHS):
        shares = [share for shares in trained.values() for share in shares if share["epoch"] == epoch]
        ids = [each for share in shares for each in share["ids"]]
        assert sorted(ids) == list(range(SAMPLES))
        rows = np.stack([row(each).numpy() for each in ids])
        labels = np.array([label for share in shares for label in share["labels"]], np.float32)
        assert np.array_equal(labels, fingerprint_of(rows))
