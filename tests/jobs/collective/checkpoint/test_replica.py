"""Sharded states of lost nodes, restored from the replicas on their peers, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edl.collective.checkpoint.memory.replica_slots import ReplicaFolder, kept_prefix
from edl.collective.checkpoint.memory.slots import find_slots
from edl.collective.job_records import JobState, Member, World
from edl.collective.replica.replicator import Replicator
from edl.collective.replica.schedule import ReplicaPace
from tests.jobs.collective.checkpoint.test_checkpoint import same
from tests.jobs.collective.checkpoint.world import run
from tests.jobs.collective.job import wait_until

pytestmark = pytest.mark.timeout(300)  # the first test waits for torch's import as well

NODES = [0, 1, 2]
SLOTS = [f"node-{node}/slots-0" for node in NODES]
REPLICAS = [f"node-{node}/replicas" for node in NODES]
REST: dict[str, Any] = {"slots": [SLOTS[0], SLOTS[2]], "replicas": [REPLICAS[0], REPLICAS[2]]}
"""When the second node is gone."""


PACE = ReplicaPace(interval_s=1.0)


class Nodes:
    """Three nodes' folders, and what their agents do for replicas."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.agents: dict[int, Replicator] = {}
        for node in NODES:
            (folder / f"node-{node}").mkdir()
            self.agents[node] = Replicator(
                f"n{node}", folder / REPLICAS[node], [folder / SLOTS[node]], lambda: b"secret", self.said.append, PACE
            )

    def world(self, generation: int) -> World:
        """Of all whose agents are there."""
        order = sorted(self.agents)
        members = [
            Member(f"n{node}", "127.0.0.1", 0, 1, rank, self.agents[node].port) for rank, node in enumerate(order)
        ]
        return World(generation, JobState.RUNNING, tuple(members))

    def form(self, generation: int) -> None:
        """Begin a world, and wait until every agent wants its first state."""
        for agent in self.agents.values():
            agent.change_world(self.world(generation))
        folders = [ReplicaFolder(self.folder / REPLICAS[node]) for node in self.agents]
        wait_until(lambda: all(folder.requested_version() is not None for folder in folders), "a state is wanted", 60.0)

    def replicated(self, step: int, order: list[int]) -> None:
        """Wait until each one's state is at the next one's, and it knows that."""
        for node, peer in zip(order, order[1:] + order[:1], strict=True):
            prefix = ReplicaFolder(self.folder / REPLICAS[peer]).slot_prefix(f"n{node}", 0)
            wait_until(partial(has_step, prefix, step), f"the state of n{node}", 60.0)
            wait_until(partial(has_sent, self.agents[node], step), f"the answer to n{node}", 60.0)

    def lose(self, node: int) -> None:
        """The whole node, with its memory."""
        self.agents.pop(node).close()
        shutil.rmtree(self.folder / f"node-{node}")


def has_step(prefix: Path, step: int) -> bool:
    return any(one.header.step == step for one in find_slots(prefix))


def has_sent(agent: Replicator, step: int) -> bool:
    version, noticed_us = agent._noticed
    return version[1] == step and agent.replicated_us == noticed_us


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for agent in made.agents.values():
        agent.close()


def test_lost_shards_come_from_the_peer(tmp_path: Path, nodes: Nodes) -> None:
    """In a world of two, and when the other one's place has been taken, in a world of three."""
    nodes.form(0)
    saved = run(3, "resume", tmp_path, kind="fsdp", steps=3, slots=SLOTS, replicas=REPLICAS)
    nodes.replicated(2, [0, 1, 2])
    nodes.lose(1)
    (tmp_path / "node-1").mkdir()
    shutil.copytree(tmp_path, tmp_path / "again", ignore=lambda *_: ["again"])
    two = run(2, "restore", tmp_path, kind="fsdp", generation=1, **REST)
    for after in two:
        assert (after["step"], after["changes"]) == (2, [[3, 2, 2]])
        same(saved[0]["states"]["2"], after, without=("buffers",))
    three = run(3, "restore", tmp_path / "again", kind="fsdp", generation=1, slots=SLOTS, replicas=REPLICAS)
    for before, after in zip(saved, three, strict=True):
        assert (after["step"], after["changes"]) == (2, [])
        same(before["states"]["2"], after)
        assert after["next"] == before["next"], "what belongs to one rank alone comes back as well"
    assert nodes.said == []


def test_restored_replica_is_replicated(tmp_path: Path, nodes: Nodes) -> None:
    """Two nodes go one after the other, each after the rest had time to replicate."""
    nodes.form(0)
    run(3, "resume", tmp_path, kind="fsdp", steps=5, slots=SLOTS, replicas=REPLICAS)
    nodes.replicated(2, [0, 1, 2])
    nodes.lose(1)
    nodes.form(1)
    saved = run(2, "resume", tmp_path, kind="fsdp", generation=1, steps=4, **REST)
    assert [one["first"] for one in saved] == [3, 3], "what was trained after the third step is lost"
    kept = find_slots(kept_prefix(tmp_path / SLOTS[0]))
    assert [one.header.version for one in kept] == [(1, 5, 2), (0, 2, 3)]
    nodes.replicated(5, [0, 2])
    nodes.lose(2)
    (alone,) = run(1, "restore", tmp_path, kind="fsdp", generation=2, slots=SLOTS[:1], replicas=REPLICAS[:1])
    assert (alone["step"], alone["changes"]) == (5, [[2, 1, 5]])
    same(saved[0]["states"]["5"], alone, without=("buffers",))


def test_newer_storage_beats_replicas(tmp_path: Path, nodes: Nodes) -> None:
    """Storage is used where it is newer than the replicas."""
    nodes.form(0)
    run(3, "resume", tmp_path, kind="fsdp", steps=3, slots=SLOTS, replicas=REPLICAS)
    nodes.replicated(2, [0, 1, 2])
    saved = run(1, "save", tmp_path, kind="fsdp", slots=["elsewhere"], step=9, storage=str(tmp_path / "stored"))
    nodes.lose(1)
    after = run(2, "restore", tmp_path, kind="fsdp", generation=1, storage=str(tmp_path / "stored"), **REST)
    assert [one["step"] for one in after] == [9, 9]
    same(saved[0], after[0], without=("buffers",))
