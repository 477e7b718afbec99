"""Copies many tensors at once, as fast as memory allows, even on a machine whose cores are busy.

Torch splits a copy evenly among its threads and waits for the slowest thread. If another process occupied a core, such
a copy took four times as long as a copy by a single thread. Here, threads take small pieces one after another, and the
calling thread helps.

Tensors on a GPU are copied through two pinned buffers, on a separate stream: while the GPU fills one, the CPU empties
the other. The copies wait for work that is queued on the caller's stream, and the caller waits for the copies, so later
changes to the tensors cannot affect the copies. https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from edl.collective.checkpoint.encoding import TensorEntry
from edl.collective.checkpoint.memory.slots import HEADER_NBYTES, SlotHeader, SlotPair
from edl.collective.checkpoint.state.state import State
from edl.collective.checkpoint.state.tensors import view_of
from edl.settings import positive_int, read

logger = logging.getLogger(__name__)


_BUFFER_NBYTES: Final = 32 << 20  # some milliseconds of the GPU's bus: starting a copy costs nothing next to that

CopyPiece = tuple[Any, Any]  # bytes to copy to, and bytes to copy from, as numpy arrays of uint8


def finish_queued_work() -> None:
    """Wait until the GPU has finished its queued work, so that this time counts as training, not as saving."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class _Filled:
    """A buffer that is full once `event` has occurred, and the targets to which its parts are copied."""

    event: torch.cuda.Event
    pieces: Sequence[CopyPiece]


class PinnedStaging:
    """Copies tensors from GPUs, through two buffers of `nbytes` bytes each. Only one caller may use it at a time."""

    def __init__(self, nbytes: int = _BUFFER_NBYTES) -> None:
        self._nbytes = nbytes
        self._buffers: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy_tensors(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], write: Callable[[Sequence[CopyPiece]], object]
    ) -> None:
        """Copy each pair's second tensor, on a GPU, to its first, on the CPU. `write` copies pieces, then returns."""
        for device in dict.fromkeys(source.device for _, source in pairs):
            self._copy_from(device, [pair for pair in pairs if pair[1].device == device], write)

    def _copy_from(
        self,
        device: torch.device,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        write: Callable[[Sequence[CopyPiece]], object],
    ) -> None:
        buffers = self._buffers = self._buffers or [_pinned_buffer(self._nbytes) for _ in range(2)]
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        filled: _Filled | None = None
        with torch.cuda.stream(stream):
            for number, batch in enumerate(_batches(pairs, self._nbytes, stream)):
                filling = _fill_buffer(buffers[number % 2], batch, stream)
                if filled is not None:
                    _empty_buffer(filled, write)
                filled = filling
        if filled is not None:
            _empty_buffer(filled, write)


def _batches(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], nbytes: int, stream: torch.cuda.Stream
) -> Iterator[list[tuple[Any, torch.Tensor]]]:
    """Yield lists of target and source parts. Each list fills a buffer, except perhaps the last."""
    batch: list[tuple[Any, torch.Tensor]] = []
    room = nbytes
    for target, source in pairs:
        if not source.numel():
            continue
        # An interrupt may end the wait for the copies. Until they are done, the source's memory must not be reused.
        source.record_stream(stream)
        whole = source.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        place = target.reshape(-1).view(torch.uint8).numpy()
        begin = 0
        while begin < len(place):
            end = min(len(place), begin + room)
            batch.append((place[begin:end], whole[begin:end]))
            room -= end - begin
            begin = end
            if not room:
                yield batch
                batch, room = [], nbytes
    if batch:
        yield batch


def _fill_buffer(buffer: torch.Tensor, batch: Sequence[tuple[Any, torch.Tensor]], stream: torch.cuda.Stream) -> _Filled:
    """Let the GPU fill a buffer whose contents are no longer needed."""
    memory = buffer.numpy()
    pieces = []
    begin = 0
    for place, part in batch:
        end = begin + len(place)
        buffer[begin:end].copy_(part, non_blocking=True)
        pieces.append((place, memory[begin:end]))
        begin = end
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return _Filled(event, pieces)


def _empty_buffer(filled: _Filled, write: Callable[[Sequence[CopyPiece]], object]) -> None:
    filled.event.synchronize()
    write(filled.pieces)


