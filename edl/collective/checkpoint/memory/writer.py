"""Putting a state into slots of shared memory, at once or, if the user wants that, while training goes on.

What only an optimizer's step changes, its parameters and their moments, keeps still during the next forward and
backward pass, so where it is in the CPU's memory it can be copied beside them, and the next step of any optimizer waits
for what is left (the idea of CheckFreq, Mohan et al., FAST'21). Everything else is copied before `write_state` returns:
buffers, which a forward pass may change, whatever else is in the state, and what belongs to an optimizer that has not
passed here since the last save (a compiled step does not).

That rests on a promise, that nothing else writes to these tensors meanwhile. What torch counts of writes, and samples
of the bytes, tell of most that break it (not of a few numbers changed through `.data`): such a save is dropped, and
saves take their time from then on.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from edl.collective.checkpoint.memory import transfer
from edl.collective.checkpoint.memory.copying import TensorCopier
from edl.collective.checkpoint.memory.slots import SlotHeader, SlotPair
from edl.collective.checkpoint.state.metadata import TensorEntry
from edl.collective.checkpoint.state.state import CapturedState, State
from edl.collective.checkpoint.state.tensors import is_sharded, view_of

__all__ = ["SlotWriter"]

logger = logging.getLogger(__name__)

_SAMPLED_EACH_NBYTES: Final = 256 << 10
"""A sample is taken of every so many bytes: 4,000 cache lines a gigabyte, which is a thousandth of the copy."""
_SAMPLE_NBYTES: Final = 64
"""Bytes of a sample: a cache line, which costs what a byte of it costs."""
_WORTH_NBYTES: Final = 4 << 20
"""Less is copied at once: a thread would cost as much."""


@dataclass(frozen=True)
class _Watched:
    """Tensors that have to keep still: how often torch had written to them, and samples of their bytes."""

    tensors: list[torch.Tensor]
    versions: list[int]
    samples: list[bytes]

    @classmethod
    def of_tensors(cls, tensors: list[torch.Tensor]) -> _Watched:
        return cls(tensors, [tensor._version for tensor in tensors], [_sample(tensor) for tensor in tensors])

    def are_unchanged(self) -> bool:
        """Return whether the tensors were not written to, as far as can be told."""
        counts = (tensor._version == version for tensor, version in zip(self.tensors, self.versions, strict=True))
        return all(counts) and self.match_samples(self.tensors)

    def match_samples(self, others: list[torch.Tensor]) -> bool:
        """Return whether `others` have the sampled bytes."""
        return all(_sample(other) == sample for other, sample in zip(others, self.samples, strict=True))


def _sample(tensor: torch.Tensor) -> bytes:
    """Return a few bytes from every part of a contiguous tensor."""
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    whole = len(data) // _SAMPLED_EACH_NBYTES * _SAMPLED_EACH_NBYTES
    parts: bytes = data[:whole].reshape(-1, _SAMPLED_EACH_NBYTES)[:, :_SAMPLE_NBYTES].tobytes()
    return parts + data[whole:][:_SAMPLE_NBYTES].tobytes() + data[-_SAMPLE_NBYTES:].tobytes()


class SlotWriter:
    """Copies states into slots. Optimizers may step in other threads than that which saves.

    Args:
        overlap: copy beside the next forward and backward pass what may be copied then.
        waiting: is entered while an optimizer's step waits for the rest.
    """

    def __init__(
        self, *, overlap: bool = False, waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._overlap = overlap
        self._waiting = waiting
        self._turn = threading.RLock()
        self._pid = os.getpid()
        self._copier = TensorCopier()
        self._views: dict[tuple[Path, int], tuple[mmap.mmap, tuple[TensorEntry, ...], list[torch.Tensor]]] = {}
        self._watched: _Watched | None = None
        self._complete = False
        self._retract: Callable[[], object] = lambda: None
        self._passed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        hook = register_optimizer_step_pre_hook(_OptimizerHook(self))
        self._unhook = weakref.finalize(self, hook.remove)

    def write_state(
        self,
        state: State,
        slots: SlotPair,
        header: SlotHeader,
        then: Callable[[float], object],
        *,
        at_once: bool = False,
    ) -> frozenset[int]:
        """Copy `state` into the older of two slots.

        Args:
            state: what is saved.
            slots: where to.
            header: of the state; this writer says whether it is sharded.
            then: is called when the state can be restored, with the seconds that this took; in whatever thread.
            at_once: leave nothing for later.

        Returns:
            The ranks that hold the same shards as this one, empty if the state is not sharded.

        Raises:
            SettingsError: the state cannot be saved, or there is not enough shared memory.
        """
        with self._turn:
            self.finish_write()
            begin = time.perf_counter()
            captured = state.capture()
            nbytes = captured.data_nbytes
            number, memory = slots.begin_write(nbytes, len(captured.meta))
            views, known = self._slot_views((slots.prefix, number), memory, captured.entries, nbytes)
            # New memory's pages are best paid for at once.
            later = self._deferrable_tensors(state, captured) if known and not at_once else set()
            self._passed.clear()
            now = [number for number in range(len(views)) if number not in later]
            watched = _Watched.of_tensors([captured.tensors[number] for number in sorted(later)])
            copies = [views[number] for number in sorted(later)]

            def commit() -> None:
                if watched.are_unchanged() and watched.match_samples(copies):
                    slots.commit_write(replace(header, sharded=bool(captured.holders)), nbytes, captured.meta)
                    self._complete = True
                    then(time.perf_counter() - begin)

            self._complete = False
            self._retract = slots.invalidate_newest
            self._copier.copy_tensors([views[number] for number in now], [captured.tensors[number] for number in now])
            if later:
                self._watched = watched
                self._copier.start_copy(copies, watched.tensors, commit)
            else:
                commit()
            return captured.holders

    def finish_write(self) -> bool:
        """Help to finish the last save. Returns whether it is complete, rather than dropped."""
        if os.getpid() != self._pid:
            return False  # in a fork: the copy goes on in its parent, whose slots these are
        with self._turn:
            watched, self._watched = self._watched, None
            if watched is None:
                return self._complete
            with self._waiting() if self._copier.copying else nullcontext():
                self._copier.finish_copy()
            if not watched.are_unchanged():
                if self._complete:  # while it was copied, or since? torch counts a write when it has been done
                    self._complete = False
                    self._retract()
                self._overlap = False
                logger.warning(
                    "parameters or an optimizer's state were written to between a save and the next step of an "
                    "optimizer: that save is dropped, and from now on saves wait for the copy, as without overlap=True"
                )
            return self._complete

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Finish the last save, since an optimizer will change what belongs to it."""
        with self._turn:
            self.finish_write()
            self._passed.add(optimizer)

    def close(self) -> None:
        """Finish the last save, and release everything."""
        try:
            self.finish_write()
        finally:
            self._unhook()
            self._views.clear()
            self._copier.close()

    def _deferrable_tensors(self, state: State, captured: CapturedState) -> set[int]:
        """Return the numbers of the tensors that only an optimizer of the state changes."""
        if not self._overlap:
            return set()
        kept_still = {
            _data_pointer(tensor.to_local() if is_sharded(tensor) else tensor)
            for name in state
            if isinstance(optimizer := getattr(state, name), Optimizer) and optimizer in self._passed
            for tensor in _optimizer_tensors(optimizer)
        }
        numbers = {
            number
            for number, tensor in enumerate(captured.tensors)
            if _is_plain(tensor) and _data_pointer(tensor) in kept_still
        }
        nbytes = sum(captured.tensors[number].nbytes for number in numbers)
        return numbers if nbytes >= _WORTH_NBYTES else set()

    def _slot_views(
        self, number: tuple[Path, int], memory: mmap.mmap, entries: tuple[TensorEntry, ...], nbytes: int
    ) -> tuple[list[torch.Tensor], bool]:
        """Return the tensors of a slot, made once for a layout, and whether they were there before."""
        known = self._views.get(number)
        if known is not None and known[0] is memory and known[1] == entries:
            return known[2], True
        data = transfer.slot_bytes(memory, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        views = [view_of(data, entry) for entry in entries]
        self._views[number] = memory, entries, views
        return views, False


def _optimizer_tensors(optimizer: Optimizer) -> list[Any]:
    parameters: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for values in optimizer.state.values() for value in values.values()]
    return [value for value in (*parameters, *states) if isinstance(value, torch.Tensor)]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a thread may copy a tensor, and torch counts writes to it."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _data_pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _OptimizerHook:
    """Is called by every optimizer of this process before its step; does not keep the writer alive."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = weakref.ref(writer)

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():
            return  # or a compiled step would be broken in two, or refused
        writer = self._writer()
        if writer is not None:
            writer.before_optimizer_step(optimizer)
