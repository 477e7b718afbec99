"""How a job ends before its script does: by an error on one node, by signals; and a store that was killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.collective.job import TRAIN, Job, wait_until
from tests.plugins_consul import ConsulAgent

pytestmark = pytest.mark.slow


@pytest.mark.consul
def test_an_error_on_one_node_ends_all_with_its_traceback(tmp_path: Path, consul_agent: ConsulAgent) -> None:
    with Job(tmp_path, options=("--nnodes", "2"), store=consul_agent.url) as job:
        nodes = [job.start(), job.start()]
        job.wait_for_world(2)
        before = job.steps()[-1].generation
        consul_agent.kill()
        wait_until(lambda: all("does not answer" in node.output for node in nodes), "the outage is noticed")
        consul_agent.start()
        wait_until(lambda: all("answers again" in node.output for node in nodes), "the end of it is noticed")
        last = job.wait_for_world(2, after=time.monotonic() + 4.0)
        assert {one.generation for one in last} == {before}, "training went on as it was"

        job.tell(1, "raise")
        assert [node.wait() for node in nodes] == [1, 1]
        for node in nodes:
            assert "LookupError: the user's own mistake" in node.output
            assert 'train.py", line' in node.output
            assert f"generation {before + 1}" not in node.output, "not restarted"
        job.nothing_is_left()


def test_errors_are_forgiven_so_often_in_the_whole_job(tmp_path: Path) -> None:
    with Job(tmp_path, options=("--nnodes", "2", "--max-restarts", "1")) as job:
        nodes = [job.start(), job.start()]
        job.wait_for_world(2)
        at = job.tell(0, "raise")
        job.wait_for_world(2, after=at + 1.0)
        job.tell(1, "raise")  # on the other node, which has forgiven nothing itself
        assert [node.wait() for node in nodes] == [1, 1]
        assert all("LookupError: the user's own mistake" in node.output for node in nodes)
        job.nothing_is_left()


def test_ctrl_c_ends_it_cleanly_and_the_same_job_goes_on_later(tmp_path: Path) -> None:
    with Job(tmp_path, options=("--nnodes", "1", "--nproc-per-node", "2")) as job:
        node = job.start()
        job.wait_for_world(2)
        os.killpg(node.pid, signal.SIGINT)
        assert node.wait() == 130
        assert "Traceback" not in node.output
        job.nothing_is_left()

        # Once more, and asked twice in a moment, while the workers cannot even be asked.
        node = job.start(command=[str(TRAIN), str(tmp_path)])
        at = time.monotonic()
        job.wait_for_world(2, after=at)
        for pid in node.workers:
            os.kill(pid, signal.SIGSTOP)
        node.kill(signal.SIGTERM)
        node.kill(signal.SIGTERM)
        assert node.wait() == 143
        job.nothing_is_left()
        steps = sorted({one.step for one in job.steps()})
        assert steps == list(range(len(steps)))