def _pinned_buffer(nbytes: int) -> torch.Tensor:
    """Return a pinned buffer, which the GPU can write to directly, or an ordinary one if the system refuses that."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as exc:
        logger.warning("no pinned memory for copies from the GPU (%s): these copies will be slower", exc)
        return torch.empty(nbytes, dtype=torch.uint8)


_PIECE_NBYTES: Final = 4 << 20  # about a millisecond, and the longest wait of the other threads for the slowest
_MOST_THREADS: Final = 4  # with more, memory bandwidth is used up


class TensorCopier:
    """Copies tensors to others of equal shapes and dtypes, for one caller at a time. `threads` includes the caller."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is None:  # this rank's share of the cores
            cores = len(os.sched_getaffinity(0)) // (read("LOCAL_WORLD_SIZE", positive_int) or 1)
            threads = max(1, min(cores, _MOST_THREADS))
        self._helpers = threads - 1
        self._pool: ThreadPoolExecutor | None = None
        self._staging = PinnedStaging()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    @torch.no_grad()
    def copy_tensors(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy `sources` to `targets`, which must be contiguous, on the CPU, and share no memory with a source."""
        pieces: list[CopyPiece] = []
        on_gpu: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            if source.device.type == "cuda":
                on_gpu.append((target, source))
            elif source.device.type != "cpu" or not source.is_contiguous() or source.is_conj() or source.is_neg():
                target.copy_(source.detach())  # numpy cannot copy it
            elif source.numel():
                to, of = (tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in (target, source))
                pieces.append((to, of))
        self._staging.copy_tensors(on_gpu, self._copy_pieces)
        self._copy_pieces(pieces)

    def _copy_pieces(self, pieces: Sequence[CopyPiece]) -> None:
        """Copy pieces: this thread and helpers each take one at a time. Helpers that have not begun are cancelled."""
        waiting = deque(part for piece in pieces for part in _cut_pieces(*piece))

        def work() -> None:
            try:
                while waiting:
                    np.copyto(*waiting.popleft())
            except IndexError:
                pass  # another thread took the last one
            except BaseException:
                waiting.clear()
                raise

        helpers: list[Future[None]] = []
        if self._helpers and sum(to.nbytes for to, _ in pieces) > _PIECE_NBYTES:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="edl-copy")
            helpers = [self._pool.submit(work) for _ in range(self._helpers)]
        try:
            work()
        finally:
            for helper in helpers:
                if not helper.cancel():
                    helper.result()


def _cut_pieces(to: Any, of: Any) -> Iterator[CopyPiece]:
    """Yield pieces that are small enough for several threads to share the work."""
    for begin in range(0, of.nbytes, _PIECE_NBYTES):
        yield to[begin : begin + _PIECE_NBYTES], of[begin : begin + _PIECE_NBYTES]


class SlotWriter:
    """Copies states into slots. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self._copier = TensorCopier()
        self._views: dict[tuple[Path, int], tuple[mmap.mmap, tuple[TensorEntry, ...], list[torch.Tensor]]] = {}

    def write_state(self, state: State, slots: SlotPair, header: SlotHeader) -> frozenset[int]:
        """Copy `state` into the older of two slots. Returns the ranks that hold the same shards."""
        captured = state.capture()
        nbytes = captured.data_nbytes
        number, memory = slots.begin_write(nbytes, len(captured.meta))
        views = self._slot_views((slots.prefix, number), memory, captured.entries, nbytes)
        self._copier.copy_tensors(views, captured.tensors)
        slots.commit_write(replace(header, sharded=bool(captured.holders)), nbytes, captured.meta)
        return captured.holders

    def close(self) -> None:
        self._views.clear()
        self._copier.close()

    def _slot_views(
        self, number: tuple[Path, int], memory: mmap.mmap, entries: tuple[TensorEntry, ...], nbytes: int
    ) -> list[torch.Tensor]:
        """Return a slot's tensors, which are created again only if their layout or the mapping has changed."""
        known = self._views.get(number)
        if known is not None and known[0] is memory and known[1] == entries:
            return known[2]
        data = slot_bytes(memory, nbytes)
        views = [view_of(data, entry) for entry in entries]
        self._views[number] = memory, entries, views
        return views


def slot_bytes(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    """Return the data of a slot as a uint8 tensor of shape (nbytes,), sharing its memory."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_NBYTES, count=nbytes)
