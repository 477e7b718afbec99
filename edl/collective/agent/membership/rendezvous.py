"""Which nodes train together: a plain state machine over the records in the Store (`edl.collective.job_records`).

All agents look at the same records and may compute the next world from them (`next_world`); compare-and-set lets one
of them be first, and the others follow. So there is no leader to lose, and never a second world beside the first: a
world that was not written is not there.

    forming ──enough nodes──> running ──every member finished──> done
       ^                       │  │
       └──too few are left─────┘  └──the user's code failed──> failed

A new generation begins with each change of members and each restart. Whoever wants members to come or go without losing
a step first has everybody pause after one and the same step (`World.pause_at`). Nothing here waits, reads a clock
or talks to anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from edl.collective.job_records import JobState, Member, Node, World

__all__ = ["LocalObservation", "RendezvousSettings", "assign_ranks", "failed", "next_world"]

_MESSAGE = 16_000


@dataclass(frozen=True)
class RendezvousSettings:
    """What the user said.

    Attributes:
        min_nodes, max_nodes: of a world.
        last_call_s: how long to wait for more nodes once there are enough and no new one came.
        pause_timeout_s: how long to wait for all workers to pause before they are stopped as they are.
        takeover_s: how long to wait before nodes that were not members go on with a job whose members are all gone.
            Within that time an agent that cannot reach the Store has stopped its workers, so that there are never two
            worlds.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float = 1.0
    pause_timeout_s: float = 10.0
    takeover_s: float = 10.0


@dataclass(frozen=True)
class LocalObservation:
    """What the agent that asks knows besides the records.

    Attributes:
        node: its id, may be empty for a member. Whether workers can pause is for members to know, so who waits to join
            leaves that to them.
        quiet_s: for how long it has seen no node come or go.
        pausing_s: for how long it has seen the present `pause_at`.
        pause_needs_s: how long the steps until a pause may take, if that is longer than the rules' limit.
        pause_step: a step that all workers can still pause after; None if they report no steps.
        restart: why its workers need a new generation; empty if they do not.
        forgives: that is an error of the script's own, of which only so many are forgiven.
        dead: nodes of which it knows for certain that they and their workers are no more.
    """

    node: str = ""
    quiet_s: float = 0.0
    pausing_s: float = 0.0
    pause_needs_s: float = 0.0
    pause_step: int | None = None
    restart: str = ""
    forgives: bool = False
    dead: frozenset[str] = frozenset()


def next_world(
    world: World, nodes: Mapping[str, Node], moment: LocalObservation, rules: RendezvousSettings
) -> World | None:
    """What the record of the job should become, None if it is right as it is.

    Args:
        world: the record; `World()` if there is none.
        nodes: those whose lease lives, read after `world`.
        moment: what the caller knows besides.
        rules: what the user said.
    """
    if world.ended:
        return None
    if world.state is JobState.FORMING:
        return _formed(world, nodes, moment, rules)
    members = [member.id for member in world.nodes]
    if all(name in nodes and nodes[name].finished == world.generation for name in members):
        return replace(world, state=JobState.DONE, message="the script ended on every node", pause_at=None)
    lost = [name for name in members if name not in nodes]
    if len(lost) == len(members) and not moment.dead.issuperset(lost) and moment.quiet_s < rules.takeover_s:
        return None
    if lost:
        return _next_generation(world, nodes, rules, f"lost {_names(lost)}")
    if moment.restart:
        forgiven = replace(world, forgiven=world.forgiven + moment.forgives)
        return _next_generation(forgiven, nodes, rules, moment.restart)
    return _changed(world, nodes, moment, rules)


def failed(world: World, message: str) -> World:
    """The job ends for everybody, because of the user's code. Of a long message the end is kept, where the error is."""
    kept = (
        message if len(message) <= _MESSAGE else f"{message[: _MESSAGE // 4]}\n[...]\n{message[-_MESSAGE * 3 // 4 :]}"
    )
    return replace(world, state=JobState.FAILED, message=kept, pause_at=None)


