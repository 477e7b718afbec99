"""Decides which nodes train together: a plain state machine over the Store's records (`edl.collective.job_records`).

All agents see the same records and may compute the next world from them (`next_world`). Compare-and-set lets only one
agent write that world. So there is no leader that could be lost, and there are never two worlds at the same time.

    forming ──enough nodes──> running ──every member finished──> done
       ^                       │  │
       └──too few are left─────┘  └──the user's code failed──> failed

Every change of members and every restart begins a new generation. So that no step is lost when members join or leave,
all members first pause after the same step (`World.pause_at`). Nothing here waits, reads a clock or does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from edl.collective.job_records import JobState, Member, Node, World

T = TypeVar("T")

_MESSAGE_CHARS: Final = 16_000  # of a failed job's message: a long traceback, and far below Consul's limit of 512 KiB


@dataclass(frozen=True)
class RendezvousSettings:
    """How many nodes train together, and how long a rendezvous waits."""

    min_nodes: int  # least number of nodes to begin a world or continue it
    max_nodes: int  # largest number of nodes in a world; more wait until a place is free
    last_call_s: float = 1.0  # seconds to wait for more nodes after the last one joined, once there are enough
    pause_timeout_s: float = 10.0  # seconds to wait for all workers to pause before they are stopped as they are
    takeover_s: float = 10.0  # before others take a job over: members that cannot reach the Store have stopped by then


@dataclass(frozen=True)
class LocalObservation:
    """An agent's own observations, in addition to the records."""

    node: str = ""  # may be empty for a member; others leave pauses to members, who know whether workers can pause
    quiet_s: float = 0.0  # for how many seconds it has seen no node join or leave
    pausing_s: float = 0.0  # for how many seconds it has seen the current `pause_at`
    pause_needs_s: float = 0.0  # how many seconds the steps until a pause may take, if more than `pause_timeout_s`
    pause_step: int | None = None  # a step that all workers can still pause after; None if they report no steps
    restart: str = ""  # why its workers need a new generation; empty if they do not
    forgives: bool = False  # whether that is the script's own error, of which a job survives a limited number
    dead: frozenset[str] = frozenset()  # nodes that are certainly gone, with their workers


class ChangeTimer(Generic[T]):
    """Measures how long a value has been the same. All calls must pass seconds from the same clock."""

    def __init__(self, value: T, now_s: float) -> None:
        self.value = value
        self._since_s = now_s

    def record(self, value: T, now_s: float, *, restart: bool = False) -> bool:
        """Record the current value, and return whether it changed. A change, or `restart`, begins a new measurement."""
        changed = value != self.value
        if changed or restart:
            self.value = value
            self._since_s = now_s
        return changed

    def held_s(self, now_s: float) -> float:
        return now_s - self._since_s


def is_join_deferred(world: World, nodes: Mapping[str, Node]) -> bool:
    """Return whether joins wait for a busy member. They do not while a member leaves: preempted hosts soon vanish."""
    members = [nodes[member.id] for member in world.nodes if member.id in nodes]
    return any(node.busy == world.generation for node in members) and not any(node.leaving for node in members)


def next_world(
    world: World, nodes: Mapping[str, Node], observation: LocalObservation, settings: RendezvousSettings
) -> World | None:
    """Return what the record of the job should become, or None if it should not change."""
    if world.ended:
        return None
    if world.state is JobState.FORMING:
        return _formed(world, nodes, observation, settings)
    members = [member.id for member in world.nodes]
    if all(name in nodes and nodes[name].finished == world.generation for name in members):
        return replace(world, state=JobState.DONE, message="the script ended on every node", pause_at=None)
    lost = [name for name in members if name not in nodes]
    all_dead = observation.dead.issuperset(lost)
    if len(lost) == len(members) and not all_dead and observation.quiet_s < settings.takeover_s:
        return None
    if lost:
        return _next_generation(world, nodes, settings, f"lost {_names(lost)}")
    if observation.restart:
        forgiven = replace(world, forgiven=world.forgiven + observation.forgives)
        return _next_generation(forgiven, nodes, settings, observation.restart)
    return _changed(world, nodes, observation, settings)


