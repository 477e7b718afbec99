"""Real Paddle trainers under `edl run --framework paddle`: killed and joined, and bit for bit as if they were not."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.collective.job import Job, wait_until
from tests.jobs.collective.trainers.killed_job import RUN_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("paddle") is None, reason="PaddlePaddle is not installed"),
    pytest.mark.skipif(find_spec("torch") is None, reason="edl run needs PyTorch"),
]
SCRIPT = str(Path(__file__).with_name("train_paddle.py"))
STEPS = 14
KILLS = [
    (0, 1, 4, "before the update"),
    (1, 0, 7, "before the save"),
    (2, 0, 9, "after the save"),
    (2, 1, 9, "after the save"),
]


def job(folder: Path, *options: str, **environ: Any) -> Job:
    told = {name: str(value) for name, value in environ.items()}
    return Job(folder, ("--framework", "paddle", *options), (SCRIPT,), environ={"OMP_NUM_THREADS": "1", **told})


def run(job: Job) -> tuple[int, str]:
    """One node until it ends: its exit code, and what it and its trainers printed."""
    node = job.start()
    return node.wait(RUN_S), node.output


def said(job: Job, what: str) -> list[dict[str, Any]]:
    """What trainers said, of one kind."""
    path = job.folder / "said.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if what in line]


def finals(job: Job) -> dict[int, tuple[str, float]]:
    return {line["rank"]: (line["digest"], line["loss"]) for line in said(job, "ended")}


def test_killed_trainers_end_the_same(tmp_path: Path) -> None:
    """Killed trainers end with the parameters of an uninterrupted run."""
    two = ("--nproc-per-node", "2")
    with job(tmp_path / "calm", *two, STEPS=STEPS) as calm:
        code, output = run(calm)
        assert code == 0, output
        calm.nothing_is_left()
    with job(tmp_path / "killed", *two, STEPS=STEPS, KILLS=json.dumps(KILLS)) as killed:
        code, output = run(killed)
        assert code == 0, output
        killed.nothing_is_left()
    assert [line["restored"] for line in said(calm, "restored")] == [-1, -1]
    # The step in which one was killed counts if another had finished it.
    restored = {(line["generation"], line["rank"]): line["restored"] for line in said(killed, "restored")}
    assert [restored[(generation, 0)] == restored[(generation, 1)] for generation in range(4)] == [True] * 4
    assert restored[(1, 0)] in (3, 4)
    assert restored[(2, 0)] in (6, 7)
    assert restored[(3, 0)] == 9
    assert finals(killed) == finals(calm)
    assert finals(calm)[0][0] == finals(calm)[1][0]
    assert finals(calm)[0][1] != finals(calm)[1][1]  # each has data of its own


def test_script_error_ends_the_job(tmp_path: Path) -> None:
    """Though the other trainer, whose peer is gone, ends by a signal: Paddle's gloo aborts it."""
    with job(tmp_path, "--nproc-per-node", "2", STEPS=STEPS, RAISES=3) as wrong:
        code, output = run(wrong)
        assert code == 1, output
        assert "LookupError: the user's own mistake" in output
        assert {line["generation"] for line in said(wrong, "restored")} == {0}


def test_joining_node_receives_the_state(tmp_path: Path) -> None:
    """A node joins and leaves and is given the state."""
    with job(tmp_path, "--nnodes", "1:2", "--lease-ttl", "10", END=tmp_path / "end") as both:
        both.start()
        wait_until(lambda: any(line["finished"] > 2 for line in said(both, "finished")), "a step of one trainer")
        second = both.start()
        joined = wait_until(lambda: in_world(both, 2), "two trainers")
        assert len({(line["restored"], line["digest"]) for line in joined}) == 1
        before = max(line["finished"] for line in said(both, "finished") if line["world"] == 1)
        # It pauses while it saves a step, before it says so; on a starved machine its time for that may be over.
        assert joined[0]["restored"] in (before, before + 1), "a step is lost"
        generation = joined[0]["generation"]
        wait_until(lambda: [line for line in said(both, "finished") if line["generation"] == generation], "a step")
        second.kill(15)
        assert second.wait() == 143
        left = wait_until(lambda: [one for one in in_world(both, 1) if one["generation"] > generation], "one trainer")
        before = max(line["finished"] for line in said(both, "finished") if line["world"] == 2)
        assert left[0]["restored"] in (before, before + 1), "a step is lost"
        both.end()
        assert both.nodes[0].wait() == 0, both.nodes[0].output
        both.nothing_is_left()


def in_world(job: Job, size: int) -> list[dict[str, Any]]:
    """What the trainers of the newest world of this size restored, once all of them have."""
    lines = [line for line in said(job, "restored") if line["world"] == size]
    newest = [line for line in lines if line["generation"] == max(each["generation"] for each in lines)]
    return newest if len(newest) == size else []
