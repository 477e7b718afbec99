"""States that outlive the nodes of a job: stored with `edl run --checkpoint`, or sharded, on those that stay."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from edl.collective.checkpoint.memory.replica_slots import ReplicaFolder
from tests.jobs.collective.job import ROOT, TRAIN_STATE, Job, Node
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


def test_unstored_last_state_is_stored_later(tmp_path: Path) -> None:
    """The storage is gone when the job is done. Its agent is killed, one leaves without it, and one stores it."""
    url, folder = tmp_path / "checkpoints", tmp_path / "job"
    options = ("--nnodes", "1", "--checkpoint", str(url), "--checkpoint-interval", "1000")
    with Job(folder, options=options, command=[str(TRAIN_STATE), str(folder)]) as job:
        node = job.start()
        job.wait_for_world(1)
        shutil.rmtree(url)
        url.write_text("no folder any more")
        job.end()
        wait_until(lambda: list(job.shared_memory.glob("*/unstored")), "the job is done, and its state not stored")
        assert "left incomplete" not in node.output, "the agent goes on trying"
        node.signal_all(signal.SIGKILL)
        node.wait()

        node = job.start()
        wait_until(lambda: "storing is retried" in node.output, "the storage refuses")
        node.process.terminate()
        wait_until(lambda: "asked again, this node leaves without storing it" in node.output, "it goes on trying")
        node.process.terminate()
        assert node.wait() == 74
        assert "the job is done, but its last state is not stored: exit code 74" in node.output
        job.nothing_is_left(state=True)

        url.unlink()
        code, output = job.run()
        assert code == 0, output
        assert f"stored the state after step {max(one.step for one in job.steps())} at {url}" in output
        assert len(list(url.glob("step-*/manifest.json"))) == 1
        job.nothing_is_left()
        assert "stored the state" not in job.run()[1]

    last, folder = newest_stored(url), tmp_path / "next"
    with Job(folder, options=options, command=[str(TRAIN_STATE), str(folder)]) as job:
        node = job.start()
        assert job.wait_for_world(1)[0].step == last + 1, "another job at the same place goes on from there"
        job.end()
        assert node.wait() == 0
    assert newest_stored(url) > last
    assert len({path.name.partition(".r-")[2] for path in url.iterdir()}) == 2, "as a run of its own"


def test_older_memory_gives_way_to_storage(tmp_path: Path) -> None:
    """An agent dies, the others go on and store, and are lost with their hosts: beside what the first one left."""
    folder, url = tmp_path / "job", tmp_path / "checkpoints"
    options = ("--nnodes", "1:2", "--checkpoint", str(url), "--checkpoint-interval", "0.5")
    with Job(folder, options=options, command=[str(TRAIN_STATE), str(folder)]) as job:
        first, second = job.start(), job.start()
        job.wait_for_world(2)
        lost = job.host_of(first)
        second.kill()
        second.wait()
        old = max(step.step for step in job.steps() if step.world == 2)
        wait_until(lambda: newest_stored(url) > old + 20, "the one that goes on stores")
        first.signal_all(signal.SIGKILL)
        first.wait()
        shutil.rmtree(lost)  # its host is gone
        stored, begun = newest_stored(url), time.monotonic()
        third = job.start()
        again = job.wait_for_world(1, after=begun)[0]
        assert "left its workers' state in memory here" in third.output, third.output
        assert again.step == stored + 1, f"memory ended near step {old}, storage has step {stored}"


def newest_stored(url: Path) -> int:
    """The last step with a manifest."""
    found = [path.parent.name for path in url.glob("step-*/manifest.json")]
    return max((int(name.partition("-")[2].partition(".")[0]) for name in found), default=-1)


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
