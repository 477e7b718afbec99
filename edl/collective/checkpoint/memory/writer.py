"""Putting a state into slots of shared memory."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import torch

from edl.collective.checkpoint.memory import transfer
from edl.collective.checkpoint.memory.copying import TensorCopier
from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair
from edl.collective.checkpoint.state.metadata import TensorEntry
from edl.collective.checkpoint.state.state import State
from edl.collective.checkpoint.state.tensors import view_of

__all__ = ["SlotWriter"]


class SlotWriter:
    """Copies states into slots. A single thread at a time."""

    def __init__(self) -> None:
        self._copier = TensorCopier()
        self._views: dict[tuple[Path, int], tuple[mmap.mmap, tuple[TensorEntry, ...], list[torch.Tensor]]] = {}

    def write_state(self, state: State, slots: SlotPair, header: SlotHeader) -> frozenset[int]:
        """Copy `state` into the older of two slots.

        Args:
            state: what is saved.
            slots: where to.
            header: of the state; this writer says whether it is sharded.

        Returns:
            The ranks that hold the same shards as this one, empty if the state is not sharded.

        Raises:
            SettingsError: the state cannot be saved, or there is not enough shared memory.
        """
        captured = state.capture()
        nbytes = captured.data_nbytes
        number, memory = slots.begin_write(nbytes, len(captured.meta))
        views = self._slot_views((slots.prefix, number), memory, captured.entries, nbytes)
        self._copier.copy_tensors(views, captured.tensors)
        slots.commit_write(replace(header, sharded=bool(captured.holders)), nbytes, captured.meta)
        return captured.holders

    def close(self) -> None:
        """Release everything."""
        self._views.clear()
        self._copier.close()

    def _slot_views(
        self, number: tuple[Path, int], memory: mmap.mmap, entries: tuple[TensorEntry, ...], nbytes: int
    ) -> list[torch.Tensor]:
        """Return the tensors of a slot, made once for a layout."""
        known = self._views.get(number)
        if known is not None and known[0] is memory and known[1] == entries:
            return known[2]
        data = transfer.slot_bytes(memory, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        views = [view_of(data, entry) for entry in entries]
        self._views[number] = memory, entries, views
        return views