def failed_world(world: World, message: str, cause: str = "", rank: int = -1) -> World:
    """Return the record of a job that failed because of the user's code on `rank`. A long message loses its middle."""
    kept = message
    if len(message) > _MESSAGE_CHARS:
        kept = f"{message[: _MESSAGE_CHARS // 4]}\n[...]\n{message[-_MESSAGE_CHARS * 3 // 4 :]}"
    return replace(world, state=JobState.FAILED, message=kept, pause_at=None, cause=cause, failed_rank=rank)


def _formed(
    world: World, nodes: Mapping[str, Node], observation: LocalObservation, settings: RendezvousSettings
) -> World | None:
    ready = [node for node in nodes.values() if not node.leaving]
    enough = len(ready) >= settings.min_nodes and observation.quiet_s >= settings.last_call_s
    if enough or len(ready) >= settings.max_nodes:
        return _next_generation(
            world, nodes, settings, "one node is ready" if len(ready) == 1 else f"{len(ready)} nodes are ready"
        )
    return None


def _changed(
    world: World, nodes: Mapping[str, Node], observation: LocalObservation, settings: RendezvousSettings
) -> World | None:
    """Let members leave and nodes join: first all workers pause, then the next world begins."""
    members = {member.id for member in world.nodes}
    if observation.node and observation.node not in members:
        return None
    leaving = [name for name in members if nodes[name].leaving]
    ending = any(nodes[name].finished == world.generation for name in members)
    if ending and leaving:  # no steps are left to pause after
        return _next_generation(world, nodes, settings, f"{_names(leaving)} left")
    room = settings.max_nodes - len(members) + len(leaving)
    joining = [name for name, node in nodes.items() if name not in members and not node.leaving][:room]
    if ending:
        joining = []  # a node that joins now would find nothing to do
    if not leaving and not joining:
        return replace(world, pause_at=None) if world.pause_at is not None else None  # paused workers then continue
    why = "; ".join(
        part for part in (leaving and f"{_names(leaving)} left", joining and f"{_names(joining)} joined") if part
    )
    if observation.pause_step is None and world.pause_at is None:
        return _next_generation(world, nodes, settings, why)  # the script saves nothing to continue from
    if world.pause_at is None:
        return replace(world, pause_at=observation.pause_step)
    paused = all(nodes[name].paused == world.generation for name in members)
    if paused or observation.pausing_s >= max(settings.pause_timeout_s, observation.pause_needs_s):
        return _next_generation(world, nodes, settings, why)
    return None


def _next_generation(world: World, nodes: Mapping[str, Node], settings: RendezvousSettings, why: str) -> World | None:
    """Return the next generation, made of the members that stay and of waiting nodes.

    Returns None while the first node of that generation still publishes the port of the current store, which holds
    addresses of lost workers.
    """
    stay = [member.id for member in world.nodes if member.id in nodes and not nodes[member.id].leaving]
    wait = sorted(name for name, node in nodes.items() if name not in stay and not node.leaving)
    present = [*stay, *wait][: settings.max_nodes]
    generation = world.generation + 1
    if len(present) < settings.min_nodes:
        why = f"{why}; {len(present)} of at least {settings.min_nodes} nodes are present"
        return World(generation, JobState.FORMING, (), why, forgiven=world.forgiven)
    order = assign_ranks([member.id for member in world.nodes], present)
    if world.nodes and world.nodes[0].port == nodes[order[0]].port and world.nodes[0].id == order[0]:
        return None
    members = tuple(_ranked(nodes[name] for name in order))
    return World(generation, JobState.RUNNING, members, why, forgiven=world.forgiven)


def assign_ranks(before: list[str], present: Iterable[str]) -> list[str]:
    """Return the nodes of the next world by rank. As many as possible keep their ranks; the others fill the gaps."""
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
