"""Workers, zygotes, agents and nodes that are killed, stopped, joined and left, in jobs of up to three nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests.jobs.collective.job import ROOT, TRAIN_STATE, Job, Node, stop, two_worlds
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(400)


def present(job: Job) -> list[Node]:
    """The nodes that are there, in the order of their ranks."""
    newest = generation(job)
    last = {one.rank: one.node for one in job.steps() if one.generation == newest}
    by_name = {node.name: node for node in job.nodes}
    return [by_name[last[rank]] for rank in sorted(last)]


def generation(job: Job) -> int:
    return max(one.generation for one in job.steps())


def went_on(job: Job, size: int, before: int) -> None:
    """Wait until every rank of a generation of this size after `before` has finished a step."""
    wait_until(lambda: job.wait_for_world(size)[0].generation > before, f"{size} ranks go on after generation {before}")


def no_step_is_lost(job: Job) -> None:
    assert two_worlds(job.steps()) == []
    steps = sorted({one.step for one in job.steps()})
    assert steps == list(range(len(steps))), "every step was made by some world"


def test_job_outlives_kills(tmp_path: Path) -> None:
    """A process that is gone on a host that lives is known at once: no lease here ends within the test."""
    with Job(tmp_path, options=("--nnodes", "1:3", "--lease-ttl", "600")) as job:
        for _ in range(3):
            job.start()
        job.wait_for_world(3)
        first = present(job)
        for action in ("kill", "stop", "exit 0"):
            before = generation(job)
            job.tell(1, action)
            went_on(job, 3, before)
            assert [node.name for node in present(job)] == [node.name for node in first], "every node keeps its rank"

        before, node = generation(job), present(job)[1]
        os.kill(node.zygote, signal.SIGKILL)
        went_on(job, 3, before)
        assert node in present(job)
        assert "another one imports what the script does first" in node.output

        before, node = generation(job), present(job)[0]
        old = set(node.workers)
        job.tell(1, "kill")
        new = wait_until(lambda: set(node.workers) - old, "the next worker was forked")
        os.kill(new.pop(), signal.SIGKILL)  # while the rest recovers
        went_on(job, 3, before + 1)

        for rank, whole in ((0, True), (2, False)):
            before, node, processes = generation(job), present(job)[rank], present(job)[rank].everything()
            if whole:
                node.signal_all(signal.SIGKILL)
            else:
                node.kill()
            went_on(job, 2, before)
            node.process.wait()
            wait_until(lambda left=processes: not any(map(_exists, left)), "its workers die with it")
            job.start()
            job.wait_for_world(3, after=time.monotonic())

        before, node = generation(job), present(job)[1]
        node.kill(signal.SIGTERM)
        went_on(job, 2, before)
        assert node.wait() == 143
        last = present(job)
        job.end()
        assert [node.wait() for node in last] == [0, 0]
        job.nothing_is_left()
        no_step_is_lost(job)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


STERN = """
import os
from tests.jobs.collective.train import main

if __name__ == "__main__":
    try:
        main()
    except RuntimeError:
        os._exit(3)
"""


def test_silent_node_and_silent_store(tmp_path: Path) -> None:
    """Leases are 6 s: a node that stands still loses its place and comes back, a store that does stops nobody."""
    (tmp_path / "stern.py").write_text(STERN)
    options, environ = ("--nnodes", "1:2", "--lease-ttl", "6"), {"PYTHONPATH": str(ROOT)}
    with Job(tmp_path, options, ["stern.py", str(tmp_path)], environ=environ) as job:
        nodes = [job.start(), job.start()]
        job.wait_for_world(2)
        # With its workers, which train on in the old world if they are let; and alone, so that only the end of its
        # lease tells of the loss, long after the other's exit code, which is no error of the script then.
        for whole in (True, False):
            before, (stays, lost) = generation(job), present(job)
            workers = lost.workers
            stop(job, lost, everything=whole)
            for pid in workers if not whole else ():
                os.kill(pid, signal.SIGKILL)
            went_on(job, 1, before)
            assert f"lost {job.member(lost)}" in stays.output
            before = generation(job)
            if whole:
                lost.signal_all(signal.SIGCONT)
            else:
                lost.kill(signal.SIGCONT)
            went_on(job, 2, before)
            assert lost in present(job)

        before = generation(job)
        with contextlib.closing(sqlite3.connect(job.folder / "store.sqlite", timeout=20)) as locking:
            locking.execute("BEGIN EXCLUSIVE")
            job.wait_for_world(2, after=time.monotonic() + 8)  # longer than any lease lasts
            wait_until(lambda: all("the store does not answer" in node.output for node in nodes), "it is missed")
            locking.rollback()
        wait_until(lambda: all("the store answers again" in node.output for node in nodes), "it is back")
        job.wait_for_world(2, after=time.monotonic())
        assert generation(job) == before
        job.end()
        assert [node.wait() for node in nodes] == [0, 0]
        no_step_is_lost(job)


def test_state_in_memory_is_continued(tmp_path: Path) -> None:
    """On one host a node leaves, the other goes on alone and is killed; then both that come are asked to leave."""
    with Job(tmp_path, ("--nnodes", "1:2", "--lease-ttl", "15"), [str(TRAIN_STATE), str(tmp_path)]) as job:
        one, other = job.start(), job.start()
        job.wait_for_world(2)
        one.kill(signal.SIGTERM)
        one.wait()
        alone = job.wait_for_world(1, after=time.monotonic())[0]
        reached = wait_until(lambda: [at for at in job.steps() if at.step > alone.step + 20], "steps alone")[0]
        other.signal_all(signal.SIGKILL)
        begun = time.monotonic()
        nodes = [job.start()]
        again = job.wait_for_world(1, after=begun)[0]
        # A step may be in the log and not in memory yet when the kill comes. The first one's state is twenty behind.
        assert again.step >= reached.step, nodes[0].output

        nodes.append(job.start())
        job.wait_for_world(2, after=time.monotonic())
        for node in nodes:
            node.kill(signal.SIGTERM)
        assert [node.wait() for node in nodes] == [143, 143]
        assert any("in this host's memory" in node.output for node in nodes)
        last = max(one.step for one in job.steps())
        begun = time.monotonic()
        final = job.start()
        assert job.wait_for_world(1, after=begun)[0].step == last + 1, "no step was lost, and none was made twice"
        job.end()
        assert final.wait() == 0
        job.nothing_is_left()
