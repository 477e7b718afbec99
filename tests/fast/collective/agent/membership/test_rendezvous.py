"""Which nodes train together: rules one by one, then agents in simulated time with their events in any order."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.agent.membership.rendezvous import (
    LocalObservation,
    RendezvousSettings,
    assign_ranks,
    failed_world,
    next_world,
)
from edl.collective.job_records import JobState, Member, Node, World
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
        assert agent.read_world is not None
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


def node(name: str, **fields: object) -> Node:
    return replace(Node(name, "host", 100 + ord(name[0]), 2), **fields)  # type: ignore[arg-type]


def running(*names: str, generation: int = 3) -> World:
    members = tuple(Member(name, "host", 1, 2, 2 * place) for place, name in enumerate(names))
    return World(generation, JobState.RUNNING, members)


def nodes(*those: Node) -> dict[str, Node]:
    return {one.id: one for one in those}


def names(world: World | None) -> list[str]:
    assert world is not None
    return [member.id for member in world.nodes]


def test_job_forms_when_no_more_follow() -> None:
    there = nodes(node("a"), node("b"))
    assert next_world(World(), there, LocalObservation(quiet_s=0.5), RULES) is None
    world = next_world(World(), there, LocalObservation(quiet_s=1.0), RULES)
    assert world is not None
    assert (world.generation, world.state, names(world)) == (0, JobState.RUNNING, ["a", "b"])
    assert [member.first_rank for member in world.nodes] == [0, 2]


def test_a_full_job_forms_at_once() -> None:
    there = nodes(*(node(name) for name in "abcd"))
    assert names(next_world(World(), there, LocalObservation(), RULES)) == ["a", "b", "c"]


def test_too_few_nodes_wait() -> None:
    rules = replace(RULES, min_nodes=2)
    assert next_world(World(), nodes(node("a")), LocalObservation(quiet_s=1e9), rules) is None
    assert next_world(World(), nodes(node("a"), node("b", leaving=True)), LocalObservation(quiet_s=1e9), rules) is None


def test_lost_member_ends_the_generation() -> None:
    world = next_world(running("a", "b", "c"), nodes(node("a"), node("c")), LocalObservation(), RULES)
    assert names(world) == ["a", "c"]
    assert world is not None
    assert world.generation == 4
    assert "lost b" in world.message


def test_forgiven_errors_count_in_all_worlds() -> None:
    there = nodes(node("a"), node("b"))
    world = next_world(running("a", "b"), there, LocalObservation(restart="it raised", forgives=True), RULES)
    assert world is not None
    assert world.forgiven == 1
    for moment in (LocalObservation(restart="a worker died"), LocalObservation(restart="it raised", forgives=True)):
        members = tuple(replace(member, port=1) for member in world.nodes)  # they have another one for the next world
        world = next_world(replace(world, nodes=members), there, moment, RULES)
        assert world is not None
    assert world.forgiven == 2
    world = next_world(world, nodes(node("a")), LocalObservation(), replace(RULES, min_nodes=2))
    assert world is not None
    assert (world.state, world.forgiven) == (JobState.FORMING, 2)
    world = next_world(world, there, LocalObservation(quiet_s=1e9), RULES)
    assert world is not None
    assert World.decode(world.encode()).forgiven == 2


def test_too_few_survivors_form_again() -> None:
    world = next_world(running("a", "b"), nodes(node("a")), LocalObservation(), replace(RULES, min_nodes=2))
    assert world is not None
    assert (world.state, world.generation, world.nodes) == (JobState.FORMING, 4, ())
    assert "1 of at least 2" in world.message


def test_all_lost_is_followed_when_sure() -> None:
    waiting = nodes(node("c"))
    assert next_world(running("a", "b"), waiting, LocalObservation(quiet_s=9.9), RULES) is None
    assert names(next_world(running("a", "b"), waiting, LocalObservation(quiet_s=10.0), RULES)) == ["c"]
    assert names(next_world(running("a", "b"), waiting, LocalObservation(dead=frozenset("ab")), RULES)) == ["c"]
    assert next_world(running("a", "b"), waiting, LocalObservation(dead=frozenset("a")), RULES) is None


def test_next_generation_waits_for_a_port() -> None:
    world = running("a", "b")
    used = world.nodes[0].port
    assert next_world(world, nodes(node("a", port=used)), LocalObservation(), RULES) is None
    assert names(next_world(world, nodes(node("a", port=used + 1)), LocalObservation(), RULES)) == ["a"]
    assert names(next_world(world, nodes(node("b", port=used)), LocalObservation(), RULES)) == ["b"]


def test_restart_keeps_the_members() -> None:
    there = nodes(node("a"), node("b"))
    world = next_world(running("a", "b"), there, LocalObservation(restart="a worker died"), RULES)
    assert names(world) == ["a", "b"]
    assert world is not None
    assert (world.message, world.generation) == ("a worker died", 4)


def test_nodes_join_after_a_pause() -> None:
    world, there = running("a", "b"), nodes(node("a"), node("b"), node("c"))
    assert next_world(world, there, LocalObservation(node="c"), RULES) is None, (
        "whoever joins does not know what can pause"
    )
    asked = next_world(world, there, LocalObservation(node="a", pause_step=17), RULES)
    assert asked == replace(world, pause_at=17)
    assert asked is not None
    assert next_world(asked, there, LocalObservation(node="b", pause_step=20, pausing_s=1.0), RULES) is None
    there["a"] = replace(there["a"], paused=3)
    assert next_world(asked, there, LocalObservation(node="b", pausing_s=1.0), RULES) is None
    there["b"] = replace(there["b"], paused=3)
    assert names(next_world(asked, there, LocalObservation(node="b", pausing_s=1.0), RULES)) == ["a", "b", "c"]


def test_pause_is_not_waited_for_forever() -> None:
    world, there = replace(running("a"), pause_at=17), nodes(node("a"), node("b"))
    assert next_world(world, there, LocalObservation(node="a", pausing_s=4.9), RULES) is None
    assert names(next_world(world, there, LocalObservation(node="a", pausing_s=5.0), RULES)) == ["a", "b"]


def test_stepless_script_is_not_paused() -> None:
    there = nodes(node("a"), node("b"))
    assert names(next_world(running("a"), there, LocalObservation(node="a"), RULES)) == ["a", "b"]


def test_unwanted_pause_is_taken_back() -> None:
    """A pause is taken back when nobody wants it any more."""
    world = replace(running("a"), pause_at=17)
    assert next_world(world, nodes(node("a")), LocalObservation(node="a", pausing_s=3.0), RULES) == running("a")
    ending = nodes(node("a", finished=3), node("b"))
    assert next_world(replace(running("a", "b"), pause_at=17), ending, LocalObservation(node="b"), RULES) == running(
        "a", "b"
    )


def test_leaver_is_replaced_after_a_pause() -> None:
    """A node leaves after a pause and the one that waits takes its place."""
    world = replace(running("a", "b", "c"), pause_at=9)
    there = nodes(node("a", paused=3, leaving=True), node("b", paused=3), node("c", paused=3), node("d"))
    assert names(next_world(world, there, LocalObservation(node="b"), RULES)) == ["d", "b", "c"]


def test_full_job_does_not_pause_for_reserve() -> None:
    there = nodes(*(node(name) for name in "abcd"))
    assert next_world(running("a", "b", "c"), there, LocalObservation(node="a", pause_step=5), RULES) is None


def test_job_is_done_when_all_finished() -> None:
    world = running("a", "b")
    there = nodes(node("a", finished=3), node("b", finished=2))
    assert next_world(world, there, LocalObservation(node="a"), RULES) is None
    there["b"] = replace(there["b"], finished=3)
    done = next_world(world, there, LocalObservation(node="a"), RULES)
    assert done is not None
    assert done.state is JobState.DONE
    assert next_world(done, {}, LocalObservation(quiet_s=1e9), RULES) is None


def test_nobody_joins_a_job_that_is_ending() -> None:
    there = nodes(node("a", finished=3), node("b"), node("c"))
    assert next_world(running("a", "b"), there, LocalObservation(node="b", pause_step=4), RULES) is None


def test_a_failed_job_stays_failed() -> None:
    world = failed_world(replace(running("a"), pause_at=3), "ValueError: x")
    assert (world.state, world.message, world.pause_at) == (JobState.FAILED, "ValueError: x", None)
    assert next_world(world, nodes(node("a"), node("b")), LocalObservation(quiet_s=1e9), RULES) is None


@pytest.mark.parametrize(
    ("before", "present", "after"),
    [
        ([], "ba", "ba"),
        (list("abc"), "abc", "abc"),
        (list("abc"), "ac", "ac"),
        (list("abc"), "bc", "cb"),
        (list("abc"), "xbc", "xbc"),
        (list("abc"), "acx", "axc"),
        (list("abcd"), "d", "d"),
        (list("ab"), "abxy", "abxy"),
    ],
)
def test_survivors_keep_their_place(before: list[str], present: str, after: str) -> None:
    assert assign_ranks(before, present) == list(after)


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True, min_size=1))
def test_nobody_moves_who_need_not(before: list[int], present: list[int]) -> None:
    old, there = [str(one) for one in before], [str(one) for one in present]
    order = assign_ranks(old, there)
    assert sorted(order) == sorted(there)
    for name in there:
        if name in old and old.index(name) < len(there):
            assert order.index(name) == old.index(name)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"id": 1, "addr": 2}', b'{"state": "odd"}', b"\xff"])
def test_records_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="record"):
        World.decode(data)
    with pytest.raises(ProtocolError, match="record"):
        Node.decode(data)


def test_newer_record_fields_are_ignored() -> None:
    """What a later version adds to a record breaks nobody."""
    for record in (node("a"), running("a", "b")):
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
