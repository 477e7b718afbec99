"""Consul and etcd that are killed under a job, and come back: soon, and after its workers were stopped."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.jobs.collective.job import TRAIN_STATE, Job
from tests.plugins_consul import ConsulAgent
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


def test_long_outage_restarts_workers(tmp_path: Path, consul_agent: ConsulAgent) -> None:
    """Workers stop when the store is away for long, and begin anew together."""
    options = ("--nnodes", "2", "--lease-ttl", "3", "--rdzv-conf", "takeover_timeout=5")
    with Job(tmp_path, options, [str(TRAIN_STATE), str(tmp_path)], consul_agent.url) as job:
        nodes = [job.start(), job.start()]
        before = job.wait_for_world(2)[0].generation
        workers = [pid for node in nodes for pid in node.workers]
        consul_agent.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the workers are stopped")
        consul_agent.start()
        first = job.wait_for_world(2, after=time.monotonic())
        assert {one.generation for one in first} == {before + 1}, "together, and once"
        assert any("stopped while the store did not answer" in node.output for node in nodes)
        # A rank may be stopped between a step that the other saved and the line in its log.
        made = sorted(step for step, _ in {(one.step, one.generation) for one in job.steps()})
        assert made == list(range(len(made))), "from memory, without a step lost or made twice"
        job.end()
        assert [node.wait() for node in nodes] == [0, 0]
        job.nothing_is_left()
