"""Putting a state into slots of shared memory while training goes on.

What only an optimizer's step changes, its parameters and their moments, keeps still during the next forward and
backward pass, so it is copied beside them, and the next step of any optimizer waits for what is left (the idea of
CheckFreq, Mohan et al., FAST'21). Everything else is copied before `write` returns: buffers, which a forward pass may
change, whatever else is in the state, and what belongs to an optimizer that has not passed here since the last save
(a compiled step does not). torch counts what it writes to a tensor; a save during which it wrote to one that should
have kept still is dropped, and saves take their time from then on.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from edl.collective.checkpoint import transfer
from edl.collective.checkpoint.copying import Copier
from edl.collective.checkpoint.parts import is_sharded, view_of
from edl.collective.checkpoint.slots import Label, SlotPair
from edl.collective.checkpoint.snapshot import Entry
from edl.collective.checkpoint.state import Captured, State

__all__ = ["Writer"]

_log = logging.getLogger(__name__)

_WORTH_NBYTES: Final = 4 << 20
"""Less is copied at once: a thread would cost as much."""


@dataclass(frozen=True)
class _Watched:
    """Tensors that have to keep still, and how often torch had written to each."""

    tensors: list[torch.Tensor]
    versions: list[int]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> _Watched:
        return cls(tensors, [tensor._version for tensor in tensors])

    def still(self) -> bool:
        return all(tensor._version == version for tensor, version in zip(self.tensors, self.versions, strict=True))


class Writer:
    """Copies states into slots. One thread at a time; the optimizers' may be another one."""

    def __init__(self, *, overlap: bool = True) -> None:
        """A writer.

        Args:
            overlap: copy beside the next forward and backward pass what may be copied then.
        """
        self._overlap = overlap
        self._copier = Copier()
        self._views: dict[tuple[Path, int], tuple[mmap.mmap, tuple[Entry, ...], list[torch.Tensor]]] = {}
        self._watched: _Watched | None = None
        self._complete = False
        self._retract: Callable[[], object] = lambda: None
        self._passed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        hook = register_optimizer_step_pre_hook(_Gate(self))
        self._unhook = weakref.finalize(self, hook.remove)

    def write(self, state: State, slots: SlotPair, label: Label, then: Callable[[float], object]) -> bool:
        """Copy `state` into the older one of two slots.

        Args:
            label: of the state; this writer says whether it is sharded.
            then: called when the state can be restored, with the seconds that this took; in whichever thread.

        Returns:
            Whether other ranks hold parts of the state.

        Raises:
            SettingsError: the state cannot be saved, or there is not enough shared memory.
        """
        self.settle()
        begin = time.perf_counter()
        captured = state.capture()
        nbytes = captured.data_nbytes
        number, memory = slots.begin(nbytes, len(captured.meta))
        views, known = self._views_of((slots.prefix, number), memory, captured.entries, nbytes)
        sharded = any(entry.scope == "shard" for entry in captured.entries)
        later = self._may_wait(state, captured) if known else set()  # new memory's pages are best paid for at once
        self._passed.clear()
        watched = _Watched.of([captured.tensors[number] for number in sorted(later)])

        def commit() -> None:
            if watched.still():
                slots.commit(replace(label, sharded=sharded), nbytes, captured.meta)
                self._complete = True
                then(time.perf_counter() - begin)

        now = [number for number in range(len(views)) if number not in later]
        self._complete, self._watched, self._retract = False, watched, slots.retract
        self._copier.copy([views[number] for number in now], [captured.tensors[number] for number in now])
        if later:
            self._copier.begin([views[number] for number in sorted(later)], watched.tensors, commit)
        else:
            commit()
        return sharded

    def settle(self) -> bool:
        """Help to finish the last save. Returns whether it is complete, rather than dropped."""
        if self._watched is not None:
            self._copier.finish()
            watched, self._watched = self._watched, None
            if not watched.still():
                if self._complete:  # while it was copied, or since? torch counts a write when it has been done
                    self._complete = False
                    self._retract()
                self._overlap = False
                _log.warning(
                    "parameters or an optimizer's state were written to between a save and the next step of an "
                    "optimizer: that save is dropped, and from now on saves wait for the copy (overlap=False does so "
                    "from the beginning)"
                )
        return self._complete

    def about_to_step(self, optimizer: Optimizer) -> None:
        """An optimizer will change what belongs to it."""
        self.settle()
        self._passed.add(optimizer)

    def close(self) -> None:
        """Finish the last save, and let go of everything."""
        self.settle()
        self._unhook()
        self._views.clear()
        self._copier.close()

    def _may_wait(self, state: State, captured: Captured) -> set[int]:
        """The numbers of the tensors that nobody but an optimizer of the state changes."""
        if not self._overlap:
            return set()
        kept_still = {
            _memory_of(tensor.to_local() if is_sharded(tensor) else tensor)
            for name in state
            if isinstance(optimizer := getattr(state, name), Optimizer) and optimizer in self._passed
            for tensor in _tensors_of(optimizer)
        }
        numbers = {
            number
            for number, tensor in enumerate(captured.tensors)
            if tensor.device.type == "cpu" and not tensor.is_inference() and _memory_of(tensor) in kept_still
        }
        nbytes = sum(captured.tensors[number].nbytes for number in numbers)
        return numbers if nbytes >= _WORTH_NBYTES else set()

    def _views_of(
        self, number: tuple[Path, int], memory: mmap.mmap, entries: tuple[Entry, ...], nbytes: int
    ) -> tuple[list[torch.Tensor], bool]:
        """The tensors of a slot, made once for a layout, and whether they were there before."""
        known = self._views.get(number)
        if known is not None and known[0] is memory and known[1] == entries:
            return known[2], True
        data = transfer.slot_bytes(memory, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        views = [view_of(data, entry) for entry in entries]
        self._views[number] = memory, entries, views
        return views, False


def _tensors_of(optimizer: Optimizer) -> list[Any]:
    parameters: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for one in optimizer.state.values() for value in one.values()]
    return [value for value in (*parameters, *states) if isinstance(value, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Gate:
    """What every optimizer of this process calls before its step; it does not keep the writer alive."""

    def __init__(self, writer: Writer) -> None:
        self._writer = weakref.ref(writer)

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():
            return  # or a compiled step would be broken in two, or refused
        writer = self._writer()
        if writer is not None:
            writer.about_to_step(optimizer)
