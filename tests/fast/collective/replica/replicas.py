"""States as workers keep them for replicas, made without workers: the bytes of each are its step."""

from __future__ import annotations

from pathlib import Path

from edl.collective.checkpoint.memory.slots import HEADER_NBYTES, CompleteSlot, SlotHeader, SlotPair, find_slots

SECRET = b"s" * 32


def keep(prefix: Path, step: int, nbytes: int = 100, **header: int) -> CompleteSlot:
    """Save a state whose bytes are its step."""
    slots = SlotPair(prefix)
    found = save(slots, step, nbytes, **header)
    slots.close()
    return found


def save(
    slots: SlotPair, step: int, nbytes: int, *, generation: int = 0, rank: int = 0, world: int = 2
) -> CompleteSlot:
    """The same in slots that stay open."""
    meta = b"m%d" % step
    _, memory = slots.begin_write(nbytes, len(meta))
    memory[HEADER_NBYTES : HEADER_NBYTES + nbytes] = bytes([step]) * nbytes
    slots.commit_write(SlotHeader(generation, step, world, rank, sharded=True), nbytes, meta)
    return find_slots(slots.prefix)[0]


def is_whole(found: CompleteSlot) -> bool:
    copy = found.copy_contents()
    return copy is not None and set(copy.data) <= {found.header.step} and copy.meta == b"m%d" % found.header.step


def steps(prefix: Path) -> list[int]:
    assert all(is_whole(one) for one in find_slots(prefix))
    return [one.header.step for one in find_slots(prefix)]
