"""Workers that go on in the same process: who has not come to the present generation, and for too long."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["Regrouping"]

_NO_TURN_S = 0.5
"""An agent looks ten times a second, if nothing keeps it from that."""


class Regrouping:
    """Of one node. Every method that takes the time `now` takes seconds of one clock.

    Args:
        limit_s: how long a worker may take. Time in which nobody asked who is late does not count: if the machine stood
            still for the agent, it did for the workers, and an agent that waits for the store could do nothing anyway.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._told_at: dict[int, float] = {}
        self._looked_at = 0.0

    @property
    def awaited(self) -> list[int]:
        """The local ranks that are on the way."""
        return list(self._told_at)

    def begin(self, ranks: Collection[int], now: float) -> None:
        """These were told of a new generation. Whoever is still on the way from the last one gets no more time."""
        self._told_at = {rank: self._told_at.get(rank, now) for rank in ranks}
        self._looked_at = now

    def came(self, rank: int) -> None:
        """A worker is there."""
        self._told_at.pop(rank, None)

    def late(self, now: float) -> list[int]:
        """Who takes too long. To be asked several times a second."""
        no_turn_s, self._looked_at = now - self._looked_at, now
        if no_turn_s > _NO_TURN_S:
            self._told_at = {rank: at + no_turn_s for rank, at in self._told_at.items()}
        return [rank for rank, at in self._told_at.items() if now - at > self._limit_s]
