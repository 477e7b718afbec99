"""Which nodes train together: rules one by one, then agents in simulated time with their events in any order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.agent.membership.membership_timer import MembershipTimer, is_join_deferred
from edl.collective.agent.membership.pause import pause_needs_s, pause_step
from edl.collective.agent.membership.quorum_wait import QuorumWait
from edl.collective.agent.membership.rendezvous import (
    LocalObservation,
    RendezvousSettings,
    assign_ranks,
    failed_world,
    next_world,
)
from edl.collective.job_records import JobState, Member, Node, World
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage
from edl.errors import ProtocolError

TTL_S = 1.5

TICK_S = 0.25


@dataclass
class SimAgent:
    """One node: its record as it should be, its workers, and what it has read."""

    name: str
    record: Node
    spare_port: int
    expires: float = 0.0
    alive: bool = True
    stopped: bool = False
    woken: bool = False
    cut: bool = False
    cut_since: float = 0.0
    cut_generation: int = -1
    generation: int = -1
    running: bool = False
    step: int = -1
    paused: bool = False
    finished: bool = False
    broken: bool = False
    reports_steps: bool = True
    exit: str = ""
    read_world: tuple[World, int] | None = None
    read_nodes: dict[str, Node] | None = None
    read_live: frozenset[str] = frozenset()
    seen_nodes: frozenset[str] = frozenset()
    seen_nodes_at: float = 0.0
    seen_pause: tuple[int, int | None] = (-1, None)
    seen_pause_at: float = 0.0
    proposal: World | None = None


@dataclass
class Job:
    """The store, the agents and the clock."""

    rules: RendezvousSettings
    now: float = 0.0
    world: World = field(default_factory=World)
    version: int = 0
    records: dict[str, Node] = field(default_factory=dict)
    agents: dict[str, SimAgent] = field(default_factory=dict)
    ports: int = 1000
    steps_of: dict[int, set[str]] = field(default_factory=dict)
    newest_step_generation: int = -1
    history: list[World] = field(default_factory=list)

    # --- What happens to the nodes. ---

    def join(self, reports_steps: bool = True) -> None:
        name = f"n{len(self.agents)}"
        port = self._port()
        agent = SimAgent(name, Node(name, "host", port, 1 + len(self.agents) % 2), port, reports_steps=reports_steps)
        agent.seen_nodes_at = self.now
        self.agents[name] = agent
        self._write(agent)

    def leave(self, agent: SimAgent) -> None:
        agent.record = replace(agent.record, leaving=True)
        self._write(agent)

    def kill(self, agent: SimAgent) -> None:
        agent.alive = agent.running = False

    def go_on(self, agent: SimAgent) -> None:
        """After a SIGSTOP. The steps that its workers make until it has looked are those in flight: left out here."""
        agent.stopped, agent.woken = False, True
        agent.read_world = agent.read_nodes = agent.proposal = None

    def cut(self, agent: SimAgent) -> None:
        agent.cut, agent.cut_since, agent.cut_generation = True, self.now, self.world.generation

    def break_worker(self, agent: SimAgent) -> None:
        agent.broken = agent.running

    # --- Time. ---

    def tick(self) -> None:
        """Leases are renewed or expire, workers make steps."""
        self.now += TICK_S
        for agent in self.agents.values():
            if agent.alive and not agent.stopped and not agent.cut and not agent.exit and agent.name in self.records:
                agent.expires = self.now + TTL_S
            if agent.expires <= self.now or agent.exit:
                self.records.pop(agent.name, None)
            if agent.cut and agent.running and self.now - agent.cut_since > 0.8 * self.rules.takeover_s:
                agent.running = False
        self._train()

    def _train(self) -> None:
        """A generation's ranks make a step together, if all of them are there and none has paused."""
        for generation in {agent.generation for agent in self.agents.values() if agent.running}:
            running = [agent for agent in self.agents.values() if agent.running and agent.generation == generation]
            members = next(world.nodes for world in self.history if world.generation == generation)
            if {agent.name for agent in running} != {member.id for member in members}:
                continue
            if any(agent.stopped or agent.woken or agent.broken or agent.finished for agent in running):
                continue
            pause_at = self.world.pause_at if self.world.generation == generation else None
            for agent in running:
                agent.paused = pause_at is not None and agent.step >= pause_at
            if any(agent.paused for agent in running):
                continue
            if generation < self.world.generation and not all(agent.cut for agent in running):
                continue  # in flight: an agent that reaches the store is about to stop them
            if any(generation < agent.cut_generation for agent in running):
                continue  # cut off between the writing of a world and its reading: the fence by generation is for that
            assert generation >= self.newest_step_generation, "an older world made a step after a newer one"
            self.newest_step_generation = generation
            for agent in running:
                agent.step += 1

    def finish_all(self) -> None:
        """The script comes to its end wherever it runs completely."""
        for agent in self.agents.values():
            agent.finished = agent.finished or (agent.running and not agent.stopped and not agent.broken)

    # --- What an agent does. ---

    def turn(self, agent: SimAgent) -> None:
        """The next of the three steps of an agent."""
        if not agent.alive or agent.stopped or agent.cut or agent.exit:
            return
        if agent.read_world is None:
            agent.read_world = (self.world, self.version)
        elif agent.read_nodes is None:
            if agent.name not in self.records:
                self._write(agent)
            agent.read_nodes, agent.read_live = dict(self.records), frozenset(self.records)
            self._act(agent)
        else:
            self._propose(agent)
            agent.read_world = agent.read_nodes = agent.proposal = None

    def _act(self, agent: SimAgent) -> None:
        assert agent.read_nodes is not None
        agent.woken = False
        world, nodes = agent.read_world[0], agent.read_nodes
        if frozenset(nodes) != agent.seen_nodes:
            agent.seen_nodes, agent.seen_nodes_at = frozenset(nodes), self.now
        pause = (world.generation, world.pause_at)
        if pause != agent.seen_pause:
            agent.seen_pause, agent.seen_pause_at = pause, self.now
        if world.ended:
            agent.exit, agent.running = world.state.value, False
            return
        position = world.position(agent.name) if world.state is JobState.RUNNING else None
        if position is None:
            agent.running = False
            if agent.record.leaving:
                agent.exit = "left"
                return
        elif world.generation != agent.generation or not agent.running:
            agent.generation, agent.running = world.generation, True
            agent.broken = agent.finished = agent.paused = False
            if position == 0:
                agent.spare_port = self._port()
        self._tell(agent, world)
        moment = LocalObservation(
            node=agent.name,
            quiet_s=self.now - agent.seen_nodes_at,
            pausing_s=self.now - agent.seen_pause_at if world.pause_at is not None else 0.0,
            pause_step=agent.step + 2 if agent.running and agent.reports_steps and agent.step >= 0 else None,
            restart="a worker died" if agent.running and agent.broken else "",
        )
        agent.proposal = next_world(world, nodes, moment, self.rules)

    def _tell(self, agent: SimAgent, world: World) -> None:
        record = replace(agent.record, port=agent.spare_port)
        if agent.running and agent.paused and world.pause_at is not None:
            record = replace(record, paused=agent.generation)
        elif world.pause_at is None and record.paused == agent.generation:
            record = replace(record, paused=-1)
        if agent.running and agent.finished:
            record = replace(record, finished=agent.generation)
        if record != agent.record:
            agent.record = record
            self._write(agent)

    def _propose(self, agent: SimAgent) -> None:
        assert agent.read_world is not None
        before, version = agent.read_world
        following = agent.proposal
        if following is None or following == before or version != self.version:
            return
        self._check(before, following, agent)
        self.world, self.version = following, self.version + 1
        if following.state is JobState.RUNNING and following.generation > before.generation:
            self.history.append(following)

    def _check(self, before: World, following: World, agent: SimAgent) -> None:
        assert World.decode(following.encode()) == following
        assert following.generation >= before.generation
        assert not before.ended, "a job that has ended was changed"
        if following.state is JobState.DONE:
            assert following.generation == before.generation
            finished = {n.id for n in (agent.read_nodes or {}).values() if n.finished == before.generation}
            assert finished >= {member.id for member in before.nodes}
            return
        if following.generation == before.generation:
            assert replace(following, pause_at=None) == replace(before, pause_at=None)
            return
        assert following.generation == before.generation + 1
        assert following.pause_at is None
        if following.state is JobState.FORMING:
            assert not following.nodes
            return
        names = [member.id for member in following.nodes]
        assert agent.read_live >= set(names), "a member was not there"
        assert self.rules.min_nodes <= len(names) <= self.rules.max_nodes
        assert len(set(names)) == len(names)
        first = 0
        for member in following.nodes:
            assert member.first_rank == first
            first += member.local_world_size
        assert following.size == first
        old = [member.id for member in before.nodes]
        assert names == assign_ranks(old, names)
        assert not any(agent.read_nodes[name].leaving for name in names if agent.read_nodes)

    # --- Until nothing more changes. ---

    def settle(self, ticks: int = 200) -> None:
        """No more events; agents that were stopped or cut off are back."""
        for agent in self.agents.values():
            agent.cut = False
            if agent.stopped:
                self.go_on(agent)
        for _ in range(ticks):
            self.tick()
            for agent in self.agents.values():
                for _ in range(3):
                    self.turn(agent)

    @property
    def present(self) -> list[SimAgent]:
        return [agent for agent in self.agents.values() if agent.alive and not agent.exit]

    def _port(self) -> int:
        self.ports += 1
        return self.ports

    def _write(self, agent: SimAgent) -> None:
        self.records[agent.name] = agent.record
        agent.expires = self.now + TTL_S


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


