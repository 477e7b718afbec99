"""Restores from memory: ranks announce what their slots hold, and a rank that lacks the chosen state receives it.

If a rank lacks a state, another rank's whole slot is copied into its slot; restoring is then local for all ranks. Only
a sharded state that is restored into a world of another size is assembled from parts during the transfer. A part that
is in no rank's own slots comes from a rank that held the same shards (with HSDP, several ranks hold them, and the saved
metadata says which), or else from a replica. A state of a later generation is preferred to a state of an earlier
generation, even if the earlier generation reached a later step: the work of a world that the other ranks had given up
on is not restored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from edl.collective import ranks
from edl.collective.checkpoint.encoding import from_json, parse_meta, to_json
from edl.collective.checkpoint.memory.copying import slot_bytes
from edl.collective.checkpoint.memory.replica_slots import ReplicaSlots
from edl.collective.checkpoint.memory.slots import (
    HEADER_NBYTES,
    CompleteSlot,
    SlotHeader,
    SlotPair,
    StateVersion,
)
from edl.collective.checkpoint.state.state import State
from edl.errors import ProtocolError

logger = logging.getLogger(__name__)


ShardHolders = Mapping[SlotHeader, Collection[int]]  # ranks that held the same shards, by the header of a part


@dataclass(frozen=True)
class RestorePlan:
    """How a world of `len(sources)` ranks resumes."""

    generation: int  # the state; `world` is the number of ranks that saved it
    step: int
    world: int
    holders: tuple[int, ...]  # by saving rank: the present rank that has its part; -1 if that part is not used
    sources: tuple[int, ...]  # for each present rank, the rank whose slot it copies; empty to reassemble parts
    parts: tuple[int, ...]  # for each present rank, the rank of that world whose part it takes
    from_replicas: bool = False  # whether some part is in no rank's own slots, but only in a replica, which may be old

    def matches_slot(self, header: SlotHeader, part: int) -> bool:
        return (*header.version, header.rank) == (self.generation, self.step, self.world, part)


def choose_state(
    offers: Sequence[Sequence[SlotHeader]],
    replicas: Sequence[Sequence[SlotHeader]] = (),
    same: ShardHolders | None = None,
    before: int | None = None,
) -> RestorePlan | None:
    """Choose the newest state of which every required part is in some rank's memory; None if there is none.

    `offers` are the headers of each present rank's slots. `replicas` are the headers of the lost ranks' replicas on
    each rank's host. Replicas count only for parts of sharded states that are in no rank's own slots. `same` are ranks
    that held the same shards; any of these ranks is a better source than a replica, because a replica's state must be
    compared with the state in storage.

    `before` is the step after which the workers hung, or None. A state from before that step is preferred if every rank
    of this world has its own part of that state, so that whatever the script did after step `before` is repeated.
    """
    held = _group_by_state(offers)
    size = len(offers)
    earlier = [state for state in held if before is not None and state[1] < before and state[2] == size]
    entire = [state for state in earlier if len(held[state]) == size]
    if entire:
        held = {max(entire): held[max(entire)]}
        replicas = ()
    copied = _group_by_state([[header for header in headers if header.sharded] for headers in replicas])
    sharded = {header.version for headers in (*offers, *replicas) for header in headers if header.sharded}
    for state in sorted(held.keys() | copied.keys(), reverse=True):
        parts = held.get(state, {})
        if state not in sharded:
            return _plan_replicated(*_newest_entire(state, held, size), size)
        equal_parts = _equal_parts(state, parts, same or {})
        lost = {
            part: givers
            for part, givers in copied.get(state, {}).items()
            if part not in parts and part not in equal_parts
        }
        if parts.keys() | lost.keys() | equal_parts.keys() >= set(range(state[2])):
            return replace(_plan_sharded(state, parts | lost, equal_parts, size), from_replicas=bool(lost))
    return None


def _newest_entire(
    newest: StateVersion, held: dict[StateVersion, dict[int, list[int]]], size: int
) -> tuple[StateVersion, dict[int, list[int]]]:
    """Return the newest state of which all ranks have their own parts; `newest` if none, or if the size has changed."""
    # With `newest`, a rank that died before its save gets another rank's part, and its random numbers start over.
    for state in sorted(held, reverse=True):
        if state[2] == size == newest[2] == len(held[state]):
            return state, held[state]
    return newest, held[newest]


def _equal_parts(state: StateVersion, parts: Mapping[int, object], same: ShardHolders) -> dict[int, int]:
    """Return an offered part with the same shards for each part that no rank offers; several such parts take turns."""
    alike: dict[int, list[int]] = {}
    for header, equals in sorted(same.items()):
        if header.version == state and header.rank in parts:
            for rank in equals:
                if rank not in parts:
                    alike.setdefault(rank, []).append(header.rank)
    return {part: found[part % len(found)] for part, found in alike.items()}


def _group_by_state(offers: Sequence[Sequence[SlotHeader]]) -> dict[StateVersion, dict[int, list[int]]]:
    """Return the present ranks that offer each part, by state and by the rank that saved the part."""
    held: dict[StateVersion, dict[int, list[int]]] = {}
    for rank, headers in enumerate(offers):
        for header in headers:
            held.setdefault(header.version, {}).setdefault(header.rank, []).append(rank)
    return held


def _plan_replicated(state: StateVersion, parts: dict[int, list[int]], size: int) -> RestorePlan:
    """Choose the source of each rank's part.

    The source is the first of these that is possible: the rank's own slot with its own part; a rank that holds that
    part, if the world has the same size; the rank's own slot with any part; the ranks that hold any part, in turn.
    """
    part_by_rank = {rank: part for part, givers in parts.items() for rank in givers}
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
    """Plan that each rank takes its own part or an equal part; if the world size differs, plan a reassembly."""
    world = state[2]
    holders = tuple(parts[part][0] if part in parts else -1 for part in range(world))
    if world != size:
        return RestorePlan(*state, holders, (), ())
    taken = tuple(rank if rank in parts else equal_parts[rank] for rank in range(size))
    sources = tuple(rank if rank in parts[part] else parts[part][0] for rank, part in enumerate(taken))
    return RestorePlan(*state, holders, sources, taken)


T = TypeVar("T")


@dataclass(frozen=True)
class RestoredState:
    """A state that was restored."""

    step: int
    world: int


@dataclass(frozen=True)
class _LocalSlots:
    """Slots in this host's memory: this rank's own, including kept states, and replicas."""

    own: list[CompleteSlot]
    replicas: list[CompleteSlot]


def restore_from_memory(
    state: State,
    slots: SlotPair,
    group: ranks.Group = None,
    *,
    replica_slots: ReplicaSlots | None = None,
    stored: Callable[[], tuple[int, int]] | None = None,
    since: int = 0,
    hung_after: int | None = None,
) -> RestoredState | None:
    """Restore the newest state that is complete in all ranks' memory together; None if there is none. Collective.

    `stored` returns the generation and step of the newest state in storage. If that state is newer, None is returned.
    All ranks call `stored` if a part comes only from a replica, or if the state in memory is older than every agent
    here, because nodes that are gone may have stored a newer state. `since` is the generation in which this rank's
    agent joined. If the workers hung, `hung_after` is the last step of the worker that ran here, or -1 if none ran.
    """
    held = _read_local_slots(slots, replica_slots)
    own, replicas, same, first, hung = _gather_offers(held, since, hung_after, group)
    plan = choose_state(own, replicas, same, hung)
    if plan is None:
        return None
    if hung is not None and plan.step >= hung:
        logger.warning(
            "the workers hung after step %d, and no earlier state is in memory: whatever the script did after that "
            "step, such as an evaluation without Checkpointer.evaluate(), is skipped",
            plan.step,
        )
    inherited = first > plan.generation
    if stored is not None and (plan.from_replicas or inherited):
        there = stored()
        if there > (plan.generation, plan.step):
            logger.info("storage has the state after step %d, memory an older one, after step %d", there[1], plan.step)
            return None
    if plan.from_replicas:
        logger.info("resuming after step %d, the newest for which replicas of lost ranks' states exist", plan.step)
    if plan.sources:
        _exchange_slots(plan, held, slots, group)
        found = _adopt_slot(plan, plan.parts[ranks.rank_of(group)], slots, replica_slots)
        _load_slot(
            state, found, local=plan.world == ranks.world_of(group) and found.header.rank == ranks.rank_of(group)
        )
    else:
        _assemble_state(state, plan, held, group)
        for pair in _slot_pairs(slots, replica_slots):
            for found in pair.find_complete():
                if any(plan.matches_slot(found.header, part) for part in range(plan.world)):
                    pair.keep_only_slot(found)
    if replica_slots is not None:
        replica_slots.drop_newer_than((plan.generation, plan.step, plan.world))
    return RestoredState(plan.step, plan.world)


def _slot_pairs(slots: SlotPair, replica_slots: ReplicaSlots | None) -> list[SlotPair]:
    return [slots] if replica_slots is None else [slots, replica_slots.slots]


def _read_local_slots(slots: SlotPair, replica_slots: ReplicaSlots | None) -> _LocalSlots:
    own = [slot for pair in _slot_pairs(slots, replica_slots) for slot in pair.find_complete()]
    replicas = [] if replica_slots is None else replica_slots.find_replicas()
    return _LocalSlots(*([slot for slot in held if slot.read_metadata() is not None] for held in (own, replicas)))


def _gather_offers(
    held: _LocalSlots, since: int, hung_after: int | None, group: ranks.Group
) -> tuple[list[list[SlotHeader]], list[list[SlotHeader]], dict[SlotHeader, list[int]], int, int | None]:
    """Gather what the ranks hold.

    Returns the headers of each rank's own slots, and of the replicas that each rank finds; for each slot, the ranks
    that held the same shards; the earliest generation in which an agent joined; and the step of the first hang.
    """
    mine: list[Any] = [
        *([_header_row(found.header) for found in kind] for kind in (held.own, held.replicas)),
        [_shard_holders(found, group) for found in held.own],
        since,
        -1 if hung_after is None else hung_after,
    ]
    offers = [mine]
    if ranks.world_of(group) > 1:
        offers = [from_json(data) for data in ranks.gather_bytes(to_json(mine), group)]
    own, replicas = ([[SlotHeader(*row) for row in offer[kind]] for offer in offers] for kind in (0, 1))
    same = {
        header: equals
        for headers, offer in zip(own, offers, strict=True)
        for header, equals in zip(headers, offer[2], strict=True)
    }
    hung = min((offer[4] for offer in offers if offer[4] >= 0), default=None)
    return own, replicas, same, min(offer[3] for offer in offers), hung


def _shard_holders(found: CompleteSlot, group: ranks.Group) -> list[int]:
    """Return the ranks that held the same shards as a slot; [] unless `group` is None: other groups renumber ranks."""
    meta = found.read_metadata() if found.header.sharded and group is None else None
    return [] if meta is None else list(parse_meta(meta).holders)


def _header_row(header: SlotHeader) -> list[int | bool]:
    return [header.generation, header.step, header.world, header.rank, False, header.sharded]


def _adopt_slot(plan: RestorePlan, part: int, slots: SlotPair, replica_slots: ReplicaSlots | None) -> CompleteSlot:
    """Return this rank's own slot with its part, after copying it from a replica on this host if necessary."""
    for pair in _slot_pairs(slots, replica_slots):
        for found in pair.find_complete():
            if plan.matches_slot(found.header, part):
                pair.keep_only_slot(found)
                return found
    replica = _require_slot(_read_local_slots(slots, replica_slots), plan, part)
    copy = _require_unchanged(replica.copy_contents(), replica)
    _, memory = slots.begin_write(len(copy.data), len(copy.meta))
    memory[HEADER_NBYTES : HEADER_NBYTES + len(copy.data)] = copy.data
    slots.commit_write(copy.header, len(copy.data), copy.meta)
    return _adopt_slot(plan, part, slots, replica_slots)


