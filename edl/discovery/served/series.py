"""Metrics of the last hours, in the memory of the process that serves a store: a ring of points per series.

They show what happened before an incident, without Prometheus. A series has a point every 10 s for 4 h, and is
forgotten 4 h after its last point, or when there are too many. A point has at most 16 numbers of 8 bytes, so a series
takes at most 200 KB, and all of them 50 MB. The recorder defines what the numbers mean.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from edl.protocol import store as messages

Sample = Mapping[str, Mapping[str, float | None]]
"""A point of each series: the values of its fields by name; None if a value is unknown."""

EVERY_S: Final = 10.0
KEPT_S: Final = 4 * 3600.0
_MOST_POINTS: Final = int(KEPT_S / EVERY_S)
_MOST_SERIES: Final = 256
_MOST_FIELDS: Final = 15


class SeriesRings:
    """The rings, by the name of their series. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rings: dict[str, tuple[tuple[str, ...], array[float]]] = {}

    def record(self, sample: Sample) -> None:
        """Add a point with the current time to each series of the sample; drop the oldest points and series."""
        now_s = self._clock()
        with self._lock:
            for name, point in sample.items():
                fields = ("t", *sorted(point)[:_MOST_FIELDS])
                ring = self._rings.pop(name, None)  # reinserted, so that the first is the one without news for longest
                if ring is None or ring[0] != fields:
                    ring = fields, array("d")
                known = (point[field] for field in fields[1:])
                ring[1].extend((now_s, *(math.nan if value is None else value for value in known)))
                del ring[1][: -_MOST_POINTS * len(fields)]
                self._rings[name] = ring
            for name, (fields, values) in list(self._rings.items()):
                if len(self._rings) > _MOST_SERIES or values[-len(fields)] < now_s - KEPT_S:
                    del self._rings[name]

    def replies(self) -> Iterator[messages.SeriesReply]:
        """Yield a message per series."""
        with self._lock:
            names = list(self._rings)
        for name in names:
            with self._lock:
                fields, values = self._rings.get(name, ((), array("d")))
                reply = messages.SeriesReply(name=name, fields=fields, values=values)
            yield reply
