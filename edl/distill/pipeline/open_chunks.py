"""Counts what an epoch has sent and the training loop has not taken: chunks and bytes, without a lock."""

from __future__ import annotations

from edl.distill.source.chunk import Chunk

__all__ = ["OpenChunks"]


class OpenChunks:
    """Counts open chunks. Every number has a single thread that writes it, so that no lock is needed."""

    def __init__(self) -> None:
        self._opened = self._opened_nbytes = 0  # by the thread that sends
        self._answers_nbytes = 0  # by the event loop: what answers weigh more than was estimated
        self._taken = self._taken_nbytes = 0  # by the training loop

    @property
    def chunks(self) -> int:
        """Chunks that are open."""
        return self._opened - self._taken

    @property
    def nbytes(self) -> int:
        """Bytes of their inputs and answers, answers to come as they are estimated."""
        return max(self._opened_nbytes + self._answers_nbytes - self._taken_nbytes, 0)

    def add(self, chunk: Chunk) -> None:
        """Count a chunk that is about to be sent."""
        self._opened_nbytes += chunk.weight
        self._opened += 1

    def add_cached(self, chunk: Chunk) -> None:
        """Count what a cache had of it."""
        self._opened_nbytes += chunk.surplus_nbytes

    def add_answer(self, surplus_nbytes: int) -> None:
        """Count an answer, by what it weighs more than was estimated."""
        self._answers_nbytes += surplus_nbytes

    def remove(self, chunk: Chunk) -> None:
        """Count a chunk whose rows have all been taken."""
        self._taken_nbytes += chunk.weight
        self._taken += 1
