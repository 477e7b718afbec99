"""Exponential backoff with jitter, as in gRPC between connection attempts."""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
"""Random source for waits. A draw from the module `random` in a thread would change the random numbers of the user's
program."""


class Backoff:
    """Computes the waits between retries. Not thread-safe: each caller needs its own.

    Args:
        first_s: the wait after the first failure, in seconds.
        last_s: the longest wait, in seconds.
        jitter: the random share of a wait, 0 to 1: with 0.5, a wait of 2 s takes from 1 to 2 s. If many processes lose
            a server at the same moment, they should not all reconnect at the same moment.
        factor: the ratio of a wait to the previous one.
    """

    def __init__(self, first_s: float, last_s: float, *, jitter: float = 0.0, factor: float = 2.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._jitter = jitter
        self._factor = factor
        self.failures = 0
        """Number of consecutive failures, including failures whose wait is over."""

    def next_wait_s(self) -> float:
        """Return the seconds to wait before the next attempt, after a failure."""
        exponent = min(self.failures, 1000)  # float ** 1100 would overflow, after months of failures
        self.failures += 1
        wait_s = min(self._last_s, self._first_s * self._factor**exponent)
        return wait_s * CHANCE.uniform(1.0 - self._jitter, 1.0)

    def reset(self) -> None:
        """Start again with the first wait, after a successful attempt."""
        self.failures = 0
