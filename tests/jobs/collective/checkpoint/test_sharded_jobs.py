"""A job with a sharded model under `edl run`: nodes go and come, and the state is what it was, bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from edl.collective.checkpoint.memory.replica_slots import ReplicaFolder
from tests.jobs.collective.job import ROOT, Job, Node
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("train_sharded.py")


def lose(job: Job, node: Node) -> None:
    """The whole node, with its memory."""
    memory = job.host_of(node)
    node.signal_all(signal.SIGKILL)
    shutil.rmtree(memory)


def wait_for_replicas(job: Job, generation: int, nodes: list[Node]) -> None:
    """Until each node has the replica of another one's state, of this generation."""

    def there() -> bool:
        folders = [ReplicaFolder(job.host_of(node) / "replicas") for node in nodes]
        return all(any(one.header.generation == generation for one in folder.find_replicas()) for folder in folders)

    wait_until(there, f"replicas of generation {generation}")


def restored(job: Job, generation: int) -> int:
    """The step that a generation went on from, having had the very state of that step."""
    lines = [json.loads(line) for line in (job.folder / "states.jsonl").read_text().splitlines()]
    mine = next(line for line in lines if line["generation"] == generation and line["restored"])
    before = max(line["generation"] for line in lines if line["generation"] < generation)
    same_step = [line for line in lines if line["generation"] == before and line["step"] == mine["step"]]
    assert mine["bits"] in [line["bits"] for line in same_step]
    return int(mine["step"])


def last_step(job: Job, generation: int) -> int:
    return max(one.step for one in job.steps() if one.generation == generation)


def test_sharded_state_outlives_its_hosts(tmp_path: Path) -> None:
    options = ("--nnodes", "2:3", "--lease-ttl", "60")
    with Job(tmp_path, options, [str(SCRIPT), str(tmp_path)], environ={"PYTHONPATH": str(ROOT)}) as job:
        nodes = [job.start() for _ in range(3)]
        first = job.wait_for_world(3)[0].generation
        wait_for_replicas(job, first, nodes)

        at = time.monotonic()
        lose(job, nodes.pop(1))
        second = job.wait_for_world(2, after=at)[0].generation
        assert restored(job, second) >= 0
        wait_for_replicas(job, second, nodes)

        nodes.append(job.start())
        third = job.wait_for_world(3, after=time.monotonic())[0].generation
        assert restored(job, third) == last_step(job, second), "nobody was lost, so no step is"
        wait_for_replicas(job, third, nodes)

        leaving, at = nodes.pop(0), time.monotonic()
        leaving.kill(signal.SIGTERM)
        assert leaving.wait() == 128 + signal.SIGTERM
        fourth = job.wait_for_world(2, after=at)[0].generation
        assert restored(job, fourth) == last_step(job, third), "whoever leaves gives away what only it has"

        job.end()
        assert [node.wait() for node in nodes] == [0, 0]
        job.nothing_is_left()
