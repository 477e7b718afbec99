"""A job of three nodes, and everything that can happen to workers, zygotes, agents and nodes, one after another.

The nodes go on from test to test, since starting them is what takes the time; each test leaves a complete world behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.collective.job import RECOVER_S, Job, Node, stop, two_worlds, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("job"), options=("--nnodes", "1:3", "--lease-ttl", "4")) as job:
        for _ in range(3):
            job.start()
        job.wait_for_world(3)
        yield job


def present(job: Job) -> list[Node]:
    """The nodes that are there, in the order of their ranks."""
    newest = generation(job)
    last = {one.rank: one.node for one in job.steps() if one.generation == newest}
    by_name = {node.name: node for node in job.nodes}
    return [by_name[last[rank]] for rank in sorted(last)]


def generation(job: Job) -> int:
    return max(one.generation for one in job.steps())


def went_on(job: Job, size: int, since: float, before: int) -> float:
    """Seconds from `since` until the slowest rank of a newer generation finished a step."""

    def next_steps() -> list[float]:
        first: dict[int, float] = {}
        newest = generation(job)
        for one in job.steps():
            if one.generation > before and one.world == size and one.generation == newest:
                first.setdefault(one.rank, one.time)
        return list(first.values()) if len(first) == size else []

    return max(wait_until(next_steps, f"{size} ranks going on", RECOVER_S)) - since


@pytest.mark.parametrize("action", ["kill", "segv", "stop", "exit 0"])
def test_ended_worker_is_replaced(job: Job, action: str) -> None:
    """A worker that ends in the middle is replaced."""
    before = generation(job)
    first = present(job)
    print(f"ADVERSARY worker {action}: {went_on(job, 3, job.tell(1, action), before):.2f} s")
    assert [node.name for node in present(job)] == [node.name for node in first], "every node keeps its rank"


def kill_zygote(node: Node) -> None:
    os.kill(node.zygote, signal.SIGKILL)


def kill_agent(node: Node) -> None:
    node.kill()


def kill_node(node: Node) -> None:
    node.signal_all(signal.SIGKILL)


def test_a_zygote_that_is_killed_is_replaced(job: Job) -> None:
    before, node, at = generation(job), present(job)[1], time.monotonic()
    kill_zygote(node)
    print(f"ADVERSARY zygote killed: {went_on(job, 3, at, before):.2f} s")
    assert node in present(job)
    assert "another one imports what the script does first" in node.output


@pytest.mark.parametrize(("rank", "kill"), [(0, kill_node), (2, kill_agent)])
def test_lost_node_is_replaced_by_another(job: Job, rank: int, kill: Callable[[Node], None]) -> None:
    """A node that is gone is gone on without and another joins."""
    before, node, processes, at = generation(job), present(job)[rank], present(job)[rank].everything(), time.monotonic()
    kill(node)
    print(f"ADVERSARY {kill.__name__} of rank {rank}: {went_on(job, 2, at, before):.2f} s")
    node.process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "its workers die with it", 30.0)
    before = generation(job)
    job.start()
    job.wait_for_world(3, after=time.monotonic())
    print(f"ADVERSARY join: the others paused for {pause(job, before):.2f} s")


def pause(job: Job, before: int) -> float:
    """The longest time between two steps of the job around the first generation after `before`."""
    times = sorted(one.time for one in job.steps() if one.generation >= before and one.rank == 0)
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def test_long_stopped_node_comes_back(job: Job) -> None:
    """A node that stopped for long comes back by itself."""
    before, node, at = generation(job), present(job)[1], time.monotonic()
    stop(job, node, everything=True)
    print(f"ADVERSARY node stopped: {went_on(job, 2, at, before):.2f} s")
    before, at = generation(job), time.monotonic()
    node.signal_all(signal.SIGCONT)
    print(f"ADVERSARY node continued: {went_on(job, 3, at, before):.2f} s")
    assert node in present(job)


def test_two_losses_and_one_in_recovery(job: Job) -> None:
    """Two at once and one more while the rest recovers."""
    before, at = generation(job), time.monotonic()
    job.tell(0, "kill")
    job.tell(2, "kill")
    print(f"ADVERSARY two workers at once: {went_on(job, 3, at, before):.2f} s")
    before, node = generation(job), present(job)[0]
    old = set(node.workers)
    at = job.tell(1, "kill")
    new = wait_until(lambda: set(node.workers) - old, "the next worker was forked")
    os.kill(new.pop(), signal.SIGKILL)
    print(f"ADVERSARY one during a recovery: {went_on(job, 3, at, before + 1):.2f} s")


def test_short_outage_stops_nobody(job: Job) -> None:
    """A store that is away for a while stops nobody."""
    before = generation(job)
    with contextlib.closing(sqlite3.connect(job.folder / "store.sqlite", timeout=20)) as locking:
        locking.execute("BEGIN EXCLUSIVE")
        job.wait_for_world(3, after=time.monotonic() + 6.5)  # longer than any lease lasts
        locking.rollback()
    job.wait_for_world(3, after=time.monotonic() + 6.5)  # everybody is back, and looked
    assert generation(job) == before


def test_all_but_one_die_and_others_come(job: Job) -> None:
    before, (_, *others), at = generation(job), present(job), time.monotonic()
    for node in others:
        node.signal_all(signal.SIGKILL)
    print(f"ADVERSARY all but one node: {went_on(job, 1, at, before):.2f} s")
    for _ in others:
        job.start()
    job.wait_for_world(3, after=time.monotonic())


def test_sigterm_leaves_and_the_job_ends(job: Job) -> None:
    """A node leaves on sigterm and the job ends for the rest."""
    before, node, at = generation(job), present(job)[1], time.monotonic()
    node.kill(signal.SIGTERM)
    print(f"ADVERSARY a node leaves: {went_on(job, 2, at, before):.2f} s")
    assert node.wait() == 143
    rest = present(job)
    job.end()
    assert [one.wait() for one in rest] == [0, 0]
    job.nothing_is_left()
    assert two_worlds(job.steps()) == []
    steps = sorted({one.step for one in job.steps()})
    assert steps == list(range(len(steps))), "every step was made by some world"


def test_killed_node_is_gone_before_lease(tmp_path: Path) -> None:
    """A process that is gone on a host that lives is known at once, whatever the lease."""
    with Job(tmp_path, options=("--nnodes", "1:3", "--lease-ttl", "600")) as job:
        for _ in range(3):
            job.start()
        job.wait_for_world(3)
        for size in (2, 1):
            before, at = generation(job), time.monotonic()
            present(job)[0].signal_all(signal.SIGKILL)
            print(f"ADVERSARY node killed: {went_on(job, size, at, before):.2f} s")