def _require_slot(held: _LocalSlots, plan: RestorePlan, part: int) -> CompleteSlot:
    found = next((slot for slot in (*held.own, *held.replicas) if plan.matches_slot(slot.header, part)), None)
    if found is None:
        raise ProtocolError(
            f"the state after step {plan.step} was in memory, but is gone: is another process using this memory?"
        )
    return found


def _load_slot(state: State, found: CompleteSlot, local: bool) -> None:
    meta = parse_meta(_require_unchanged(found.read_metadata(), found))
    loading = state.begin_load(meta, local=local)
    loading.fill_tensors(meta.entries, slot_bytes(found.map_file(), found.data_nbytes))
    loading.finish()


def _exchange_slots(plan: RestorePlan, held: _LocalSlots, slots: SlotPair, group: ranks.Group) -> None:
    """Copy slots to the ranks that lack them, one slot after another, in an order that all ranks know."""
    rank = ranks.rank_of(group)
    wanted = [(dst, src) for dst, src in enumerate(plan.sources) if dst != src]
    taking = plan.sources[rank] != rank
    giving = {dst: _require_slot(held, plan, plan.parts[dst]) for dst, src in wanted if src == rank}
    # A rank that both sends and receives could overwrite what it has yet to send; an agent could replace a replica.
    moving = giving.values() if taking else [found for found in giving.values() if found in held.replicas]
    kept = {found: _require_unchanged(found.copy_contents(), found) for found in moving}
    for dst, src in wanted:
        if src == rank:
            found = giving[dst]
            meta = _require_unchanged(found.read_metadata(), found) if found not in kept else kept[found].meta
            data = (
                slot_bytes(found.map_file(), found.data_nbytes)
                if found not in kept
                else ranks.byte_tensor(kept[found].data)
            )
            _send_slot(found.header, meta, data, ranks.global_rank(dst, group), group)
        elif dst == rank:
            logger.info("taking the state after step %d from rank %d", plan.step, src)
            _receive_slot(slots, ranks.global_rank(src, group), group)


