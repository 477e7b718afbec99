"""What is killed, stopped, joined and left in jobs of up to three nodes; and a store that is away for too long."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from edl.collective.worker_status import WorkerStatusPage
from tests.jobs.collective.job import ROOT, TRAIN_STATE, Job, Node, Step
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


def two_worlds(steps: Sequence[Step]) -> list[tuple[Step, Step]]:
    """Pairs of steps in which an older generation went on after a newer one had begun.

    The step that a rank was in when the newer generation began, and the next one, count as in flight.
    """
    began: dict[int, Step] = {}
    for one in sorted(steps, key=lambda step: step.time):
        began.setdefault(one.generation, one)
    found = []
    for newer, first in began.items():
        late: dict[int, list[Step]] = {}
        for one in steps:
            if one.generation < newer and one.time > first.time:
                late.setdefault(one.pid, []).append(one)
        found += [(first, each[2]) for each in late.values() if len(each) > 2]
    return found


@contextlib.contextmanager
def silent(job: Job, how: str = "EXCLUSIVE") -> Iterator[None]:
    """The job's store does not answer, or with "IMMEDIATE" takes no change."""
    with contextlib.closing(sqlite3.connect(job.folder / "store.sqlite", timeout=20)) as locking:
        locking.execute(f"BEGIN {how}")
        yield
        locking.rollback()


def stop(job: Job, node: Node, *, everything: bool) -> None:
    """SIGSTOP an agent, or its whole node, but not while it holds the lock of the job's SQLite file."""
    with silent(job, "IMMEDIATE"):
        if everything:
            node.signal_all(signal.SIGSTOP)
        else:
            node.kill(signal.SIGSTOP)


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
        assert "starting another one, which repeats the script's first imports" in node.output

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
        with silent(job):
            job.wait_for_world(2, after=time.monotonic() + 8)  # longer than any lease lasts
            wait_until(lambda: all("the store does not answer" in node.output for node in nodes), "it is missed")
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


LIMIT_S = 4.0
"""So long do workers go on without the store, after the end of their agent's lease."""

OPTIONS = ("--nnodes", "1", "--rdzv-conf", f"takeover_timeout={LIMIT_S / 0.8}")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, OPTIONS, [str(TRAIN_STATE), str(tmp_path)]) as job:
        yield job


def test_stopped_agent_looks_before_going_on(job: Job) -> None:
    """A stopped agent that goes on lets its workers go on only when it has looked."""
    node = job.start()
    job.wait_for_world(1)
    (path,) = job.shared_memory.glob("*/board-0")
    page = WorkerStatusPage.open(path)
    with silent(job):
        (worker,) = node.workers
        node.kill(signal.SIGSTOP)
        wait_until(lambda: page.agent_silence_s > LIMIT_S + 0.5, "others may have taken the job over")
        last = job.steps()[-1].step
        node.kill(signal.SIGCONT)
        wait_until(lambda: "the workers are stopped until the store answers" in node.output, "it stops its workers")
        wait_until(lambda: not Path(f"/proc/{worker}").exists(), "its worker is gone")
        assert page.agent_silence_s > LIMIT_S, "no sign of life before that"
        assert job.steps()[-1].step == last, "and no step"
    job.wait_for_world(1, after=time.monotonic())
    assert "stopped while the store did not answer" in node.output
    assert [one.step for one in job.steps()] == list(range(len(job.steps()))), "it goes on from memory"
    job.end()
    assert node.wait() == 0
    job.nothing_is_left()


def test_job_without_a_name_goes_on(job: Job) -> None:
    """No other node can take it over, so its workers go on for as long as the store is silent."""
    node = job.start("--rdzv-id", "none")
    job.wait_for_world(1)
    with silent(job):
        wait_until(lambda: "the store does not answer" in node.output, "the agent misses the store")
        job.wait_for_world(1, after=time.monotonic() + 2 * LIMIT_S)
    wait_until(lambda: "the store answers again" in node.output, "the agent has found it again")
    job.wait_for_world(1, after=time.monotonic())
    assert {each.generation for each in job.steps()} == {0}, node.output
    assert "stopped" not in node.output
    with silent(job):
        job.end()
        assert node.wait() == 0, "nor does its end wait for the store"
    wait_until(lambda: not job.processes(), "the job's processes have ended")


@pytest.mark.parametrize("ends", ["worker", "agent"])
def test_job_without_a_name_ends(job: Job, ends: str) -> None:
    """What does not train, or was asked to leave, waits no longer for a silent store than a job with a name does."""
    node = job.start("--rdzv-id", "none", "--rdzv-conf", "join_timeout=3")
    job.wait_for_world(1)
    with silent(job):
        wait_until(lambda: "the store does not answer" in node.output, "the agent misses the store")
        if ends == "worker":
            os.kill(node.workers[0], signal.SIGKILL)
        else:
            node.kill(signal.SIGTERM)
        assert node.wait() == (75 if ends == "worker" else 128 + signal.SIGTERM), node.output
    wait_until(lambda: not job.processes(), "the job's processes have ended")
