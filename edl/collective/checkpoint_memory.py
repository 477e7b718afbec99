"""Restoring from what survived in memory: everybody says what its slots hold, and who lacks something is given it.

Whoever lacks a state gets a copy of another rank's whole slot into its own, so that restoring is local for everybody,
and the state is in one more place. Only a sharded state in a world of another size is put together on the way.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from edl.collective import transfer
from edl.collective.checkpoint_choice import Choice, choose
from edl.collective.encoding import from_json, to_json
from edl.collective.slots import HEADER_NBYTES, Copy, Found, Label, SlotPair
from edl.collective.snapshot import parse_meta
from edl.collective.state import State
from edl.errors import ProtocolError

__all__ = ["Restored", "rank_of", "restore", "world_of"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What was restored: the last finished step, and how many ranks saved it."""

    step: int
    world: int


def world_of(group: transfer.Group) -> int:
    """Ranks in the group; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank_of(group: transfer.Group) -> int:
    """This rank in the group; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def restore(state: State, slots: SlotPair, group: transfer.Group = None) -> Restored | None:
    """Restore the newest state that is complete in the memory of the group's ranks together. Collective.

    Returns:
        What was restored, or None if there is nothing in memory.
    """
    mine = [found for found in slots.find() if found.meta() is not None]
    choice = choose(_offers([found.label for found in mine], group))
    if choice is None:
        return None
    if choice.sources:
        _hand_over(choice, mine, slots, group)
        found = _found(slots.find(), choice, choice.parts[rank_of(group)])
        slots.keep_only(found)
        _load(state, found, local=choice.world == world_of(group) and found.label.rank == rank_of(group))
    else:
        for found in mine:
            if any(choice.matches(found.label, part) for part in range(choice.world)):
                slots.keep_only(found)
        _put_together(state, choice, mine, group)
    return Restored(choice.step, choice.world)


def _offers(labels: list[Label], group: transfer.Group) -> list[list[Label]]:
    if world_of(group) == 1:
        return [labels]
    rows = [[one.generation, one.step, one.world, one.rank, False, one.sharded] for one in labels]
    said = [from_json(data) for data in transfer.gather_bytes(to_json(rows), group)]
    return [[Label(*row) for row in rows] for rows in said]


def _found(found: list[Found], choice: Choice, part: int) -> Found:
    for one in found:
        if choice.matches(one.label, part):
            return one
    raise ProtocolError(f"the state after step {choice.step} was in memory, and is gone: is another process using it?")


def _load(state: State, found: Found, local: bool) -> None:
    meta = parse_meta(_unchanged(found.meta(), found))
    loading = state.begin_load(meta, local=local)
    loading.fill_all(meta.entries, _mapped(found))
    loading.finish()


def _hand_over(choice: Choice, mine: list[Found], slots: SlotPair, group: transfer.Group) -> None:
    """Copy slots to those who lack them, one after the other in an order that all ranks know."""
    rank = rank_of(group)
    wanted = [(dst, src) for dst, src in enumerate(choice.sources) if dst != src]
    taking = choice.sources[rank] != rank
    giving = {dst: _found(mine, choice, choice.parts[dst]) for dst, src in wanted if src == rank}
    # A rank that both gives and takes may overwrite what it has still to give.
    kept = {found: _unchanged(found.copy(), found) for found in giving.values()} if taking else {}
    for dst, src in wanted:
        if src == rank:
            found = giving[dst]
            meta = _unchanged(found.meta(), found) if found not in kept else kept[found].meta
            data = _mapped(found) if found not in kept else _bytes_of(kept[found].data)
            transfer.send_slot(found.label, meta, data, transfer.global_rank(dst, group), group)
        elif dst == rank:
            _log.info("taking the state after step %d from rank %d", choice.step, src)
            transfer.receive_slot(slots, transfer.global_rank(src, group), group)


def _mapped(found: Found) -> torch.Tensor:
    """A slot's data as uint8 [nbytes], where it is."""
    if not found.data_nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(found.map(), dtype=torch.uint8, offset=HEADER_NBYTES, count=found.data_nbytes)


def _bytes_of(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _unchanged(read: T | None, found: Found) -> T:
    """What was read of a slot, which nobody but this process should write."""
    if read is None:
        raise ProtocolError(f"{found.path} was overwritten while it was read: is another process using it?")
    return read


def _put_together(state: State, choice: Choice, mine: list[Found], group: transfer.Group) -> None:
    """Show every part of a sharded state to all ranks, each of which takes what it now holds."""
    loading, seen = None, set()
    for part, holder in enumerate(choice.holders):
        copy = _give(mine, choice, part) if holder == rank_of(group) else None
        src = transfer.global_rank(holder, group)
        meta = parse_meta(transfer.broadcast_bytes(copy.meta if copy else b"", src, group))
        loading = loading or state.begin_load(meta, local=False)
        for entry in meta.entries:
            new = (entry.key, entry.starts) not in seen  # some ways to shard keep a part on several ranks
            if entry.nbytes and new and (entry.scope == "shard" or (entry.scope == "replicated" and part == 0)):
                seen.add((entry.key, entry.starts))
                data = copy.data[entry.offset : entry.offset + entry.nbytes] if copy else bytearray(entry.nbytes)
                shown = torch.frombuffer(data, dtype=torch.uint8)
                transfer.broadcast_tensor(shown, src, group)
                loading.fill_all([replace(entry, offset=0)], shown)
    assert loading is not None
    loading.finish()


def _give(mine: list[Found], choice: Choice, part: int) -> Copy:
    found = _found(mine, choice, part)
    return _unchanged(found.copy(), found)
