"""Agents of a job in simulated time: one store with compare-and-set, no processes, no threads, no sleep.

Each agent acts in three steps that others may come between: it reads the job's record, it reads the nodes' records, and
it proposes what `next_world` makes of what it read. `Job` checks every record as it is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from edl.collective.agent.membership.rendezvous import (
    LocalObservation,
    RendezvousSettings,
    assign_ranks,
    failed_world,
    next_world,
)
from edl.collective.job_records import JobState, Node, World

TTL_S = 1.5
TICK_S = 0.25
LAST_STEP = 12


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

    def fail(self, agent: SimAgent) -> None:
        """The user's code raised on a node."""
        if agent.running and self.world.generation == agent.generation and self.world.state is JobState.RUNNING:
            self.world, self.version = failed_world(self.world, "ValueError"), self.version + 1

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
