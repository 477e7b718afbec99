"""Which nodes train together: rules, agents in simulated time with events in any order, and records in a store."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.agent.agent import _check_job_state, _is_excluded
from edl.collective.agent.context import AgentContext, ShutdownState
from edl.collective.agent.node_records import Exclusions, Membership, host_key
from edl.collective.agent.rendezvous import (
    ChangeTimer,
    LocalObservation,
    RendezvousSettings,
    assign_ranks,
    failed_world,
    is_join_deferred,
    next_world,
)
from edl.collective.agent.worker_group import pause_needs_s, pause_step
from edl.collective.goodput import read_job
from edl.collective.job_records import Exclusion, JobState, Member, Node, Record, World
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage
from edl.discovery.sqlite import SqliteStore
from edl.errors import DiscoveryError, ProtocolError

TTL_S = 1.5
TICK_S = 0.25


class SimAgent:
    """A node: its record, the generation of its workers, and what it is about to propose."""

    def __init__(self, record: Node, now_s: float, reports_steps: bool) -> None:
        self.record, self.reports_steps = record, reports_steps
        self.expires = now_s + TTL_S
        self.ids: ChangeTimer[frozenset[str]] = ChangeTimer(frozenset(), now_s)
        self.pause: ChangeTimer[tuple[int, int | None]] = ChangeTimer((-1, None), now_s)
        self.alive, self.stopped, self.broken = True, False, False
        self.generation, self.exit = -1, ""
        self.proposal: tuple[int, dict[str, Node], World | None] | None = None

    @property
    def present(self) -> bool:
        return self.alive and not self.exit


class Job:
    """The store, the agents and the clock."""

    def __init__(self, rules: RendezvousSettings) -> None:
        self.rules, self.now, self.ports, self.step, self.ending = rules, 0.0, 1000, -1, False
        self.history = [World()]
        self.records: dict[str, Node] = {}
        self.agents: list[SimAgent] = []

    def happen(self, event: str, which: int) -> None:
        if event == "tick":
            self.tick()
        elif event == "join" and len(self.agents) < 8:
            record = Node(f"n{len(self.agents)}", "host", self._port(), 1 + len(self.agents) % 2)
            self.agents.append(SimAgent(record, self.now, reports_steps=which % 3 > 0))
        elif (agent := self.agents[which % len(self.agents)]).present:
            if event == "turn":
                self.turn(agent)
            elif event == "leave":
                agent.record = replace(agent.record, leaving=True)
            elif event in ("stop", "continue"):
                agent.stopped = event == "stop"
            elif event == "break":
                agent.broken = agent.generation >= 0
            elif event == "kill":
                agent.alive = False

    def tick(self) -> None:
        """Leases are renewed or expire; workers make a step together, if all of them are there and may go on."""
        self.now += TICK_S
        for agent in self.agents:
            if agent.present and not agent.stopped:
                agent.expires = self.now + TTL_S
            elif agent.exit or agent.expires <= self.now:
                self.records.pop(agent.record.id, None)
        world = self.history[-1]
        at_work = {
            agent.record.id
            for agent in self.agents
            if agent.present and not (agent.stopped or agent.broken) and agent.generation == world.generation
        }
        if at_work.issuperset(member.id for member in world.nodes) and not self._paused(world):
            self.step += 1

    def turn(self, agent: SimAgent) -> None:
        """An agent looks at the records, or proposes what follows from its last look."""
        if agent.stopped:
            return
        if agent.proposal is not None:
            version, nodes, following = agent.proposal
            agent.proposal = None
            if following is not None and version == len(self.history):
                check_next(self.history[-1], following, nodes, self.rules)
                self.history.append(following)
            return
        world, name = self.history[-1], agent.record.id
        position = world.position(name) if world.state is JobState.RUNNING else None
        if world.ended or (position is None and agent.record.leaving):
            agent.exit, agent.generation = world.state.value if world.ended else "left", -1
            return
        if position is None:
            agent.generation = -1
        elif agent.generation != world.generation:
            agent.generation, agent.broken = world.generation, False
            agent.record = replace(agent.record, port=self._port())
        works = position is not None
        paused = agent.generation if works and self._paused(world) else -1
        finished = agent.generation if works and self.ending and not agent.broken else agent.record.finished
        agent.record = self.records[name] = replace(agent.record, paused=paused, finished=finished)
        agent.ids.record(frozenset(self.records), self.now)
        agent.pause.record((world.generation, world.pause_at), self.now)
        seen = LocalObservation(
            node=name,
            quiet_s=agent.ids.held_s(self.now),
            pausing_s=agent.pause.held_s(self.now) if world.pause_at is not None else 0.0,
            pause_step=self.step + 2 if works and agent.reports_steps and self.step >= 0 else None,
            restart="a worker died" if agent.broken else "",
        )
        nodes = dict(self.records)
        agent.proposal = len(self.history), nodes, next_world(world, nodes, seen, self.rules)

    def settle(self, ticks: int) -> None:
        """No more events; agents that were stopped are back."""
        for _ in range(ticks):
            self.tick()
            for agent in self.agents:
                agent.stopped = False
                if agent.present:
                    self.turn(agent)

    def _paused(self, world: World) -> bool:
        return world.pause_at is not None and self.step >= world.pause_at

    def _port(self) -> int:
        self.ports += 1
        return self.ports


def check_next(before: World, following: World, nodes: dict[str, Node], rules: RendezvousSettings) -> None:
    assert World.decode(following.encode()) == following
    assert not before.ended, "a job that has ended was changed"
    if following.state is JobState.DONE:
        assert {nodes[member.id].finished for member in before.nodes} == {before.generation} == {following.generation}
    elif following.generation == before.generation:
        assert replace(following, pause_at=None) == replace(before, pause_at=None)
    else:
        assert (following.generation, following.pause_at) == (before.generation + 1, None)
        names = [member.id for member in following.nodes]
        if following.state is JobState.RUNNING:
            assert rules.min_nodes <= len(set(names)) == len(names) <= rules.max_nodes
        assert not any(nodes[name].leaving for name in names), "a member was not there, or leaves"
        assert names == assign_ranks([member.id for member in before.nodes], names)
        sizes = [member.local_world_size for member in following.nodes]
        assert [member.first_rank for member in following.nodes] == [sum(sizes[:at]) for at in range(len(sizes))]


RULES = RendezvousSettings(min_nodes=1, max_nodes=3, last_call_s=1.0, pause_timeout_s=5.0, takeover_s=10.0)
TWO = replace(RULES, min_nodes=2)


def node(name: str, **fields: object) -> Node:
    return replace(Node(name, "host", 100 + ord(name[0]), 2), **fields)


def running(names: str, **fields: Any) -> World:
    members = tuple(Member(name, "host", 1, 2, 2 * place) for place, name in enumerate(names))
    return World(3, JobState.RUNNING, members, **fields)


def follow(before: World, there: str | list[Node], rules: RendezvousSettings = RULES, **observed: Any) -> World | None:
    """What follows where these nodes are there, all as they came or as they are given."""
    nodes = [node(one) if isinstance(one, str) else one for one in there]
    return next_world(before, {one.id: one for one in nodes}, LocalObservation(**observed), rules)


@pytest.mark.parametrize(
    ("before", "there", "rules", "observed", "names"),
    [
        # A job forms when enough nodes came and no more follow, or no more may.
        (World(), "ab", RULES, {"quiet_s": 0.5}, None),
        (World(), "ab", RULES, {"quiet_s": 1.0}, "ab"),
        (World(), "abc", RULES, {}, "abc"),
        (World(), "abcd", RULES, {}, "abc"),
        (World(), "a", TWO, {"quiet_s": 1e9}, None),
        (World(), [node("a"), node("b", leaving=True)], TWO, {"quiet_s": 1e9}, None),
        # All members lost are followed only when they have surely stopped.
        (running("ab"), "c", RULES, {"quiet_s": 9.9}, None),
        (running("ab"), "c", RULES, {"quiet_s": 10.0}, "c"),
        (running("ab"), "c", RULES, {"dead": frozenset("ab")}, "c"),
        (running("ab"), "c", RULES, {"dead": frozenset("a")}, None),
        # The next generation waits for the first node's next port.
        (running("ab"), [node("a", port=1)], RULES, {}, None),
        (running("ab"), [node("a", port=2)], RULES, {}, "a"),
        (running("ab"), [node("b", port=1)], RULES, {}, "b"),
        # Workers that do not pause are not waited for for ever, and a script that reports no steps is not asked to.
        (running("a", pause_at=17), "ab", RULES, {"node": "a", "pausing_s": 4.9}, None),
        (running("a", pause_at=17), "ab", RULES, {"node": "a", "pausing_s": 5.0}, "ab"),
        (running("a"), "ab", RULES, {"node": "a"}, "ab"),
        # Nobody pauses for nodes in reserve, or joins a job that is ending, or one that failed.
        (running("abc"), "abcd", RULES, {"node": "a", "pause_step": 5}, None),
        (running("ab"), [node("a", finished=3), node("b"), node("c")], RULES, {"node": "b", "pause_step": 4}, None),
        # Nor does who leaves wait for a pause of those that make no more steps.
        (running("ab"), [node("a", finished=3), node("b", leaving=True)], RULES, {"node": "a", "pause_step": 4}, "a"),
        (failed_world(running("a"), "ValueError: x"), "ab", RULES, {"quiet_s": 1e9}, None),
    ],
)
def test_which_nodes_train_next(
    before: World, there: Any, rules: RendezvousSettings, observed: dict[str, Any], names: str | None
) -> None:
    world = follow(before, there, rules, **observed)
    assert (None if world is None else "".join(member.id for member in world.nodes)) == names


def test_nodes_join_after_a_pause() -> None:
    world, there = running("ab"), [node("a"), node("b"), node("c")]
    assert follow(world, there, node="c") is None, "whoever joins does not know what can pause"
    asked = follow(world, there, node="a", pause_step=17)
    assert asked == replace(world, pause_at=17)
    assert asked is not None
    assert follow(asked, there, node="b", pause_step=20, pausing_s=1.0) is None
    there[0] = node("a", paused=3)
    assert follow(asked, there, node="b", pausing_s=1.0) is None
    there[1] = node("b", paused=3)
    joined = follow(asked, there, node="b", pausing_s=1.0)
    assert [(member.id, member.first_rank) for member in joined.nodes] == [("a", 0), ("b", 2), ("c", 4)]
    assert follow(replace(world, pause_at=17), "ab", node="a", pausing_s=3.0) == world, "nobody wants it any more"


def test_forgiven_errors_count_in_all_worlds() -> None:
    world: World | None = replace(running("ab"), forgiven=1)
    for observed in ({"restart": "it died"}, {"restart": "it raised", "forgives": True}):
        world = follow(replace(world, nodes=running("ab").nodes), "ab", **observed)
    assert world.forgiven == 2
    world = follow(world, "c", TWO, dead=frozenset("ab"))
    assert (world.state, World.decode(world.encode()).forgiven) == (JobState.FORMING, 2)


@pytest.mark.parametrize(
    ("before", "present", "after"),
    [("", "ba", "ba"), ("abc", "ac", "ac"), ("abc", "bc", "cb"), ("abc", "acx", "axc"), ("ab", "abxy", "abxy")],
)
def test_survivors_keep_their_place(before: str, present: str, after: str) -> None:
    assert assign_ranks(list(before), present) == list(after)


@pytest.mark.parametrize("kind", [World, Node, Exclusion])
@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"id": 1, "node": 2}', b'{"state": "odd"}', b"\xff"])
def test_records_that_are_none_are_refused(kind: type[Record], data: bytes) -> None:
    with pytest.raises(ProtocolError, match="record"):
        kind.decode(data)


def test_newer_record_fields_are_ignored() -> None:
    """What a later version adds to a record breaks nobody."""
    for record in (node("a"), running("ab")):
        values = json.loads(record.encode())
        values["later"] = 1
        for member in values.get("nodes", []):
            member["later"] = 2
        assert type(record).decode(json.dumps(values).encode()) == record


EVENTS = ("turn",) * 9 + ("tick",) * 5 + ("join", "leave", "kill", "stop", "continue", "break")


@settings(max_examples=40)
@given(
    st.integers(1, 3), st.integers(0, 3), st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7)), max_size=250)
)
def test_any_history_comes_to_rest(minimum: int, more: int, history: list[tuple[str, int]]) -> None:
    job = Job(RendezvousSettings(minimum, minimum + more, takeover_s=5.0))
    for event, which in [("join", which) for which in range(minimum)] + history:
        job.happen(event, which)
    job.settle(200)
    present = [agent for agent in job.agents if agent.present]
    assert not any(agent.record.leaving for agent in present), "who wanted to leave has left"
    if len(present) < minimum:
        assert all(agent.generation < 0 for agent in present)
        return
    world = job.history[-1]
    assert (world.state, world.pause_at) == (JobState.RUNNING, None)
    assert len(world.nodes) == min(len(present), minimum + more)
    assert {member.id for member in world.nodes} <= {agent.record.id for agent in present}
    assert {agent.generation for agent in present} <= {world.generation, -1}
    job.ending = True
    job.settle(20)
    assert job.history[-1].state is JobState.DONE
    assert all(agent.exit == "done" for agent in present)


def status(step: int, *durations_s: float, generation: int = 3) -> WorkerStatus:
    return replace(WorkerStatusPage.from_env().read_status(), generation=generation, step=step, durations_s=durations_s)


def test_pause_is_after_a_step_all_can_hear() -> None:
    assert pause_step([status(7, 1.0), status(8, 1.0)], 3) == 10, "two steps ahead at least"
    assert pause_step([status(7, 0.01), status(8, 0.01)], 3) == 108, "1 s ahead where steps are short"
    assert pause_step([status(0)], 3) == 2, "no step was measured yet"
    assert pause_step([status(7, 1.0), status(-1)], 3) is None, "one reports no steps"
    assert pause_step([status(7, 1.0), status(7, 1.0, generation=2)], 3) is None, "one is not there yet"
    assert pause_needs_s([status(7, 2.0, 2.0, 40.0), status(7, 2.0)]) == 12.0, "long steps have long"
    assert pause_needs_s([status(-1)]) == 0.0


def test_who_joins_waits_for_who_is_busy() -> None:
    busy, idle = Node("a", "host", 1, 1, busy=3), Node("b", "host", 2, 1, busy=2)
    world = World(3, JobState.RUNNING, tuple(Member(name, "host", 1, 1, 0) for name in "ab"))
    assert is_join_deferred(world, {"a": busy, "b": idle})
    assert not is_join_deferred(world, {"b": idle}), "busy in another generation, or gone"
    assert not is_join_deferred(world, {"a": replace(busy, leaving=True), "b": idle}), "who leaves cannot wait"
    assert not is_join_deferred(world, {"c": busy, "b": idle}), "no member"


LEASE_S = 3.0
BACK_S = LEASE_S + 2.0
"""Until when a member without a record may only be late."""

TWO_NODES = World(0, JobState.RUNNING, tuple(Member(name, "host", 1, 1, rank) for rank, name in enumerate("ab")))


class FakeLease:
    """A lease that lapses when the test says so."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.lapsed, self.late_at, self._asked = False, -math.inf, asked

    @property
    def lost(self) -> bool:
        return self._asked() or self.lapsed

    def close(self) -> None:
        self.lapsed = True


