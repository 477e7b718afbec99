"""A state in slots, as a worker's checkpointer leaves it there for storage, without a worker."""

from __future__ import annotations

from pathlib import Path

from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair
from edl.collective.checkpoint.memory.transfer import slot_bytes
from edl.collective.checkpoint.state.state import State
from edl.collective.checkpoint.state.tensors import view_of


def put(prefix: Path, state: State, step: int, rank: int = 0, world: int = 1, generation: int = 1) -> None:
    """Save a state that is wanted on storage."""
    save(SlotPair(prefix), state, SlotHeader(generation, step, world, rank, persist=True))


def save(slots: SlotPair, state: State, header: SlotHeader) -> None:
    """Save a state in slots that stay open."""
    captured = state.capture()
    _, memory = slots.begin_write(captured.data_nbytes, len(captured.meta))
    data = slot_bytes(memory, captured.data_nbytes)
    for entry, tensor in zip(captured.entries, captured.tensors, strict=True):
        view_of(data, entry).copy_(tensor)
    slots.commit_write(header, captured.data_nbytes, captured.meta)
