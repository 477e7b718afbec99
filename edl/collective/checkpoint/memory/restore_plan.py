"""Which of the states that survived in memory a new world goes on from, and which rank gives it to which: pure.

A generation that was formed later counts before a generation that got further: what a world did that others had given
up on does not come back.

Where tensors are sharded within groups of ranks and the same from group to group (HSDP), several ranks hold the same
shards. They say so in what they save, so that any of them is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from edl.collective.checkpoint.memory.slots import SlotHeader, StateVersion

__all__ = ["RestorePlan", "ShardHolders", "choose_state"]

ShardHolders = Mapping[SlotHeader, Collection[int]]
"""For a part of a sharded state, the ranks that held the same shards."""


@dataclass(frozen=True)
class RestorePlan:
    """What a world of `len(sources)` ranks goes on from.

    Attributes:
        generation, step, world: which state; `world` is how many ranks saved it.
        holders: by rank of that world, the present rank whose slot has its part; -1 where the part is not needed, as
            another rank of that world held the same.
        sources: by present rank, the rank from whose slot it takes its state: its own if it has it. Empty if the
            parts must be put together anew, because the state is sharded and the world had another size.
        parts: by present rank, of which rank of that world the slot is that it takes.
        from_replicas: whether some part is in no rank's own slots any more, but in a replica, which may be an old one.
    """

    generation: int
    step: int
    world: int
    holders: tuple[int, ...]
    sources: tuple[int, ...]
    parts: tuple[int, ...]
    from_replicas: bool = False

    def matches_slot(self, header: SlotHeader, part: int) -> bool:
        """Return whether a slot holds rank `part`'s share of this state."""
        return (header.generation, header.step, header.world, header.rank) == (
            self.generation,
            self.step,
            self.world,
            part,
        )


def choose_state(
    offers: Sequence[Sequence[SlotHeader]],
    replicas: Sequence[Sequence[SlotHeader]] = (),
    same: ShardHolders | None = None,
) -> RestorePlan | None:
    """Choose the newest state of which every part that is needed is in some rank's memory.

    Args:
        offers: by present rank, what is in its slots.
        replicas: by present rank, of which lost ranks' slots it finds a replica on its host. They count for sharded
            states, where no rank has the part in slots of its own.
        same: which ranks held the same shards as the rank that saved a part. Any of them that is offered will do, and
            better than a replica, which costs the same and has to be compared with storage.

    Returns:
        The plan; None if there is no such state.
    """
    held = _group_by_state(offers)
    copied = _group_by_state([[header for header in headers if header.sharded] for headers in replicas])
    sharded = {header.version for headers in (*offers, *replicas) for header in headers if header.sharded}
    for state in sorted(held.keys() | copied.keys(), reverse=True):
        parts = held.get(state, {})
        if state not in sharded:
            return _plan_replicated(*_newest_entire(state, held, len(offers)), len(offers))
        equal_parts = _equal_parts(state, parts, same or {})
        lost = {
            part: ranks
            for part, ranks in copied.get(state, {}).items()
            if part not in parts and part not in equal_parts
        }
        if parts.keys() | lost.keys() | equal_parts.keys() >= set(range(state[2])):
            return replace(_plan_sharded(state, parts | lost, equal_parts, len(offers)), from_replicas=bool(lost))
    return None


def _newest_entire(
    newest: StateVersion, held: dict[StateVersion, dict[int, list[int]]], size: int
) -> tuple[StateVersion, dict[int, list[int]]]:
    """Return the newest state of which every rank has its own part, if the same world can go on from such a state.

    A rank that died before it had saved what others have would get another's: its random numbers would begin anew. So
    the save before, which all have, counts more: no rank can have saved more than once since, or it were gone.
    Where no state has all parts, as a host was lost, it is the newest.
    """
    for state in sorted(held, reverse=True):
        if state[2] == size == newest[2] == len(held[state]):
            return state, held[state]
    return newest, held[newest]


def _equal_parts(state: StateVersion, parts: Mapping[int, object], same: ShardHolders) -> dict[int, int]:
    """Return, for parts that no rank offers, a part that is offered and has the same shards; these take turns."""
    alike: dict[int, list[int]] = {}
    for header, ranks in sorted(same.items()):
        if header.version == state and header.rank in parts:
            for rank in ranks:
                if rank not in parts:
                    alike.setdefault(rank, []).append(header.rank)
    return {part: found[part % len(found)] for part, found in alike.items()}


def _group_by_state(offers: Sequence[Sequence[SlotHeader]]) -> dict[StateVersion, dict[int, list[int]]]:
    """Return, by state and by the rank that saved a part of it, the present ranks that offer that part."""
    held: dict[StateVersion, dict[int, list[int]]] = {}
    for rank, headers in enumerate(offers):
        for header in headers:
            held.setdefault(header.version, {}).setdefault(header.rank, []).append(rank)
    return held


def _plan_replicated(state: StateVersion, parts: dict[int, list[int]], size: int) -> RestorePlan:
    """Choose for each rank where its part comes from.

    In this order: its own slot with its own part; a rank that holds its part, if the world has the same size; its own
    slot with any part; the ranks that hold a part, in turn.
    """
    part_by_rank = {rank: part for part, ranks in parts.items() for rank in ranks}
    givers = sorted(part_by_rank)
    sources, taken, turn = [], [], 0
    for rank in range(size):
        exact = parts.get(rank, []) if state[2] == size else []
        if rank in exact:
            source, part = rank, rank
        elif exact:
            source, part = exact[0], rank
        elif rank in part_by_rank:
            source, part = rank, part_by_rank[rank]
        else:
            source = givers[turn % len(givers)]
            part, turn = part_by_rank[source], turn + 1
        sources.append(source)
        taken.append(part)
    return RestorePlan(*state, (-1,) * state[2], tuple(sources), tuple(taken))


def _plan_sharded(
    state: StateVersion, parts: dict[int, list[int]], equal_parts: Mapping[int, int], size: int
) -> RestorePlan:
    """Plan that a rank takes its own part or a part with the same shards; another world puts the parts together."""
    world = state[2]
    holders = tuple(parts[part][0] if part in parts else -1 for part in range(world))
    if world != size:
        return RestorePlan(*state, holders, (), ())
    taken = tuple(rank if rank in parts else equal_parts[rank] for rank in range(size))
    sources = tuple(rank if rank in parts[part] else parts[part][0] for rank, part in enumerate(taken))
    return RestorePlan(*state, holders, sources, taken)