def test_job_is_done_when_all_finished() -> None:
    assert follow(running("ab"), [node("a", finished=3), node("b", finished=2)], node="a") is None
    done = follow(running("ab"), [node("a", finished=3), node("b", finished=3)], node="a")
    assert done.state is JobState.DONE
    assert follow(done, "", quiet_s=1e9) is None


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


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"id": 1, "addr": 2}', b'{"state": "odd"}', b"\xff"])
def test_records_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="record"):
        World.decode(data)
    with pytest.raises(ProtocolError, match="record"):
        Node.decode(data)


def test_newer_record_fields_are_ignored() -> None:
    """What a later version adds to a record breaks nobody."""
    for record in (node("a"), running("ab")):
        values = json.loads(record.encode())
        values["later"] = 1
        for member in values.get("nodes", []):
            member["later"] = 2
        assert type(record).decode(json.dumps(values).encode()) == record


EVENTS = ("turn",) * 9 + ("tick",) * 5 + ("join", "leave", "kill", "stop", "continue", "cut", "mend", "break")


def happen(job: Job, event: str, which: int) -> None:
    if event == "tick":
        job.tick()
    elif event == "join":
        if len(job.agents) < 8:
            job.join(reports_steps=which % 3 > 0)
    elif job.agents:
        agent = list(job.agents.values())[which % len(job.agents)]
        if event == "turn":
            job.turn(agent)
        elif agent.exit or not agent.alive:
            pass
        elif event == "stop":
            agent.stopped = True
        elif event == "continue":
            job.go_on(agent)
        elif event == "mend":
            agent.cut = False
        else:
            {"leave": job.leave, "kill": job.kill, "cut": job.cut, "break": job.break_worker}[event](agent)


