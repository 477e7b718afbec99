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
from tests.integration.collective.job import IMPATIENT, ROOT, TRAIN_STATE, Job, wait_until
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
        assert LIMIT_S + 1.0 < max(one.time for one in job.steps()) - at < LIMIT_S + 7.0
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