def _formed(
    world: World, nodes: Mapping[str, Node], moment: LocalObservation, rules: RendezvousSettings
) -> World | None:
    ready = [node for node in nodes.values() if not node.leaving]
    enough = len(ready) >= rules.min_nodes and moment.quiet_s >= rules.last_call_s
    if enough or len(ready) >= rules.max_nodes:
        return _next_generation(
            world, nodes, rules, "one node is there" if len(ready) == 1 else f"{len(ready)} nodes are there"
        )
    return None


def _changed(
    world: World, nodes: Mapping[str, Node], moment: LocalObservation, rules: RendezvousSettings
) -> World | None:
    """Members that want to leave, or nodes that want to join: pause first, then the next world."""
    members = {member.id for member in world.nodes}
    if moment.node and moment.node not in members:
        return None
    leaving = [name for name in members if nodes[name].leaving]
    ending = any(nodes[name].finished == world.generation for name in members)
    if ending and leaving:
        return _next_generation(world, nodes, rules, f"{_names(leaving)} left")  # nobody makes steps to pause after
    room = rules.max_nodes - len(members) + len(leaving)
    joining = [name for name, node in nodes.items() if name not in members and not node.leaving][:room]
    if ending:
        joining = []  # whoever comes now would find nothing to do
    if not leaving and not joining:
        return _unpaused(world)
    why = "; ".join(
        part for part in (leaving and f"{_names(leaving)} left", joining and f"{_names(joining)} joined") if part
    )
    if moment.pause_step is None and world.pause_at is None:
        return _next_generation(world, nodes, rules, why)  # the script saves nothing that could be gone on from
    if world.pause_at is None:
        return replace(world, pause_at=moment.pause_step)
    paused = all(nodes[name].paused == world.generation for name in members)
    if paused or moment.pausing_s >= max(rules.pause_timeout_s, moment.pause_needs_s):
        return _next_generation(world, nodes, rules, why)
    return None


def _unpaused(world: World) -> World | None:
    """Nobody wants to come or go any more: workers that paused already go on when they see it."""
    return replace(world, pause_at=None) if world.pause_at is not None else None


def _next_generation(world: World, nodes: Mapping[str, Node], rules: RendezvousSettings, why: str) -> World | None:
    """The next generation, of the members that stay and of nodes that wait.

    None while its first node has not yet replaced the port that this generation uses: its store holds this
    generation's addresses, and whoever read those would wait for a process that is gone.
    """
    stay = [member.id for member in world.nodes if member.id in nodes and not nodes[member.id].leaving]
    wait = sorted(name for name, node in nodes.items() if name not in stay and not node.leaving)
    present = [*stay, *wait][: rules.max_nodes]
    generation = world.generation + 1
    if len(present) < rules.min_nodes:
        why = f"{why}; {len(present)} of at least {rules.min_nodes} nodes are there"
        return World(generation, JobState.FORMING, (), why, forgiven=world.forgiven)
    order = assign_ranks([member.id for member in world.nodes], present)
    if world.nodes and world.nodes[0].port == nodes[order[0]].port and world.nodes[0].id == order[0]:
        return None
    members = tuple(_ranked(nodes[name] for name in order))
    return World(generation, JobState.RUNNING, members, why, forgiven=world.forgiven)


def assign_ranks(before: list[str], present: Iterable[str]) -> list[str]:
    """Put the nodes that are `present` in order, so that as many as can keep the place that they had `before`.

    Whoever cannot, because fewer nodes are left, and whoever is new fill the gaps, in their order.
    """
    present = list(present)
    places: list[str | None] = [None] * len(present)
    rest = []
    for name in present:
        place = before.index(name) if name in before else len(present)
        if place < len(present):
            places[place] = name
        else:
            rest.append(name)
    filling = iter(rest)
    return [name if name is not None else next(filling) for name in places]


def _ranked(nodes: Iterable[Node]) -> Iterable[Member]:
    first = 0
    for node in nodes:
        yield Member(node.id, node.addr, node.port, node.workers, first, node.replica_port, node.tether_port)
        first += node.workers


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
