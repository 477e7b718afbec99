"""A store that is away for longer than a job may go on without it: workers stop, and start again when it is back."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.worker_status import WorkerStatusPage
from tests.jobs.collective.job import TRAIN_STATE, Job
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

LIMIT_S = 4.0
"""So long do workers go on without the store, after the end of their agent's lease."""
OPTIONS = ("--nnodes", "1", "--rdzv-conf", f"takeover_timeout={LIMIT_S / 0.8}")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, OPTIONS, [str(TRAIN_STATE), str(tmp_path)]) as job:
        yield job


@contextlib.contextmanager
def silent(job: Job) -> Iterator[None]:
    """The job's store does not answer."""
    with contextlib.closing(sqlite3.connect(job.folder / "store.sqlite", timeout=20)) as locking:
        locking.execute("BEGIN EXCLUSIVE")
        yield
        locking.rollback()


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
        wait_until(lambda: "the workers are stopped until the store is back" in node.output, "it stops its workers")
        wait_until(lambda: not Path(f"/proc/{worker}").exists(), "its worker is gone")
        assert page.agent_silence_s > LIMIT_S, "no sign of life before that"
        assert job.steps()[-1].step == last, "and no step"
    page.close()
    job.wait_for_world(1, after=time.monotonic())
    assert "stopped while the store was away" in node.output
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
