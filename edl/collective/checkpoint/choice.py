"""Which of the states that survived in memory a new world goes on from, and who gives it to whom: pure.

A generation that was formed later counts before one that got further: what a world did that others had given up on
does not come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edl.collective.checkpoint.slots import Label

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """What a world of `len(sources)` ranks goes on from.

    Attributes:
        generation, step, world: which state; `world` is how many ranks saved it.
        holders: for each rank of that world, the present rank whose slot has its part; -1 where nobody needs it.
        sources: for each present rank, the one whose slot it takes its state from: its own if it has it. Empty if the
            parts must be put together anew, because the state is sharded and the world had another size.
        parts: for each present rank, of which rank of that world the slot is that it takes.
        from_replicas: whether some part is in nobody's own slots any more, but in a replica, which may be an old one.
    """

    generation: int
    step: int
    world: int
    holders: tuple[int, ...]
    sources: tuple[int, ...]
    parts: tuple[int, ...]
    from_replicas: bool = False

    def matches(self, label: Label, part: int) -> bool:
        """Whether a slot holds rank `part`'s share of this state."""
        return (label.generation, label.step, label.world, label.rank) == (
            self.generation,
            self.step,
            self.world,
            part,
        )


def choose(offers: Sequence[Sequence[Label]], replicas: Sequence[Sequence[Label]] = ()) -> Choice | None:
    """The newest state of which every part that is needed is in somebody's memory.

    Args:
        offers: what is in the slots of each present rank.
        replicas: of which lost ranks' slots each present rank finds a replica on its host. They count for sharded
            states, where nobody has the part in slots of its own.
    """
    held = _by_state(offers)
    copied = _by_state([[one for one in labels if one.sharded] for labels in replicas])
    sharded = {_state(label) for labels in (*offers, *replicas) for label in labels if label.sharded}
    for state in sorted(held.keys() | copied.keys(), reverse=True):
        parts = held.get(state, {})
        if state not in sharded:
            return _replicated(state, parts, len(offers))
        lost = {part: ranks for part, ranks in copied.get(state, {}).items() if part not in parts}
        if parts.keys() | lost.keys() >= set(range(state[2])):
            return replace(_sharded(state, parts | lost, len(offers)), from_replicas=bool(lost))
    return None


def _state(label: Label) -> tuple[int, int, int]:
    return label.generation, label.step, label.world


def _by_state(offers: Sequence[Sequence[Label]]) -> dict[tuple[int, int, int], dict[int, list[int]]]:
    """State -> rank that saved a part of it -> present ranks that offer that part."""
    held: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    for rank, labels in enumerate(offers):
        for label in labels:
            held.setdefault(_state(label), {}).setdefault(label.rank, []).append(rank)
    return held


def _replicated(state: tuple[int, int, int], parts: dict[int, list[int]], size: int) -> Choice:
    """Everybody takes what it has, or else its rank's, or else anybody's, with those who give taking turns."""
    own = {rank: part for part, ranks in parts.items() for rank in ranks}
    givers = sorted(own)
    sources, taken, turn = [], [], 0
    for rank in range(size):
        exact = parts.get(rank, []) if state[2] == size else []
        if rank in exact:
            source, part = rank, rank
        elif exact:
            source, part = exact[0], rank
        elif rank in own:
            source, part = rank, own[rank]
        else:
            source = givers[turn % len(givers)]
            part, turn = own[source], turn + 1
        sources.append(source)
        taken.append(part)
    return Choice(*state, (-1,) * state[2], tuple(sources), tuple(taken))


def _sharded(state: tuple[int, int, int], parts: dict[int, list[int]], size: int) -> Choice:
    """Each takes its rank's part; in a world of another size all parts are shown to all."""
    world = state[2]
    holders = tuple(parts[part][0] for part in range(world))
    if world != size:
        return Choice(*state, holders, (), ())
    sources = tuple(rank if rank in parts[rank] else holders[rank] for rank in range(size))
    return Choice(*state, holders, sources, tuple(range(size)))
