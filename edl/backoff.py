"""Waits between attempts that grow: exponential backoff with jitter, as gRPC's between two attempts to connect.

What does not belong here: the waiting itself, which an event or a close must be able to cut short, and which errors are
worth another attempt.
"""

from __future__ import annotations

import random

CHANCE = random.SystemRandom()
"""For waits. The module's own functions belong to the user's program: a draw there, from a thread and at any moment,
would change what it gets after `random.seed`."""


class Backoff:
    """The next wait of a caller that tries something again and again. Not thread-safe: every caller has its own.

    Args:
        first_s: the wait after the first failure, in seconds.
        last_s: no wait is longer, in seconds.
        jitter: the share of a wait that is left to chance, 0 to 1: with 0.5 a wait of 2 s takes from 1 to 2 s. Many
            processes that lose a server at the same moment should not all come back at the same moment.
        factor: by which a wait exceeds the wait before.
    """

    def __init__(self, first_s: float, last_s: float, *, jitter: float = 0.0, factor: float = 2.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._jitter = jitter
        self._factor = factor
        self.failures = 0
        """Failures in a row, those whose wait is over included."""

    def next_wait_s(self) -> float:
        """Return the seconds to wait before the next attempt, after a failure."""
        exponent = min(self.failures, 1000)  # float ** 1100 would overflow, after months of failures
        self.failures += 1
        wait_s = min(self._last_s, self._first_s * self._factor**exponent)
        return wait_s * CHANCE.uniform(1.0 - self._jitter, 1.0)

    def reset(self) -> None:
        """Begin with the first wait again: an attempt succeeded."""
        self.failures = 0
