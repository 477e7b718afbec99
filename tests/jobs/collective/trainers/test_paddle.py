"""Real Paddle trainers under `edl run --framework paddle`: killed and joined, and bit for bit as if they were not."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.collective.job import Job
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(find_spec("paddle") is None, reason="PaddlePaddle is not installed"),
    pytest.mark.skipif(find_spec("torch") is None, reason="edl run needs PyTorch"),
]
RUN_S = 300.0
SCRIPT = str(Path(__file__).with_name("train_paddle.py"))
KILLS = [(0, 1, 4, "before the update"), (1, 0, 9, "before the save"), (2, 0, 11, "after the save")]


def job(folder: Path, *options: str, **environ: str) -> Job:
    return Job(folder, ("--framework", "paddle", *options), (SCRIPT,), environ={"OMP_NUM_THREADS": "1", **environ})


def said(job: Job, what: str) -> list[dict[str, Any]]:
    """What trainers said, of one kind."""
    path = job.folder / "said.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [line for line in map(json.loads, lines) if what in line]


def test_killed_trainers_end_the_same(tmp_path: Path) -> None:
    """With the parameters of a run without EDL. Then an error of the script ends the job.

    Though the other trainer, whose peer is gone, ends by a signal: Paddle's gloo aborts it.
    """
    with job(tmp_path, "--nproc-per-node", "2", KILLS=json.dumps(KILLS)) as killed:
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


def test_joining_node_receives_the_state(tmp_path: Path) -> None:
    """A node joins and leaves and is given the state."""
    with job(tmp_path, "--nnodes", "1:2", "--lease-ttl", "30", END=str(tmp_path / "end")) as both:
        both.start()
        wait_until(lambda: any(line["finished"] > 2 for line in said(both, "finished")), "a step of one trainer", RUN_S)
        second = both.start()
        joined = wait_until(lambda: in_world(both, 2), "two trainers", RUN_S)
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
