"""Copying many tensors at once, as fast as memory allows, also on a machine whose cores are busy.

torch splits one copy evenly among its threads and waits for the slowest: where another process has a core, that took
four times as long as one thread alone. Here threads take pieces as they get to them, and the caller is one of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from edl.settings import positive_int, read

__all__ = ["Copier"]

_PIECE_NBYTES: Final = 4 << 20
_MOST_THREADS: Final = 4

Piece = tuple[Any, Any]


class Copier:
    """Copies tensors to tensors of the same shapes and types. One caller at a time."""

    def __init__(self, threads: int | None = None) -> None:
        """A copier with `threads`, by default this rank's share of the cores, at most 4."""
        if threads is None:
            cores = len(os.sched_getaffinity(0)) // (read("LOCAL_WORLD_SIZE", positive_int) or 1)
            threads = max(1, min(cores, _MOST_THREADS))
        self._helpers = threads - 1
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @torch.no_grad()
    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target. Targets are contiguous, on the CPU, and share no memory with sources."""
        pieces: list[Piece] = []
        for target, source in zip(targets, sources, strict=True):
            if source.device.type == "cpu" and source.is_contiguous() and not (source.is_conj() or source.is_neg()):
                pieces += _pieces(target, source)
            else:
                target.copy_(source)
        if not self._helpers or len(pieces) <= 1 or sum(piece[0].nbytes for piece in pieces) <= _PIECE_NBYTES:
            for piece in pieces:
                np.copyto(*piece)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="edl-copy")
        remaining = iter(pieces)
        helping = [self._pool.submit(self._work, remaining) for _ in range(self._helpers)]
        self._work(remaining)
        for one in helping:
            if not one.cancel():
                one.result()

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _work(self, remaining: Iterator[Piece]) -> None:
        while True:
            with self._lock:
                piece = next(remaining, None)
            if piece is None:
                return
            np.copyto(*piece)


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[Piece]:
    if not source.numel():
        return
    to, of = (one.detach().reshape(-1).view(torch.uint8).numpy() for one in (target, source))
    for begin in range(0, of.nbytes, _PIECE_NBYTES):
        yield to[begin : begin + _PIECE_NBYTES], of[begin : begin + _PIECE_NBYTES]