@settings(max_examples=40)
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7)), max_size=250),
)
def test_any_history_comes_to_rest(minimum: int, more: int, history: list[tuple[str, int]]) -> None:
    job = Job(RendezvousSettings(minimum, minimum + more, takeover_s=5.0))
    for _ in range(minimum):
        job.join()
    for event, which in history:
        happen(job, event, which)
    job.settle()
    there = [agent for agent in job.present if not agent.record.leaving]
    if len(there) >= minimum:
        assert job.world.state is JobState.RUNNING, job.world
        assert {member.id for member in job.world.nodes} <= {agent.name for agent in there}
        assert len(job.world.nodes) == min(len(there), minimum + more)
        assert job.world.pause_at is None
        assert all(agent.generation == job.world.generation for agent in job.present if agent.running)
    else:
        assert not any(agent.running for agent in job.present)
    assert not any(agent.record.leaving for agent in job.present), "who wanted to leave has left"
    job.finish_all()
    job.settle(20)
    if len(there) >= minimum:
        assert job.world.state is JobState.DONE
        assert all(agent.exit == "done" for agent in there)


def status(step: int, *durations_s: float, generation: int = 3) -> WorkerStatus:
    return replace(WorkerStatusPage.from_env().read_status(), generation=generation, step=step, durations_s=durations_s)


