"""Which rank the others wait for: a decision from every rank's own step times, without a clock.

In synchronous training every rank's step takes as long as the slowest rank's, so durations of steps name no rank. What
tells a straggler is its *own* time: what is left of a step without the wait in the gradients' synchronisation. The rank
that all wait for waits least itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["StragglerChange", "StragglerDetector", "StragglerSettings"]


@dataclass(frozen=True)
class StragglerSettings:
    """Who is called a straggler.

    Attributes:
        factor: its own time of a step is so many times the median of the others',
        least_s: and so many seconds longer,
        windows: in so many windows in a row. As many below `clear_factor` clear it.
    """

    factor: float = 1.5
    clear_factor: float = 1.2
    least_s: float = 0.005
    windows: int = 5


@dataclass(frozen=True)
class StragglerChange:
    """A rank was named, or is one no more."""

    rank: int
    what: Literal["named", "cleared"]
    own_s: float
    others_s: float

    def __str__(self) -> str:
        times = f"{self.own_s:.3g} s of its own a step, the others {self.others_s:.3g} s"
        return f"rank {self.rank} is {'slow' if self.what == 'named' else 'no longer slow'}: {times}"


@dataclass
class StragglerDetector:
    """Names ranks that are slow persistently. Feed it one window after another; begin anew with each world."""

    rules: StragglerSettings = field(default_factory=StragglerSettings)
    named: set[int] = field(default_factory=set)
    _counts: dict[int, int] = field(default_factory=dict)

    def observe_window(self, own_s: Mapping[int, float]) -> list[StragglerChange]:
        """What follows from one window.

        Args:
            own_s: by rank, seconds of its own a step in this window; ranks without one are left out.
        """
        changes = []
        for rank, mine_s in sorted(own_s.items()):
            others = [theirs_s for other, theirs_s in own_s.items() if other != rank]
            if not others:
                continue
            others_s = statistics.median(others)
            self._counts[rank] = self._counts.get(rank, 0) + 1 if self._deviates(rank, mine_s, others_s) else 0
            if self._counts[rank] >= self.rules.windows:
                self._counts[rank] = 0
                self.named ^= {rank}
                what: Literal["named", "cleared"] = "named" if rank in self.named else "cleared"
                changes.append(StragglerChange(rank, what, mine_s, others_s))
        return changes

    def _deviates(self, rank: int, mine_s: float, others_s: float) -> bool:
        """Whether this window speaks for a change."""
        if rank in self.named:
            return mine_s < max(self.rules.clear_factor * others_s, others_s + self.rules.least_s)
        return mine_s > self.rules.factor * others_s and mine_s > others_s + self.rules.least_s
