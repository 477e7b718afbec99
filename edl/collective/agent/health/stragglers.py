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
    """When a rank is called a straggler.

    Attributes:
        factor: its own time of a step is so many times the median of the other ranks' times, or more.
        clear_factor: a straggler below so many times that median is none any more.
        least_s: it is so many seconds longer as well, so that no rank is named for microseconds.
        windows: in so many windows in a row, for both.
    """

    factor: float = 1.5
    clear_factor: float = 1.2
    least_s: float = 0.005
    windows: int = 5


@dataclass(frozen=True)
class StragglerChange:
    """A rank that is a straggler from now on, or is none any more.

    Attributes:
        rank: in the job.
        what: `named` or `cleared`.
        own_s: its own time of a step, in seconds.
        others_s: the median of the other ranks' times, in seconds.
    """

    rank: int
    what: Literal["named", "cleared"]
    own_s: float
    others_s: float

    def __str__(self) -> str:
        times = f"{self.own_s:.3g} s of its own a step, the others {self.others_s:.3g} s"
        return f"rank {self.rank} is {'slow' if self.what == 'named' else 'no longer slow'}: {times}"


@dataclass
class StragglerDetector:
    """Names ranks that are slow persistently. Takes window after window; every world needs a new detector.

    Attributes:
        settings: when a rank is called a straggler.
        named: the ranks that are stragglers now.
    """

    settings: StragglerSettings = field(default_factory=StragglerSettings)
    named: set[int] = field(default_factory=set)
    _counts: dict[int, int] = field(default_factory=dict)

    def observe_window(self, own_s: Mapping[int, float]) -> list[StragglerChange]:
        """Compare the ranks' times of a window.

        Args:
            own_s: own seconds a step in this window, by rank; ranks that made no step are left out.

        Returns:
            The ranks that became stragglers, or are none any more.
        """
        changes = []
        for rank, mine_s in sorted(own_s.items()):
            others = [theirs_s for other, theirs_s in own_s.items() if other != rank]
            if not others:
                continue
            others_s = statistics.median(others)
            self._counts[rank] = self._counts.get(rank, 0) + 1 if self._deviates(rank, mine_s, others_s) else 0
            if self._counts[rank] >= self.settings.windows:
                self._counts[rank] = 0
                self.named ^= {rank}
                what: Literal["named", "cleared"] = "named" if rank in self.named else "cleared"
                changes.append(StragglerChange(rank, what, mine_s, others_s))
        return changes

    def _deviates(self, rank: int, mine_s: float, others_s: float) -> bool:
        """Return whether this window speaks for a change."""
        if rank in self.named:
            return mine_s < max(self.settings.clear_factor * others_s, others_s + self.settings.least_s)
        return mine_s > self.settings.factor * others_s and mine_s > others_s + self.settings.least_s
