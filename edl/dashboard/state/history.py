"""Bounded history: points in the order of their time. If there are too many, the older half is thinned out.

Points carry sums since the beginning (seconds by category) or figures of their moment, so leaving one out loses detail
but no amount. `StateReader` decides when a point is added.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Final, Generic, Protocol, TypeVar

from edl.collective.goodput import JobSummary, TimeCategory
from edl.dashboard.state.schema import JobPoint

__all__ = ["FROM_ENDED", "FROM_LEDGER", "MAX_POINTS", "History", "points_of_ledger"]

MAX_POINTS: Final = 600
"""20 minutes of a point in 2 s, and days of thinner ones; as JSON below 120 KB for a job."""
FROM_LEDGER: Final = 300
"""Most points that the ledger of a running job gives: the other half is for what comes."""
FROM_ENDED: Final = 100
"""Most points of a job that has ended, since there may be many: a picture's shape, in 20 KB of JSON."""


class _Point(Protocol):
    @property
    def t(self) -> float: ...


P = TypeVar("P", bound=_Point)


class History(Generic[P]):
    """Points in ascending order of time, at most `limit`, which is at least 4."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self._limit = limit
        self._points: list[P] = []

    @property
    def points(self) -> tuple[P, ...]:
        """All points, oldest first."""
        return tuple(self._points)

    @property
    def last_t(self) -> float | None:
        """The time of the newest point; None without any."""
        return self._points[-1].t if self._points else None

    def append(self, point: P) -> None:
        """Append a point, unless it is not newer than the newest: the clock went back."""
        if self._points and point.t <= self._points[-1].t:
            return
        self._points.append(point)
        if len(self._points) > self._limit:
            half = self._limit // 2
            self._points[:half] = self._points[:half:2]

    def extend(self, points: Iterable[P]) -> None:
        """Append points, oldest first."""
        for point in points:
            self.append(point)


def points_of_ledger(
    summary: JobSummary, after_t: float, until_t: float, look: int, most: int = FROM_LEDGER
) -> list[JobPoint]:
    """Return the points of a job's past after `after_t` and until `until_t`, at most `most`.

    Its spans say where the time went while no dashboard looked, so a page that is opened late shows all of it. A node's
    clock may be ahead of this machine's, hence `until_t`.
    """
    points = []
    sums = [0] * len(TimeCategory)
    for span in summary.spans:
        sums = [amount + more for amount, more in zip(sums, span.amounts, strict=True)]
        seconds = {state.name.lower(): sums[state] / 1e6 for state in TimeCategory}
        goodput = sums[TimeCategory.TRAIN] / sum(sums) if summary.step >= 0 else None
        points.append(JobPoint(summary.began + sum(sums) / 1e6, seconds, goodput, world_size=span.workers, look=look))
    times = [point.t for point in points]
    points = points[bisect.bisect_right(times, after_t) : bisect.bisect_right(times, until_t)]
    step = -(-len(points) // most)
    return points[::-1][::step][::-1] if step > 1 else points