class FakeStore(SqliteStore):
    """A store that can be away, in simulated time."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.now_s, self.away = 100.0, False
        self.leases: list[FakeLease] = []
        self.asked: Callable[[], bool] = lambda: False

    def lease(self, ttl_s: float) -> Any:
        self.leases.append(FakeLease(lambda: self.asked()))
        return self.leases[-1]

    def put(self, key: str, value: bytes, lease: Any = None) -> Any:
        if self.away:
            raise DiscoveryError("away")
        return super().put(key, value)

    def lapse(self, *names: str) -> None:
        for name in names:
            self.delete(f"jobs/job/nodes/{name}")


@pytest.fixture
def store(stack: ExitStack, tmp_path: Path) -> FakeStore:
    return stack.enter_context(FakeStore(tmp_path / "store.sqlite"))


@pytest.fixture
def members(store: FakeStore, stack: ExitStack) -> tuple[Membership, Membership]:
    one, other = (
        Membership(store, "job", Node(name, "host", 1, 1), LEASE_S, lambda: None, clock=lambda: store.now_s)
        for name in "ab"
    )
    for each in (one, other):
        stack.callback(each.close)
        assert each.without_lease_s == 0.0, "it has not joined"
        each.join()
    assert one.propose_world(TWO_NODES, None)
    store.now_s += BACK_S  # since they joined
    assert (set(one.read_records().nodes), one.read_records().late) == ({"a", "b"}, frozenset())
    return one, other


def test_untaken_change_is_written_later(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    one, other = members
    store.away = True
    with pytest.raises(DiscoveryError):
        one.update_node(finished=3)
    store.away = False
    assert other.read_records().nodes["a"].finished == -1
    one.read_records()
    assert other.read_records().nodes["a"].finished == 3


def test_first_node_back_waits_for_others(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    one, other = members
    for lease in store.leases:
        lease.close()
    store.lapse("a", "b")
    store.now_s += 10.0
    assert one.without_lease_s == 10.0
    records = one.read_records()
    assert (set(records.nodes), records.late, one.without_lease_s) == ({"a", "b"}, {"b"}, 0.0)
    store.now_s += BACK_S - 0.1
    assert one.read_records().late == {"b"}, "b has not had the time to come back"
    store.now_s += 0.2
    assert (set(one.read_records().nodes), one.read_records().late) == ({"a"}, frozenset())
    other.read_records()
    assert set(one.read_records().nodes) == {"a", "b"}


def test_read_only_store_loses_nobody(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    one, _ = members
    store.leases[0].late_at = store.now_s  # its own renewal was late as well
    store.lapse("b")
    assert one.read_records().late == {"b"}
    store.now_s += BACK_S - 0.1
    assert one.read_records().late == {"b"}
    store.now_s += 0.2
    assert set(one.read_records().nodes) == {"a"}


def test_lapsed_member_is_gone_at_once(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    one, other = members
    store.lapse("b")
    assert (set(one.read_records().nodes), one.read_records().late) == ({"a"}, frozenset())
    other.delete_node("a")
    assert set(other.read_records().nodes) == {"b"}
    assert set(one.read_records().nodes) == {"a", "b"}, "who was taken for dead by mistake is back"


def test_lease_lived_when_it_was_asked(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    """A process that is stopped behind the look at its lease does not count as having had it until it goes on."""

    def stop() -> bool:
        store.now_s += 0.5
        return False

    store.asked = stop
    assert members[0].without_lease_s == 0.5


def test_lost_job_is_believed_after_a_while(store: FakeStore, members: tuple[Membership, Membership]) -> None:
    """A store that has just started again may seem empty."""
    one, _ = members
    store.delete("jobs/job/world")
    for wait_s in (0.0, 7.9):
        store.now_s += wait_s
        with pytest.raises(DiscoveryError, match="no longer knows the job"):
            one.read_records()
    store.now_s += 0.2
    records = one.read_records()
    assert (records.version, records.world.message) == (None, "the store lost the job's record")


FAULT = "rank 1: RuntimeError: CUDA error: unspecified launch failure"


def test_excluded_host_stays_out(store: FakeStore) -> None:
    here, there = Exclusions(store, "job", "a"), Exclusions(store, "job", "b")
    broken = Exclusion("node-a", "rank 0: ECC", True, 7, 1.0)
    here.add(broken)
    assert (here.own_exclusion(), there.own_exclusion()) == (broken, None)
    assert Exclusions(store, "another", "a").own_exclusion() is None
    assert read_job(store, "job").left_out == (broken,)
    here.remove()
    assert here.own_exclusion() is None


@pytest.mark.parametrize(
    ("step", "clear", "same"), [(7, False, True), (5, False, True), (8, False, False), (7, True, False)]
)
def test_fault_at_one_step_is_the_scripts(store: FakeStore, step: int, clear: bool, same: bool) -> None:
    here, there = Exclusions(store, "job", "a"), Exclusions(store, "job", "b")
    first = Exclusion("node-a", FAULT, clear, 7)
    here.add(first)
    assert here.find_same_elsewhere(first) is None, "its own record is not another host"
    found = there.find_same_elsewhere(Exclusion("node-b", FAULT, False, step))
    assert found == (first if same else None)
    there.remove_unclear()
    assert (here.own_exclusion() is None) is not clear


def test_host_key_is_of_a_boot_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first = host_key()
    assert first == host_key(), "the same from process to process"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert host_key() != first


def test_readmit_lets_a_host_join_again(store: FakeStore, caplog: pytest.LogCaptureFixture) -> None:
    exclusions = Exclusions(store, "job", host_key())
    exclusions.add(Exclusion("node-a", FAULT))

    def left_out(*, readmit: bool) -> bool:
        spec = SimpleNamespace(job="job", readmit=readmit)
        return _is_excluded(
            cast(AgentContext, SimpleNamespace(store=store, spec=spec, id="node-b", shutdown=ShutdownState()))
        )

    assert left_out(readmit=False)
    assert f"excludes this host ({FAULT})" in caplog.messages[-1]
    assert "`edl run --readmit`" in caplog.messages[-1]
    assert not left_out(readmit=True)
    assert not left_out(readmit=False), "it need be said once only"


def test_second_start_says_how_to_run_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    records = SimpleNamespace(world=World(2, JobState.DONE, message="the script ended on every node"), nodes={})
    context = SimpleNamespace(
        spec=SimpleNamespace(job="resnet", ttl_s=1.0, checkpoint="s3://bucket/resnet"),
        signals=SimpleNamespace(raise_if_stopping=lambda: None),
        membership=SimpleNamespace(read_records=lambda: records),
        shutdown=ShutdownState(),
        id="node-b",
    )
    assert _check_job_state(cast(AgentContext, context)) == 0
    assert "--rdzv-id resnet-2, and a --checkpoint other than s3://bucket/resnet" in caplog.messages[-1]
