"""Sharded states of lost nodes, restored from the replicas on their peers, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.collective.checkpoint.memory.replica_slots import ReplicaFolder
from edl.collective.checkpoint.memory.slots import find_slots
from edl.collective.job_records import JobState, Member, World
from edl.collective.replica.replicator import Replicator
from edl.collective.replica.schedule import ReplicaPace
from tests.jobs.collective.checkpoint.test_checkpoint import same
from tests.jobs.collective.checkpoint.world import run
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)  # the first test waits for torch's import as well

SLOTS = [f"node-{node}/slots-0" for node in range(3)]
REPLICAS = [f"node-{node}/replicas" for node in range(3)]
REST: dict[str, Any] = {"slots": [SLOTS[0], SLOTS[2]], "replicas": [REPLICAS[0], REPLICAS[2]]}
"""When the second node is gone."""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Replicator]]:
    """What three nodes' agents do for replicas, in a world of theirs; each wants its first state."""
    agents = []
    for node in range(3):
        (tmp_path / f"node-{node}").mkdir()
        folders, pace = (tmp_path / REPLICAS[node], [tmp_path / SLOTS[node]]), ReplicaPace(interval_s=1.0)
        agents.append(Replicator(f"n{node}", *folders, lambda: b"secret", pytest.fail, pace))
    members = [Member(f"n{node}", "127.0.0.1", 0, 1, node, agent.port) for node, agent in enumerate(agents)]
    for agent in agents:
        agent.change_world(World(0, JobState.RUNNING, tuple(members)))
    folders = [ReplicaFolder(tmp_path / folder) for folder in REPLICAS]
    wait_until(lambda: all(folder.requested_version() is not None for folder in folders), "states are wanted")
    yield agents
    for agent in agents:
        agent.close()


def test_lost_shards_come_from_the_peer(tmp_path: Path, agents: list[Replicator]) -> None:
    """In a world of two; in a world of three, when its place has been taken; and from storage, where that is newer."""
    saved = run(3, "resume", tmp_path, kind="fsdp", steps=3, slots=SLOTS, replicas=REPLICAS)
    for node, peer in ((0, 1), (1, 2), (2, 0)):
        prefix = ReplicaFolder(tmp_path / REPLICAS[peer]).slot_prefix(f"n{node}", 0)
        wait_until(lambda at=prefix: any(one.header.step == 2 for one in find_slots(at)), f"the state of n{node}")
    stored = run(1, "save", tmp_path, kind="fsdp", slots=["elsewhere"], step=9, storage=str(tmp_path / "stored"))
    agents.pop(1).close()
    shutil.rmtree(tmp_path / "node-1")  # the whole node, with its memory
    (tmp_path / "node-1").mkdir()
    for name in ("three", "storage"):
        shutil.copytree(tmp_path, tmp_path / name, ignore=lambda *_: ["three", "storage"])
    for after in run(2, "restore", tmp_path, kind="fsdp", generation=1, **REST):
        assert (after["step"], after["changes"]) == (2, [[3, 2, 2]])
        same(saved[0]["states"]["2"], after, without=("buffers",))
    three = run(3, "restore", tmp_path / "three", kind="fsdp", generation=1, slots=SLOTS, replicas=REPLICAS)
    for before, after in zip(saved, three, strict=True):
        assert (after["step"], after["changes"]) == (2, [])
        same(before["states"]["2"], after)
        assert after["next"] == before["next"], "what belongs to one rank alone comes back as well"
    storage = str(tmp_path / "stored")
    newer = run(2, "restore", tmp_path / "storage", kind="fsdp", generation=1, storage=storage, **REST)
    assert [one["step"] for one in newer] == [9, 9]
    same(stored[0], newer[0], without=("buffers",))