def _send_slot(header: SlotHeader, meta: bytes, data: torch.Tensor, dst: int, group: ranks.Group) -> None:
    ranks.send_bytes(to_json([*_header_row(header), data.numel()]), dst, group)
    ranks.send_bytes(meta, dst, group)
    ranks.send_tensor(data, dst, group)


def _receive_slot(slots: SlotPair, src: int, group: ranks.Group) -> None:
    head, meta = (ranks.receive_bytes(src, group) for _ in range(2))
    *row, nbytes = from_json(head)
    _, memory = slots.begin_write(nbytes, len(meta))
    ranks.receive_tensor(slot_bytes(memory, nbytes), src, group)
    slots.commit_write(SlotHeader(*row), nbytes, meta)


def _require_unchanged(read: T | None, found: CompleteSlot) -> T:
    """Return data that was read from a slot that no other process should write to."""
    if read is None:
        raise ProtocolError(f"{found.path} was overwritten while it was read: is another process using this memory?")
    return read


def _assemble_state(state: State, plan: RestorePlan, held: _LocalSlots, group: ranks.Group) -> None:
    """Broadcast every part of a sharded state; each rank takes the regions that it needs now."""
    loading, seen = None, set()
    offered = [(part, holder) for part, holder in enumerate(plan.holders) if holder >= 0]
    for part, holder in offered:
        found = _require_slot(held, plan, part) if holder == ranks.rank_of(group) else None
        copy = _require_unchanged(found.copy_contents(), found) if found is not None else None
        src = ranks.global_rank(holder, group)
        meta = parse_meta(ranks.broadcast_bytes(copy.meta if copy else b"", src, group))
        loading = loading or state.begin_load(meta, local=False)
        for entry in meta.entries:
            new = (entry.key, entry.starts) not in seen  # some layouts keep the same part on several ranks
            wanted = entry.scope == "shard" or (entry.scope == "replicated" and part == offered[0][0])
            if entry.nbytes and new and wanted:
                seen.add((entry.key, entry.starts))
                data = copy.data[entry.offset : entry.offset + entry.nbytes] if copy else bytearray(entry.nbytes)
                shown = torch.frombuffer(data, dtype=torch.uint8)
                ranks.broadcast_tensor(shown, src, group)
                loading.fill_tensors([replace(entry, offset=0)], shown)
    assert loading is not None
    loading.finish()
