"""Counters of a process over its last seconds, by its own clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

__all__ = ["CounterWindow", "Counters"]

Counters: TypeAlias = Mapping[str, float | None]
"""Cumulative figures by name; None for a figure that is not known."""


class CounterWindow:
    """Samples of counters, of which it keeps those of the last seconds. Not thread-safe.

    A counter that falls has been started again (Triton was restarted behind `edl register`): the samples before are of
    no use, and are dropped.

    Args:
        window_s: how far back to compare, in seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, Counters]] = deque()

    def add(self, t: float, counters: Counters) -> tuple[float, Counters]:
        """Add a sample.

        Args:
            t: when it was taken, in seconds of a monotonic clock; never before the sample added last.
            counters: the sample, of the same names every time.

        Returns:
            Time and counters of the sample to compare it with: the newest that is at least `window_s` old, or else the
            oldest; itself where it is the first.
        """
        samples = self._samples
        if samples and _is_other_life(samples[-1][1], counters):
            samples.clear()
        samples.append((t, counters))
        while len(samples) > 2 and samples[1][0] <= t - self._window_s:
            samples.popleft()
        return samples[0]


def _is_other_life(before: Counters, after: Counters) -> bool:
    for name, value in after.items():
        earlier = before.get(name)
        if (value is None) != (earlier is None):
            return True
        if value is not None and earlier is not None and value < earlier:
            return True
    return False
