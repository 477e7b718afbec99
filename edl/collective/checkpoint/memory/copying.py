"""Copying many tensors at once, as fast as memory allows, also on a machine whose cores are busy.

torch splits one copy evenly among its threads and waits for the slowest: where another process has a core, that took
four times as long as one thread alone. Here threads take pieces as they get to them, and the caller is one of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from edl.collective.checkpoint.memory.staging import CopyPiece, PinnedStaging
from edl.settings import positive_int, read

__all__ = ["TensorCopier"]

_PIECE_NBYTES: Final = 4 << 20
_MOST_THREADS: Final = 4


class TensorCopier:
    """Copies tensors to tensors of the same shapes and types. One caller at a time."""

    def __init__(self, threads: int | None = None) -> None:
        """A copier with `threads`, by default this rank's share of the cores, at most 4."""
        if threads is None:
            cores = len(os.sched_getaffinity(0)) // (read("LOCAL_WORLD_SIZE", positive_int) or 1)
            threads = max(1, min(cores, _MOST_THREADS))
        self._helpers = threads - 1
        self._pool: ThreadPoolExecutor | None = None
        self._begun: _Job | None = None
        self._staging = PinnedStaging()

    @torch.no_grad()
    def copy_tensors(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target. Targets are contiguous, on the CPU, and share no memory with sources."""
        self._copy_pieces(self._plan(targets, sources))

    @torch.no_grad()
    def start_copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], then: Callable[[], object]
    ) -> None:
        """Copy like `copy`, but in a thread, and call `then` when all is copied, in that thread or in `finish`.

        Only tensors that numpy can copy are left to the thread; those on a GPU are copied before this returns.
        """
        self.finish_copy()
        self._begun = _Job(self._plan(targets, sources), then)
        self._submit(self._begun)

    @property
    def copying(self) -> bool:
        """Whether something was begun that is not done."""
        return self._begun is not None and not self._begun.done.done()

    def finish_copy(self) -> None:
        """Help with what was begun, and wait until it is done.

        Raises:
            Exception: whatever the copy, or `then`, raised.
        """
        job = self._begun
        if job is not None:
            job.work()
            try:
                job.done.result()
            finally:
                if job.done.done():  # else it is an interrupt, and the copy still under way
                    self._begun = None

    def close(self) -> None:
        """Finish, and stop the threads."""
        self.finish_copy()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _plan(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[CopyPiece]:
        """What is to be copied, in pieces; what numpy cannot copy is copied here and now."""
        pieces: list[CopyPiece] = []
        on_gpu: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            if source.device.type == "cpu" and source.is_contiguous() and not (source.is_conj() or source.is_neg()):
                pieces += _pieces(target, source.detach())
            elif source.device.type == "cuda":
                on_gpu.append((target, source))
            else:
                target.copy_(source.detach())
        if on_gpu:
            self._staging.copy_tensors([to for to, _ in on_gpu], [of for _, of in on_gpu], self._copy_staged)
        return pieces

    def _copy_staged(self, pieces: Sequence[CopyPiece]) -> None:
        self._copy_pieces([part for piece in pieces for part in _cut(*piece)])

    def _copy_pieces(self, pieces: Sequence[CopyPiece]) -> None:
        job = _Job(pieces)
        if sum(to.nbytes for to, _ in pieces) > _PIECE_NBYTES:
            for _ in range(self._helpers):
                self._submit(job)
        job.work()
        job.done.result()

    def _submit(self, job: _Job) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max(1, self._helpers), thread_name_prefix="edl-copy")
        self._pool.submit(job.work)


class _Job:
    """Pieces that any number of threads copy. Whoever finishes the last one calls `then`, and ends `done`.

    If a piece cannot be copied, the rest is not begun, `then` is not called, and `done` has the error.
    """

    def __init__(self, pieces: Sequence[CopyPiece], then: Callable[[], object] = lambda: None) -> None:
        self.done: Future[None] = Future()
        self._then = then
        self._waiting = iter(pieces)
        self._unfinished = len(pieces)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        if not pieces:
            self._end()

    def work(self) -> None:
        """Copy pieces until none is left to begin with."""
        while True:
            with self._lock:
                piece = next(self._waiting, None) if self._error is None else None
            if piece is None:
                return
            error: BaseException | None = None
            try:
                np.copyto(*piece)
            except BaseException as exc:  # noqa: BLE001 - raised again by whoever waits
                error = exc
            with self._lock:
                self._unfinished -= 1
                first = error is not None and self._error is None
                self._error = self._error or error
                last = self._unfinished == 0 and self._error is None
            if first and error is not None:
                self.done.set_exception(error)
            elif last:
                self._end()

    def _end(self) -> None:
        try:
            self._then()
        except BaseException as exc:  # noqa: BLE001 - raised again by whoever waits
            self.done.set_exception(exc)
        else:
            self.done.set_result(None)


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[CopyPiece]:
    if not source.numel():
        return
    yield from _cut(*(tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (target, source)))


def _cut(to: Any, of: Any) -> Iterator[CopyPiece]:
    """Pieces that several threads can take turns at."""
    for begin in range(0, of.nbytes, _PIECE_NBYTES):
        yield to[begin : begin + _PIECE_NBYTES], of[begin : begin + _PIECE_NBYTES]