def test_pause_is_after_a_step_all_can_hear() -> None:
    assert pause_step([status(7, 1.0), status(8, 1.0)], 3) == 10, "two steps ahead at least"
    assert pause_step([status(7, 0.01), status(8, 0.01)], 3) == 108, "1 s ahead where steps are short"
    assert pause_step([status(0)], 3) == 2, "no step was measured yet"
    assert pause_step([status(7, 1.0), status(-1)], 3) is None, "one reports no steps"
    assert pause_step([status(7, 1.0), status(7, 1.0, generation=2)], 3) is None, "one is not there yet"


def test_long_steps_have_long_to_pause() -> None:
    assert pause_needs_s([status(7, 2.0, 2.0, 40.0), status(7, 2.0)]) == 12.0
    assert pause_needs_s([status(-1)]) == 0.0


def test_time_left_is_reported_each_minute() -> None:
    """Every minute it is said how long is left."""
    wait = QuorumWait(2, 600.0)
    said = [words for second in range(190) if (words := wait.record_nodes(1, float(second)))]
    assert said[1:] == [f"still 1 of at least 2 nodes: waiting {left} s more" for left in (540, 480, 420)]


def test_beginning_nodes_are_no_wait() -> None:
    wait = QuorumWait(2, 600.0)
    assert wait.record_nodes(2, 0.0) == ""
    assert wait.record_nodes(1, 1.0), "one has gone again"
    assert wait.record_nodes(2, 2.0) == ""
    assert "up to 600 s" in wait.record_nodes(1, 3.0)
    assert wait.waited_s(4.0) == 1.0, "another wait"


WORLD = World(3, JobState.RUNNING)


def test_quiet_since_a_node_came_or_went() -> None:
    timer = MembershipTimer(0.0)
    timer.record_membership(WORLD, ["a"], 1.0)
    timer.record_membership(WORLD, ["a"], 3.0)
    assert timer.quiet_s(4.0) == 3.0
    timer.record_membership(WORLD, ["a", "b"], 5.0)
    assert timer.quiet_s(5.5) == 0.5


def test_pausing_since_this_pause() -> None:
    timer = MembershipTimer(0.0)
    timer.record_membership(WORLD, [], 1.0)
    assert (timer.pausing, timer.pausing_s(9.0)) == (False, 0.0)
    timer.record_membership(World(3, JobState.RUNNING, pause_at=7), [], 2.0)
    timer.record_membership(World(3, JobState.RUNNING, pause_at=7), [], 3.0)
    assert (timer.pausing, timer.pausing_s(4.0)) == (True, 2.0)
    timer.record_membership(World(4, JobState.RUNNING, pause_at=7), [], 5.0)
    assert timer.pausing_s(5.0) == 0.0, "another generation's"


def test_a_pause_waits_for_who_is_busy() -> None:
    timer, pausing = MembershipTimer(0.0), World(3, JobState.RUNNING, pause_at=7)
    timer.record_membership(pausing, [], 2.0)
    timer.record_membership(pausing, [], 90.0, deferred=True)
    timer.record_membership(pausing, [], 91.0)
    assert timer.pausing_s(92.0) == 2.0


def test_who_joins_waits_for_who_is_busy() -> None:
    busy, idle = Node("a", "host", 1, 1, busy=3), Node("b", "host", 2, 1, busy=2)
    world = World(3, JobState.RUNNING, tuple(Member(name, "host", 1, 1, 0) for name in "ab"))
    assert is_join_deferred(world, {"a": busy, "b": idle})
    assert not is_join_deferred(world, {"b": idle}), "busy in another generation, or gone"
    assert not is_join_deferred(world, {"a": replace(busy, leaving=True), "b": idle}), "who leaves cannot wait"
    assert not is_join_deferred(world, {"c": busy, "b": idle}), "no member"
