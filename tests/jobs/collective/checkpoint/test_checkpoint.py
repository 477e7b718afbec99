"""A world dies, and another goes on from its memory, from storage, or from replicas on its peers, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.collective.checkpoint.memory.replica_slots import ReplicaFolder
from edl.collective.checkpoint.memory.slots import find_slots
from edl.collective.checkpoint.storage.writer import CheckpointWriter
from edl.collective.job_records import JobState, Member, World
from edl.collective.replica.replicator import ReplicationSchedule, Replicator
from tests.fast.collective.checkpoint.counted import reads
from tests.jobs.collective.checkpoint.world import run
from tests.jobs.collective.job import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)  # the first test waits for torch's import as well
SAME = ("model", "buffers", "optimizer", "rest")


def same(one: dict[str, Any], other: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    for key in SAME:
        if key not in without:
            assert one[key] == other[key], key


def test_a_world_goes_on_from_its_own_memory(tmp_path: Path) -> None:
    """Nothing is restored where there is nothing."""
    (tmp_path / "empty").mkdir()
    assert [one["step"] for one in run(2, "restore", tmp_path / "empty", kind="ddp")] == [-1] * 2
    saved = run(2, "save", tmp_path, kind="ddp")
    restored = run(2, "restore", tmp_path, kind="ddp", generation=1)
    for before, after in zip(saved, restored, strict=True):
        assert (after["step"], after["changes"]) == (4, [])
        same(before, after)
        assert after["next"] == before["next"], "each rank's random numbers go on"


def test_killed_at_any_instant_goes_on(tmp_path: Path) -> None:
    """Each child that is killed while it saves leaves a whole state, of one of its last two steps."""
    command = [sys.executable, "-m", "tests.jobs.collective.checkpoint.kills", str(tmp_path), "10", "300"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rounds) == 10
    for finished, restored in rounds:
        assert finished <= restored <= finished + 1


def test_ranks_without_state_receive_it(tmp_path: Path) -> None:
    """One of two dies with its memory, and two new ones join."""
    saved = run(2, "save", tmp_path, kind="ddp")
    slots = ["new-a", "slots-1", "new-b"]
    restored = run(3, "restore", tmp_path, kind="ddp", slots=slots, generation=1)
    for after in restored:
        assert (after["step"], after["changes"]) == (4, [[2, 3, 4]])
        same(saved[1], after)
    again = run(3, "restore", tmp_path, kind="ddp", slots=slots, generation=2)
    assert [one["step"] for one in again] == [5, 5, 5]


def test_shards_come_back_to_other_ranks(tmp_path: Path) -> None:
    """To ranks that changed places, and put together for a world of another size; not if a part of them is lost."""
    saved = run(2, "save", tmp_path, kind="fsdp")
    for name in ("three", "part"):
        shutil.copytree(tmp_path, tmp_path / name, ignore=lambda *_: ["three", "part"])
    restored = run(2, "restore", tmp_path, kind="fsdp", slots=["slots-1", "slots-0"], generation=1)
    for before, after in zip(saved, restored, strict=True):
        assert after["step"] == 4
        same(before, after)
        assert after["next"] == before["next"]
    for after in run(3, "restore", tmp_path / "three", kind="fsdp", generation=1):
        assert (after["step"], after["changes"]) == (4, [[2, 3, 4]])
        same(saved[0], after, without=("buffers",))
    for path in (tmp_path / "part").glob("slots-1.*"):
        path.unlink()
    assert [one["step"] for one in run(2, "restore", tmp_path / "part", kind="fsdp", generation=1)] == [-1, -1]


def test_dtensors_in_fields_come_back(tmp_path: Path) -> None:
    """In a dict, nested, in an object: made in the first step, so that a restarted script does not have them yet."""
    saved = run(2, "averages", tmp_path, step=4)
    shutil.copytree(tmp_path, tmp_path / "three", ignore=lambda *_: ["three"])
    restored = run(2, "averages", tmp_path, step=4, generation=1)
    assert [one["first"] for one in (*saved, *restored)] == [-1, -1, 4, 4]
    for after in (*restored, *run(3, "averages", tmp_path / "three", step=4, generation=1)):
        assert (after["first"], after["bits"], after["placed"]) == (4, saved[0]["bits"], saved[0]["placed"])


def test_an_unknown_mesh_is_refused(tmp_path: Path) -> None:
    for said in run(2, "averages", tmp_path, step=4, lost_mesh=True):
        assert "averages.shadow.0 could be saved, but not restored" in said["refused"]
    assert not [path for path in tmp_path.glob("slots-*") if path.stat().st_size > 4096]


def test_one_replica_group_is_enough(tmp_path: Path) -> None:
    """HSDP over two nodes of two workers: one node's memory is lost with it, the other one has all shards."""
    saved = run(4, "save", tmp_path, kind="hsdp")
    slots = ["new-0", "new-1", "slots-3", "slots-2"]
    for after in run(4, "restore", tmp_path, kind="hsdp", slots=slots, generation=1):
        assert after["step"] == 4
        same(saved[0], after, without=("buffers",))


