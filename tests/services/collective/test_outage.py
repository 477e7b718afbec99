"""Consul and etcd that are killed under a job, and come back: soon, and after its workers were stopped."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.jobs.collective.job import IMPATIENT, ROOT, TRAIN_STATE, Job
from tests.plugins_consul import ConsulAgent
from tests.plugins_etcd import EtcdServer
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


def test_short_outage_stops_nobody(tmp_path: Path, etcd_server: EtcdServer) -> None:
    """And an error of the script on one node ends both."""
    with Job(tmp_path, options=("--nnodes", "2", "--lease-ttl", "8"), store=etcd_server.url) as job:
        nodes = [job.start(), job.start()]
        job.wait_for_world(2)
        before = job.steps()[-1].generation
        etcd_server.kill()
        wait_until(lambda: all("does not answer" in node.output for node in nodes), "the outage is noticed")
        etcd_server.start()
        wait_until(lambda: all("answers again" in node.output for node in nodes), "the end of it is noticed")
        last = job.wait_for_world(2, after=time.monotonic() + 10.0)  # longer than any lease lasts
        assert {one.generation for one in last} == {before}, "training went on as it was"
        job.tell(1, "raise")
        assert [node.wait() for node in nodes] == [1, 1]
        assert all("LookupError: the user's own mistake" in node.output for node in nodes)
        assert not any(f"generation {before + 1}" in node.output for node in nodes), "not restarted"
        job.nothing_is_left()


def test_long_outage_restarts_workers(tmp_path: Path, consul_agent: ConsulAgent) -> None:
    """Workers stop when the store is away for long, and begin anew together."""
    command, environ = [str(TRAIN_STATE), str(tmp_path)], {"PYTHONPATH": str(ROOT)}
    options, program = ("--nnodes", "2", "--lease-ttl", "3"), (sys.executable, str(IMPATIENT), "takeover=5")
    with Job(tmp_path, options, command, consul_agent.url, environ, program) as job:
        nodes = [job.start(), job.start()]
        before = job.wait_for_world(2)[0].generation
        workers = [pid for node in nodes for pid in node.workers]
        consul_agent.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the workers are stopped")
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
