"""A store that is away for longer than a job may go on without it: workers stop, and start again when it is back."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from edl.collective.worker_status import WorkerStatusPage
from tests.jobs.collective.job import IMPATIENT, ROOT, TRAIN_STATE, Job, wait_until
from tests.plugins_consul import ConsulAgent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIMIT_S = 4.0
"""So long do workers go on without the store, after the end of their agent's lease."""
PROGRAM = (sys.executable, str(IMPATIENT), f"takeover={LIMIT_S / 0.8}")


def test_stopped_agent_looks_before_going_on(tmp_path: Path) -> None:
    """A stopped agent that goes on lets its workers go on only when it has looked."""
    command, environ = [str(TRAIN_STATE), str(tmp_path)], {"PYTHONPATH": str(ROOT)}
    with Job(tmp_path, ("--nnodes", "1"), command, environ=environ, program=PROGRAM) as job:
        node = job.start()
        job.wait_for_world(1)
        (path,) = job.shared_memory.glob("*/board-0")
        page = WorkerStatusPage.open(path)
        with contextlib.closing(sqlite3.connect(job.folder / "store.sqlite", timeout=20)) as locking:
            locking.execute("BEGIN EXCLUSIVE")
            (worker,) = node.workers
            node.kill(signal.SIGSTOP)
            wait_until(lambda: page.agent_silence_s > LIMIT_S + 0.5, "others may have taken the job over")
            last = job.steps()[-1].step
            node.kill(signal.SIGCONT)
            wait_until(lambda: "the workers are stopped until the store is back" in node.output, "it stops its workers")
            wait_until(lambda: not Path(f"/proc/{worker}").exists(), "its worker is gone")
            assert page.agent_silence_s > LIMIT_S, "no sign of life before that"
            assert job.steps()[-1].step == last, "and no step"
            locking.rollback()
        page.close()
        job.wait_for_world(1, after=time.monotonic())
        assert "stopped while the store was away" in node.output
        assert [one.step for one in job.steps()] == list(range(len(job.steps()))), "it goes on from memory"
        job.end()
        assert node.wait() == 0
        job.nothing_is_left()


def test_job_without_a_name_goes_on(tmp_path: Path) -> None:
    """No other node can take it over, so its workers go on for as long as the store is silent."""
    command, environ = [str(TRAIN_STATE), str(tmp_path)], {"PYTHONPATH": str(ROOT)}
    with Job(tmp_path, ("--nnodes", "1"), command, environ=environ, program=PROGRAM) as job:
        node = job.start("--rdzv-id", "none")
        job.wait_for_world(1)
        with contextlib.closing(sqlite3.connect(job.folder / "store.sqlite", timeout=20)) as locking:
            locking.execute("BEGIN EXCLUSIVE")
            wait_until(lambda: "the store does not answer" in node.output, "the agent misses the store")
            silent = time.monotonic()
            job.wait_for_world(1, after=silent + 2 * LIMIT_S)
            locking.rollback()
        wait_until(lambda: "the store answers again" in node.output, "the agent has found it again")
        job.wait_for_world(1, after=time.monotonic())
        assert {each.generation for each in job.steps()} == {0}, node.output
        assert "stopped" not in node.output
        with contextlib.closing(sqlite3.connect(job.folder / "store.sqlite", timeout=20)) as locking:
            locking.execute("BEGIN EXCLUSIVE")
            job.end()
            assert node.wait() == 0, "nor does its end wait for the store"
        wait_until(lambda: not job.processes(), "the job's processes have ended")


@pytest.mark.parametrize("ends", ["worker", "agent"])
def test_job_without_a_name_ends(tmp_path: Path, ends: str) -> None:
    """What does not train, or was asked to leave, waits no longer for a silent store than a job with a name does."""
    command, environ = [str(TRAIN_STATE), str(tmp_path)], {"PYTHONPATH": str(ROOT)}
    with Job(tmp_path, ("--nnodes", "1"), command, environ=environ, program=PROGRAM) as job:
        node = job.start("--rdzv-id", "none", "--rdzv-conf", "join_timeout=3")
        job.wait_for_world(1)
        with contextlib.closing(sqlite3.connect(job.folder / "store.sqlite", timeout=20)) as locking:
            locking.execute("BEGIN EXCLUSIVE")
            wait_until(lambda: "the store does not answer" in node.output, "the agent misses the store")
            if ends == "worker":
                os.kill(node.workers[0], signal.SIGKILL)
            else:
                node.kill(signal.SIGTERM)
            assert node.wait() == (75 if ends == "worker" else 128 + signal.SIGTERM), node.output
        wait_until(lambda: not job.processes(), "the job's processes have ended")


@pytest.mark.consul
def test_long_outage_restarts_workers(tmp_path: Path, consul_agent: ConsulAgent) -> None:
    """Workers stop when the store is away for long and begin anew."""
    command, environ = [str(TRAIN_STATE), str(tmp_path)], {"PYTHONPATH": str(ROOT)}
    options = ("--nnodes", "2", "--lease-ttl", "3")
    with Job(tmp_path, options, command, consul_agent.url, environ, PROGRAM) as job:
        nodes = [job.start(), job.start()]
        before = job.wait_for_world(2)[0].generation
        workers = [pid for node in nodes for pid in node.workers]
        consul_agent.kill()
        at = time.monotonic()
        wait_until(lambda: not any(alive(pid) for pid in workers), "the workers are stopped")
        # An agent that a busy machine stalls renews its lease late, so that it ends sooner.
        assert LIMIT_S - 1.0 < max(one.time for one in job.steps()) - at < LIMIT_S + 7.0
        consul_agent.start()
        first = job.wait_for_world(2, after=time.monotonic())
        assert {one.generation for one in first} == {before + 1}, "together, and once"
        assert any("stopped while the store was away" in node.output for node in nodes)
        # A rank may be stopped between a step that the other saved and the line in its log.
        made = sorted(step for step, _ in {(one.step, one.generation) for one in job.steps()})
        assert made == list(range(len(made))), "from memory, without a step lost or made twice"
        job.end()
        assert [node.wait() for node in nodes] == [0, 0]
        job.nothing_is_left()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
