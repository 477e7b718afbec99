"""Workers that go on in the same process: real jobs, whose workers and agents are killed, stopped and joined."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.collective.inprocess.run import (
    CLINGING_S,
    DEADLINE_S,
    JOB,
    Job,
    check_parameters,
    check_steps,
    kill,
    until,
)

pytestmark = pytest.mark.timeout(600)


def final_hash(job: Job, step: int) -> str:
    return next(row["hash"] for rows in job.rows().values() for row in rows if row["step"] == step)


@pytest.mark.slow
def test_ten_kills_lose_and_repeat_no_step(tmp_path: Path) -> None:
    """Ten kills lose and repeat no step and leave the survivors as they are."""
    steps = 250
    (tmp_path / "calm").mkdir()
    (tmp_path / "churn").mkdir()
    with Job(tmp_path / "calm", [str(steps), "0"]) as calm:
        calm.start(3, "1")
        assert calm.end() == [0], calm.output
    chance = random.Random(3)
    with Job(tmp_path / "churn", [str(steps), "0.02"]) as job:
        job.start(3, "1")
        generation, took = -1, []
        for _ in range(10):
            world = job.world(3, after=generation)
            generation = next(iter(world.values()))["generation"]
            victim = chance.choice(sorted(world))
            survivors = [pid for pid in world if pid != victim]
            took.append(job.resumed_s(survivors, generation, kill(victim)))
        assert job.end() == [0], job.output
        check_steps(job, steps)
        assert len(job.rows()) == 13  # each kill cost one process, and brought one
        assert final_hash(job, steps - 1) == final_hash(calm, steps - 1)
        print("seconds to the slowest survivor's next step:", sorted(round(one, 3) for one in took))


@pytest.mark.slow
def test_an_evaluation_outlives_a_lost_rank(tmp_path: Path) -> None:
    with Job(tmp_path, ["12", "0", "evaluates"]) as job:
        job.start(3, "1")
        assert job.end() == [0], job.output
        check_steps(job, 12)
        results = [path.read_text() for path in tmp_path.glob("*.results")]
        assert results == ["{5: 6} None"] * 3, job.output
        evaluated = (tmp_path / "evaluations").read_text().split()
        assert set(evaluated) == {"6"}, "the same state each time"
        assert len(evaluated) in (4, 5, 6), "once by three ranks, and before that by those that came to it"


@pytest.mark.slow
def test_reconfigurations_leak_nothing(tmp_path: Path) -> None:
    """Twenty reconfigurations leak nothing."""
    with Job(tmp_path, ["5000", "0.005"]) as job:
        job.start(2, "1")
        world = job.world(2)
        survivor = min(world)
        generations = []
        for _ in range(21):
            generation = world[survivor]["generation"]
            kill(next(pid for pid in world if pid != survivor))
            world = job.world(2, after=generation)
            assert survivor in world, job.output
            generations.append(world[survivor]["generation"])
        early = next(row for row in reversed(job.rows()[survivor]) if row["generation"] == generations[0])

        def settled() -> dict[str, Any] | None:
            """A thread that has ended stays in /proc for a moment."""
            late = job.rows()[survivor][-1]
            return late if (late["fds"], late["threads"]) == (early["fds"], early["threads"]) else None

        late = until(settled, f"as many files and threads as in {early}")
    assert late["resident"] - early["resident"] < 20 * 3 * 2**20


def test_joins_and_deaths_lose_no_step(tmp_path: Path) -> None:
    """Nodes join and leave and die without a step lost."""
    with Job(tmp_path, ["100000", "0.02"]) as job:
        job.start(1, "1:3")
        first = job.world(1)
        job.start(1, "1:3")
        second = job.world(2, after=next(iter(first.values()))["generation"])
        assert set(first) < set(second)  # the first one's process went on
        third = job.start(1, "1:3")
        world = job.world(3, after=next(iter(second.values()))["generation"])
        assert set(second) < set(world)
        newest = next(pid for pid in world if pid not in second)
        generation = world[newest]["generation"]

        third.send_signal(signal.SIGTERM)
        assert third.wait(DEADLINE_S) == 143, job.output
        world = job.world(2, after=generation)
        assert set(world) == set(second)

        job.agents[0].kill()  # the whole node of the first: its worker dies with it
        survivor = next(pid for pid in second if pid not in first)
        world = job.world(1, after=next(iter(world.values()))["generation"])
        assert set(world) == {survivor}
        check_steps(job)
        sizes = job.rows()[survivor][-1]["sizes"]
        assert sizes == [[1, 2], [2, 3], [3, 2], [2, 1]]


def test_stopped_worker_is_replaced(tmp_path: Path) -> None:
    """A stopped worker is replaced and the others go on."""
    with Job(tmp_path, ["100000", "0.02"]) as job:
        job.start(3, "1")
        world = job.world(3)
        victim = next(pid for pid, row in world.items() if row["rank"] == 1)
        kill(victim, signal.SIGSTOP)
        after = job.world(3, after=world[victim]["generation"])
        assert set(world) - set(after) == {victim}
        check_steps(job)


def test_two_at_once_and_one_in_recovery(tmp_path: Path) -> None:
    """Two at once and one during the recovery."""
    with Job(tmp_path, ["100000", "0.02"]) as job:
        job.start(3, "1")
        world = job.world(3)
        survivor, *victims = sorted(world)
        for victim in victims:
            kill(victim)
        after = job.world(3, after=world[survivor]["generation"])
        assert survivor in after, job.output
        check_steps(job)
        generation = after[survivor]["generation"]
        first, second = (pid for pid in after if pid != survivor)
        kill(first)
        until(lambda: f"generation {generation + 1}" in job.output, "the next generation")
        kill(second)
        # Whoever waited to be connected by the second may be replaced as well: then a few steps are made again.
        job.world(3, after=generation)
        check_parameters(job)


def test_worker_that_holds_on_is_replaced(tmp_path: Path) -> None:
    """A worker that does not let go is replaced."""
    with Job(tmp_path, ["100000", "0.02", "clings"]) as job:
        job.start(3, "1")
        world = job.world(3)
        victim, _, good = sorted(world, key=lambda pid: world[pid]["rank"])
        kill(victim)
        after = job.world(3, after=world[victim]["generation"])
        assert set(world) & set(after) == {good}, job.output
        late = f"worker 1 took more than {CLINGING_S} s to go on in process"
        assert late in job.output
        stacks = job.output.partition(f"{late}; what it did:\n")[2]
        assert re.match(r"--- rank \d, process \d+:\n", stacks), job.output
        assert "in cling\n" in stacks.partition("edl run: ")[0], "the late worker's stack, before it is replaced"
        check_steps(job)


def test_script_error_ends_the_job(tmp_path: Path) -> None:
    """An error of the script ends the job with its traceback."""
    with Job(tmp_path, ["100", "0.02", "wrong"]) as job:
        job.start(2, "1")
        assert job.end() == [1]
        assert "ValueError: this batch is no good" in job.output
        assert max(row["step"] for rows in job.rows().values() for row in rows) <= 5


def test_failed_step_is_restored_from_memory(tmp_path: Path) -> None:
    """A step that changed parameters and failed is restored from memory."""
    with Job(tmp_path, ["100000", "0.05", "late"]) as job:
        job.start(3, "1")
        world = job.world(3)
        for _ in range(3):
            victim = max(world)
            kill(victim)
            world = job.world(3, after=next(iter(world.values()))["generation"])
        check_parameters(job)


@pytest.mark.parametrize("command", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_one_generation_without_edl_run(tmp_path: Path, command: list[str]) -> None:
    """Without edl run there is one generation."""
    script = [str(JOB), str(tmp_path), "5", "0"]
    whole = [sys.executable, *command, *script]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    ranks = Job(tmp_path, []).rows().values()
    assert len(ranks) == (2 if command else 1)
    assert all([row["step"] for row in rows] == [0, 1, 2, 3, 4] for rows in ranks)
