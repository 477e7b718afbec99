"""Workers that go on in the same process: who has not come to the present generation, and for too long."""

from __future__ import annotations

from collections.abc import Callable, Collection

__all__ = ["RegroupTimer"]

_NO_TURN_S = 0.5
"""An agent looks ten times a second, if nothing keeps it from that."""


class RegroupTimer:
    """Of one node. Every method that takes the time `now` takes seconds of one clock.

    Args:
        limit_s: how long a worker may take. Time in which nobody asked who is late does not count: if the machine stood
            still for the agent, it did for the workers, and an agent that waits for the store could do nothing anyway.
            Nor does time in which a worker waited for a core on a busy machine.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._told_at: dict[int, float] = {}
        self._queued_s: dict[int, float] = {}
        self._looked_at = 0.0

    @property
    def awaited_ranks(self) -> list[int]:
        """The local ranks that are on the way."""
        return list(self._told_at)

    def expect_ranks(self, ranks: Collection[int], now: float) -> None:
        """These were told of a new generation. Whoever is still on the way from the last one gets no more time."""
        self._told_at = {rank: self._told_at.get(rank, now) for rank in ranks}
        self._queued_s = {}
        self._looked_at = now

    def record_arrival(self, rank: int) -> None:
        """A worker is there."""
        self._told_at.pop(rank, None)

    def find_late(self, now: float, queued_s: Callable[[int], float] = lambda rank: 0.0) -> list[int]:
        """Return the local ranks that take too long. To be asked several times a second.

        Args:
            queued_s: returns for how long a local rank has waited for a core since it began, in seconds.
        """
        passed_s, self._looked_at = now - self._looked_at, now
        for rank in self._told_at:
            queued = queued_s(rank)
            waited_s = queued - self._queued_s.get(rank, queued)
            self._queued_s[rank] = queued
            # The kernel counts a wait when it ends, so it may be longer than the time since the last look.
            self._told_at[rank] += max(waited_s, passed_s if passed_s > _NO_TURN_S else 0.0)
        return [rank for rank, at in self._told_at.items() if now - at > self._limit_s]
