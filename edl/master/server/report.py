"""What a master shows of its job: the state's counts, with rates over the last seconds. Pure, but for its memory."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["UnitRates", "describe_dataset", "encode"]

_WINDOW_S: Final = 15.0
"""Over which rates are taken: a shard may take seconds."""
_NBYTES: Final = 200_000
"""Of a report at most: a value of the Store may have 256 KiB."""
_HOLDERS: Final = 200
"""Holders that are listed of a data set, the busiest first."""


class UnitRates:
    """Rates of totals that are looked at from time to time."""

    def __init__(self) -> None:
        self._looks: dict[str, collections.deque[tuple[float, float]]] = {}

    def look(self, key: str, total: float, now_s: float) -> float:
        """Note a total, and return by how much it grew a second."""
        looks = self._looks.setdefault(key, collections.deque())
        if looks and total < looks[-1][1]:
            looks.clear()  # it was put back
        looks.append((now_s, total))
        while len(looks) > 2 and looks[1][0] <= now_s - _WINDOW_S:
            looks.popleft()
        (begun_s, before), (at_s, after) = looks[0], looks[-1]
        return (after - before) / (at_s - begun_s) if at_s > begun_s else 0.0

    def keep(self, keys: set[str]) -> None:
        """Forget all other keys."""
        for key in self._looks.keys() - keys:
            del self._looks[key]


def describe_dataset(
    status: dict[str, Any], rates: UnitRates, now_s: float, silence_s: Callable[[str], float]
) -> dict[str, Any]:
    """Return what is shown of a data set.

    Args:
        status: as `ShardBook.status` gives it.
        rates: remembers earlier looks.
        now_s: of a clock that never goes back.
        silence_s: returns for how long a session was silent.
    """
    name, done = status["name"], status["units_done"]
    rate = rates.look(name, done, now_s)
    holders = []
    for holder in status["holders"]:
        session = holder["session"]
        holders.append(
            {
                **holder,
                "units_per_s": round(rates.look(f"{name}/{session}", holder["units_done"], now_s), 3),
                "seen_s": round(silence_s(session), 3),
            }
        )
    holders.sort(key=lambda holder: -holder["units_done"])
    units, epochs = status["units"], status["epochs"]
    left = None if units is None or not epochs else max(0, units * epochs - done)
    return {
        **status,
        "units_per_s": round(rate, 3),
        "eta_s": round(left / rate, 1) if left and rate > 0 else None,
        "holders": holders,
    }


def encode(report: dict[str, Any]) -> bytes:
    """Return the report as JSON that the Store takes: without its longest parts where it has too many bytes."""
    shorter: Sequence[Callable[[dict[str, Any]], None]] = (
        lambda dataset: dataset.update(holders=dataset["holders"][:_HOLDERS]),
        lambda dataset: dataset.update(holders=dataset["holders"][:20], poisoned=dataset["poisoned"][:10]),
        lambda dataset: dataset.update(holders=[], poisoned=[]),
    )
    for shorten in shorter:
        for dataset in report["datasets"]:
            shorten(dataset)
        data = json.dumps(report, allow_nan=False).encode()
        if len(data) <= _NBYTES:
            return data
    return json.dumps({**report, "datasets": report["datasets"][:100], "events": []}, allow_nan=False).encode()