def test_other_worlds_restore_it(tmp_path: Path) -> None:
    """Three ranks, one process without FSDP, and DCP alone in two; the ranks' own memory is lost."""
    folder = tmp_path / "four"
    folder.mkdir()
    saved = run(4, "save", folder, kind="fsdp")[0]
    slots, url = [folder / f"slots-{rank}" for rank in range(4)], folder / "c"
    node, other = (CheckpointWriter(str(url), run=lambda: "0" * 16) for _ in range(2))
    first, second = node.write_newest(slots[:2]), other.write_newest(slots[2:])
    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == (False, True)
    for after in run(3, "restore", tmp_path, kind="fsdp", storage=str(url)):
        assert (after["step"], after["changes"]) == (4, [[4, 3, 4]])
        same(saved, after, without=("buffers",))
    (after,) = run(1, "restore", tmp_path, kind="plain", storage=str(url), slots=["alone"])
    same(saved, after, without=("buffers",))
    (checkpoint,) = url.iterdir()
    for after in run(2, "dcp_load", tmp_path, kind="fsdp", checkpoint=str(checkpoint)):
        for key in ("model", "optimizer"):
            assert after[key] == saved[key], key


def test_ranks_share_out_what_all_need(tmp_path: Path) -> None:
    """Each byte of a replicated state is read by one of three ranks, which gives it to the others."""
    folder, url = tmp_path / "old", tmp_path / "c"
    folder.mkdir()
    saved = run(2, "save", folder, kind="ddp")
    CheckpointWriter(str(url), run=lambda: "0" * 16).write_newest([folder / "slots-0", folder / "slots-1"])
    for after in run(3, "restore", tmp_path, kind="ddp", storage=f"counted://{url}"):
        assert after["step"] == 4
        same(saved[0], after, without=("buffers",))
    counted = reads(tmp_path)
    assert sum(counted) <= next(url.glob("*/__0_0.distcp")).stat().st_size
    assert len(counted) <= 2


def test_ranks_agree_on_run_without_agent(tmp_path: Path) -> None:
    """Under plain torchrun all generations are 0: a world's pieces must find each other, and no other world's."""
    url = tmp_path / "c"
    for attempt in range(2):
        slots = [f"slots-{attempt}-{rank}" for rank in range(2)]
        run(2, "save", tmp_path, kind="fsdp", storage=str(url), slots=slots)
        stored = {path.name: {one.name for one in path.glob("piece-*")} for path in url.iterdir()}
        assert len(stored) == attempt + 1
        for name, pieces in stored.items():
            assert name.startswith("step-4.g-0.r-")
            assert (url / name / "manifest.json").exists()
            assert pieces == {"piece-0.json", "piece-1.json"}


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
        folders, schedule = (tmp_path / REPLICAS[node], [tmp_path / SLOTS[node]]), ReplicationSchedule(interval_s=1.0)
        agents.append(Replicator(f"n{node}", *folders, lambda: b"secret", pytest.fail, schedule))
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
