"""Workers that go on in the same process: which of them are on the way to a generation, and which take too long."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

__all__ = ["RegroupTimer"]

_STANDSTILL_S: Final = 0.5
"""An agent asks ten times a second. After a longer time without a question the machine stood still for it; with less,
an agent on a busy machine would give workers time without end."""


class RegroupTimer:
    """Measures how long the workers of a node take to go on. Times (`now_s`) are seconds of one clock.

    Args:
        limit_s: how long a worker may take, in seconds. Time in which it was not asked who is late does not count: if
            the machine stood still for the agent, it did for the workers, and an agent that waits for the store could
            do nothing anyway. Nor does time count in which a worker waited for a core on a busy machine.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._expected_since: dict[int, float] = {}
        self._queued_s: dict[int, float] = {}
        self._asked_at = 0.0

    @property
    def awaited_ranks(self) -> list[int]:
        """The local ranks that are on the way."""
        return list(self._expected_since)

    def expect_ranks(self, ranks: Collection[int], now_s: float) -> None:
        """Begin to wait for workers. A worker that is still on the way to the last generation gets no more time.

        Args:
            ranks: local ranks that were told of a new generation.
            now_s: the time now.
        """
        self._expected_since = {rank: self._expected_since.get(rank, now_s) for rank in ranks}
        self._queued_s = {}
        self._asked_at = now_s

    def record_arrival(self, rank: int) -> None:
        """Record that the worker of a local rank has gone on."""
        self._expected_since.pop(rank, None)

    def find_late(self, now_s: float, queued_s: Callable[[int], float] = lambda rank: 0.0) -> list[int]:
        """Find the local ranks that take too long. To be called several times a second.

        Args:
            now_s: the time now.
            queued_s: returns for how many seconds a local rank has waited for a core since it began.

        Returns:
            The local ranks.
        """
        passed_s = now_s - self._asked_at
        self._asked_at = now_s
        for rank in self._expected_since:
            queued = queued_s(rank)
            waited_s = queued - self._queued_s.get(rank, queued)
            self._queued_s[rank] = queued
            # The kernel counts a wait when it ends, so it may be longer than the time since the last question.
            self._expected_since[rank] += max(waited_s, passed_s if passed_s > _STANDSTILL_S else 0.0)
        return [rank for rank, since_s in self._expected_since.items() if now_s - since_s > self._limit_s]
