"""Replicas without workers: what is kept and sent when, and agents' threads that do so."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.memory.replica_slots import (
    NO_VERSION,
    ReplicaFolder,
    ReplicaSlots,
    kept_prefix,
)
from edl.collective.checkpoint.memory.restore_plan import choose_state
from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair, StateVersion, find_slots
from edl.collective.checkpoint.state.state import State
from edl.collective.job_records import JobState, Member, World
from edl.collective.replica.replicator import JobSecret, Replicator, replica_peer
from edl.collective.replica.schedule import ReplicaAction, ReplicaPace, ReplicationSchedule
from edl.discovery import open_store
from tests.fast.collective.replica.replicas import SECRET, is_whole, keep, save, steps
from tests.waiting import wait_until

headers = st.builds(
    SlotHeader, st.integers(0, 2), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2), sharded=st.just(True)
).filter(lambda header: header.rank < header.world)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.lists(headers, max_size=4), st.lists(headers, max_size=4)), min_size=1, max_size=4))
def test_owners_states_come_first(
    offers: list[tuple[list[SlotHeader], list[SlotHeader]]],
) -> None:
    own, replicas = [one for one, _ in offers], [one for _, one in offers]
    choice = choose_state(own, replicas)
    everything = [header for row in (*own, *replicas) for header in row]
    whole = {
        state
        for state in (header.version for header in everything)
        if {header.rank for header in everything if header.version == state} == set(range(state[2]))
    }
    assert (choice is None) == (not whole)
    if choice is None:
        return
    assert (choice.generation, choice.step, choice.world) == max(whole)
    owned = {header.rank for row in own for header in row if header.version == max(whole)}
    assert choice.from_replicas == (owned != set(range(choice.world)))
    for part, holder in enumerate(choice.holders):
        givers = own if part in owned else replicas
        assert any(choice.matches_slot(header, part) for header in givers[holder])
    for source, part in zip(choice.sources, choice.parts, strict=bool(choice.sources)):
        givers = own if part in owned else replicas
        assert any(choice.matches_slot(header, part) for header in givers[source])


def test_workers_keep_wanted_states(tmp_path: Path) -> None:
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    replica_slots = ReplicaSlots(tmp_path / "slots-0", folder)
    assert not replica_slots.is_state_requested()
    folder.request_newer_than(NO_VERSION)
    assert replica_slots.is_state_requested()
    keep(replica_slots.slots.prefix, 3)
    assert not replica_slots.is_state_requested()
    folder.request_newer_than((0, 3, 2))
    assert replica_slots.is_state_requested()
    keep(replica_slots.slots.prefix, 6)
    replica_slots.drop_newer_than((0, 5, 2))
    assert replica_slots.is_state_requested(), "step 6 was given up"
    assert steps(replica_slots.slots.prefix) == [3]
    folder.request_newer_than(None)
    assert not replica_slots.is_state_requested()
    replica_slots.close()


def memory_of(folder: Path) -> int:
    """The bytes that lie in memory, however many names they have."""
    return sum({path.stat().st_ino: path.stat().st_size for path in folder.glob("slots-0*")}.values())


@pytest.mark.parametrize(("between", "states"), [(0, 2), (3, 4)], ids=["each", "every fourth"])
def test_kept_states_share_memory(tmp_path: Path, between: int, states: int) -> None:
    """Where each save is kept for a replica, two slots are enough; elsewhere it takes two more at most."""
    replica_slots, slots = ReplicaSlots(tmp_path / "slots-0", ReplicaFolder(tmp_path)), SlotPair(tmp_path / "slots-0")
    most, inodes = 0, set()
    for step in range(24):
        kept = step % (between + 1) == 0
        before = [one.header.step for one in replica_slots.slots.find_complete()]
        if kept:
            replica_slots.free_oldest_slot()
        saved = save(slots, step, 300_000)
        if step >= 2 * (between + 1):
            assert set(before[:1]) <= {one.header.step for one in replica_slots.slots.find_complete()}, (
                "the newer one stays"
            )
        if kept:
            replica_slots.keep_slot(saved)
        most = max(most, memory_of(tmp_path))
        inodes |= {path.stat().st_ino for path in tmp_path.glob("slots-0*") if step > 12}
        assert steps(slots.prefix) == [step, step - 1][: step + 1]
        assert steps(replica_slots.slots.prefix) == [one for one in range(step, -1, -1) if one % (between + 1) == 0][:2]
    assert most < (states + 0.9) * 300_000 + states * 70_000
    assert len(inodes) <= 4, "the same pages are used again"
    slots.close()


def test_no_room_for_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without replicas, and with the last two saves."""
    folder = ReplicaFolder(tmp_path / "replicas")
    folder.path.mkdir()
    folder.request_newer_than(NO_VERSION)
    monkeypatch.setenv("EDL_REPLICAS", str(folder.path))
    slots = SlotPair(tmp_path / "slots-0")
    with Checkpointer(State(rng=False, w=torch.zeros(9)), interval_steps=1, slots=slots) as checkpointer:
        replica_slots = checkpointer._replica_slots
        assert replica_slots is not None
        for step in range(4):
            checkpointer.save(step)
            if step == 2:
                replica_slots.keep_slot(slots.find_complete()[0])
        full, allocate = [True], os.posix_fallocate

        def allocate_until_full(file: int, offset: int, length: int) -> None:
            if full and os.fstat(file).st_size < length and replica_slots.slots.find_complete():
                raise OSError(errno.ENOSPC, "full")
            allocate(file, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", allocate_until_full)
        checkpointer.save(4)
        assert not replica_slots.is_state_requested()
        assert replica_slots.slots.find_complete() == []
        assert [one.header.step for one in slots.find_complete()] == [4, 3]
        replica_slots.keep_slot(slots.find_complete()[0])
        assert replica_slots.slots.find_complete() == [], "nor what was to be kept when there was no room"


ONE, TWO = (0, 1, 2), (0, 2, 2)


def test_state_is_sent_once_an_interval() -> None:
    course = ReplicationSchedule(ReplicaPace(interval_s=10, share=0.1, retry_s=5))
    course.start_world(same_peer=False)
    assert course.next_action(0, NO_VERSION, NO_VERSION) is ReplicaAction.WANT
    assert course.next_action(1, ONE, ONE) is ReplicaAction.SEND
    course.record_failure(2)
    assert [course.next_action(now, ONE, ONE) for now in (3, 7)] == [ReplicaAction.WAIT, ReplicaAction.SEND]
    course.record_sent(ONE, 7, 9)
    assert [course.next_action(now, ONE, ONE) for now in (9, 26.9, 27)] == [
        ReplicaAction.WAIT,
        ReplicaAction.WAIT,
        ReplicaAction.WANT,
    ]
    course.start_world(same_peer=True)
    assert course.next_action(10, ONE, ONE) is ReplicaAction.WANT, "the first state of a new world is kept at once"
    course.start_world(same_peer=False)
    assert course.next_action(10, ONE, ONE) is ReplicaAction.SEND, "a new peer has none"


def test_unkept_state_is_passed_over() -> None:
    """A state that some worker does not keep is passed over in the end."""
    course = ReplicationSchedule(ReplicaPace(patience_s=30))
    course.record_sent(ONE, 0, 0)
    assert [course.next_action(now, ONE, TWO) for now in (20, 49)] == [ReplicaAction.WAIT, ReplicaAction.WAIT]
    assert course.next_action(49, TWO, TWO) is ReplicaAction.SEND
    assert course.next_action(50, ONE, TWO) is ReplicaAction.WANT


def test_peer_is_the_next_taker() -> None:
    members = [Member(name, "h", 1, 1, rank, port) for rank, (name, port) in enumerate([("a", 5), ("b", 0), ("c", 7)])]
    world = World(0, JobState.RUNNING, tuple(members))
    assert [getattr(replica_peer(world, name), "id", None) for name in "abcd"] == ["c", "c", "a", None]
    assert replica_peer(World(0, JobState.RUNNING, tuple(members[:2])), "a") is None


@pytest.fixture
def said() -> list[str]:
    return []


def world_of(generation: int, agents: dict[str, Replicator]) -> World:
    members = [Member(name, "127.0.0.1", 0, 1, rank, one.port) for rank, (name, one) in enumerate(agents.items())]
    return World(generation, JobState.RUNNING, tuple(members))


@pytest.fixture
def agents(tmp_path: Path, said: list[str]) -> Iterator[dict[str, Replicator]]:
    made = {
        name: Replicator(
            name, tmp_path / name, [tmp_path / f"slots-{name}"], lambda: SECRET, said.append, ReplicaPace(0)
        )
        for name in "abc"
    }
    yield made
    for one in made.values():
        one.close()


def replica(tmp_path: Path, of: str, at: str) -> list[StateVersion]:
    return [one.header.version for one in find_slots(ReplicaFolder(tmp_path / at).slot_prefix(of, 0)) if is_whole(one)]


def test_agents_send_to_successors(tmp_path: Path, agents: dict[str, Replicator], said: list[str]) -> None:
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    for one in agents.values():
        one.change_world(world_of(0, agents))
    wait_until(lambda: replica(tmp_path, "a", "b") == [(0, 1, 2)], "b has it")
    wait_until(lambda: agents["a"].replicated_us > 1_700_000_000_000_000, "its age is known")
    assert agents["b"].replicated_us == 0
    wait_until(lambda: ReplicaFolder(tmp_path / "a").requested_version() == (0, 1, 2), "the next one is wanted")
    keep(kept_prefix(tmp_path / "slots-a"), 2)
    wait_until(lambda: replica(tmp_path, "a", "b") == [(0, 2, 2), (0, 1, 2)], "b has the next one")
    wait_until(lambda: ReplicaFolder(tmp_path / "a").requested_version() == (0, 2, 2), "a knows that")
    agents.pop("b").close()
    agents["a"].change_world(world_of(1, agents))
    wait_until(lambda: replica(tmp_path, "a", "c") == [(0, 2, 2)], "c has it")
    agents["a"].change_world(World(2, JobState.RUNNING, world_of(1, agents).nodes[:1]))
    assert ReplicaFolder(tmp_path / "a").requested_version() is None, "nobody is there to send anything to"
    assert said == []


def test_silent_peer_costs_a_line(tmp_path: Path, agents: dict[str, Replicator], said: list[str]) -> None:
    world = world_of(0, agents)
    agents.pop("b").close()
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    agents["a"].change_world(world)
    wait_until(lambda: said, "it is said")
    assert "b did not take a replica" in said[0]
    assert ReplicaFolder(tmp_path / "a").requested_version() is None


def test_leaver_gives_its_state_away(tmp_path: Path, agents: dict[str, Replicator]) -> None:
    for one in agents.values():
        one.change_world(world_of(0, agents))
    keep(kept_prefix(tmp_path / "slots-a"), 1)
    keep(tmp_path / "slots-a", 4)
    wait_until(agents["a"].hand_over_state, "it was handed over")
    assert replica(tmp_path, "a", "b")[0] == (0, 4, 2)
    wait_until(agents["c"].hand_over_state, "who has nothing may go at once")


def test_all_agents_of_a_job_know_one_secret(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/store") as store:
        assert len({JobSecret(store, "job")() for _ in range(3)}) == 1
        assert len(JobSecret(store, "job")()) == 32
        assert JobSecret(store, "other")() != JobSecret(store, "job")()
