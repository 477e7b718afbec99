"""How long a job's data will last, from its master's reports: what is left, by the rate at which it was done so far.

What does not belong here: reading the reports, and what follows from the time (`workers`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["WorkLeft"]

_WINDOW_S: Final = 600.0
"""Over which a rate is taken at most: long enough for shards that take minutes."""


class WorkLeft:
    """Remembers how much was done, and tells when all of it will be, at the rate of the job's present size."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[tuple[float, float]]] = {}
        self._rates: dict[str, float] = {}

    def resize(self) -> None:
        """Count rates anew, as the job's size has changed; the last one stands until there is another."""
        self._looks.clear()

    def look(self, datasets: Sequence[Mapping[str, Any]], now_s: float) -> float | None:
        """Note what is done, and return the seconds until all data sets are done.

        Args:
            datasets: of a master's report.
            now_s: of a monotonic clock.

        Returns:
            The seconds; None if there is no data set, one has no end yet, or nothing of one was done so far.
        """
        times = [self._look(dataset, now_s) for dataset in datasets]
        known = [time_s for time_s in times if time_s is not None]
        return max(known) if known and len(known) == len(times) else None

    def _look(self, dataset: Mapping[str, Any], now_s: float) -> float | None:
        if dataset.get("finished") is True:
            return 0.0
        name, done = str(dataset.get("name")), _number(dataset.get("units_done"))
        rate = self._note(name, done, now_s) or _number(dataset.get("units_per_s")) or self._rates.get(name)
        units, epochs = dataset.get("units"), _number(dataset.get("epochs"))
        if units is None or not epochs:
            return None  # it grows, or is gone through again and again
        left = max(0.0, _number(units) * epochs - done)
        if not left:
            return 0.0
        if not rate:
            return None
        self._rates[name] = rate
        return left / rate

    def _note(self, name: str, done: float, now_s: float) -> float:
        looks = self._looks.setdefault(name, deque())
        if looks and done < looks[-1][1]:
            looks.clear()  # it was put back
        looks.append((now_s, done))
        while len(looks) > 2 and looks[1][0] <= now_s - _WINDOW_S:
            looks.popleft()
        (begun_s, before), (at_s, after) = looks[0], looks[-1]
        return (after - before) / (at_s - begun_s) if at_s > begun_s else 0.0


def _number(value: object) -> float:
    """Return a figure of a report, which anybody may have written to the Store; 0 for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 <= value <= 1e18 else 0.0
