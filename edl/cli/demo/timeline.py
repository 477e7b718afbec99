"""What the reader's counters were when, and what happened meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from edl.background import BackgroundLoop
from edl.distill import ReaderStats

__all__ = ["TeacherEvent", "Rates", "Timeline"]

Kind = Literal["kill", "join", "drain"]

_SAMPLE_S = 0.1
"""Between two looks at the counters: the picture's bins of half a second hold five."""


@dataclass(frozen=True)
class TeacherEvent:
    """At `at_s` seconds of the epoch, `kind` happened to `teacher`."""

    at_s: float
    kind: Kind
    teacher: str


@dataclass(frozen=True)
class Rates:
    """Rows a second, by bin of time.

    Attributes:
        at_s: middles of the bins in seconds of the epoch.
        delivered: to the students.
        served: by teacher, in the order in which they appeared.
    """

    at_s: np.ndarray[Any, Any]
    delivered: np.ndarray[Any, Any]
    served: dict[str, np.ndarray[Any, Any]]


class Timeline:
    """Reads counters in a thread of its own, from `start` to `stop`."""

    def __init__(self, stats: Callable[[], ReaderStats]) -> None:
        self._stats = stats
        self._samples: list[tuple[float, ReaderStats]] = []
        self._sampling: BackgroundLoop | None = None
        self._began = time.monotonic()
        self.events: list[TeacherEvent] = []

    def __enter__(self) -> Timeline:
        self._began = time.monotonic()
        self._sample()  # here, since the thread may get its first turn late
        self._sampling = BackgroundLoop("edl-demo-timeline", self._sample)
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampling is not None:
            self._sampling.close()
        self._sample()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def end_s(self) -> float:
        """When the last sample was taken, in seconds since the start."""
        return self._samples[-1][0] if self._samples else 0.0

    def mark(self, kind: Kind, teacher: str) -> None:
        """Something happens now."""
        self.events.append(TeacherEvent(self.now_s, kind, teacher))

    def rates(self, bin_s: float) -> Rates:
        """Return rates in bins of `bin_s` seconds, without the last, incomplete bin."""
        times = np.array([at for at, _ in self._samples])
        edges = np.arange(0.0, times[-1], bin_s)
        names: dict[str, None] = {}
        for _, stats in self._samples:
            names.update(dict.fromkeys(stats.teachers))

        def rate(values: list[int]) -> np.ndarray[Any, Any]:
            rates: np.ndarray[Any, Any] = np.diff(np.interp(edges, times, values)) / bin_s
            return rates

        served = {
            name: rate([stats.teachers[name].rows if name in stats.teachers else 0 for _, stats in self._samples])
            for name in names
        }
        return Rates(edges[:-1] + bin_s / 2, rate([stats.rows_delivered for _, stats in self._samples]), served)

    def _sample(self) -> float:
        self._samples.append((self.now_s, self._stats()))
        return _SAMPLE_S
