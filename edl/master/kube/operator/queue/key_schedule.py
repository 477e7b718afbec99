"""`KeySchedule`: the state of a work queue, with the time given. Without locks, threads and clocks."""

from __future__ import annotations

import heapq
from typing import Final

from edl.backoff import Backoff

__all__ = ["KeySchedule"]

_JITTER: Final = 0.2
"""Share of a wait after a failure that is left to chance, so that keys which failed together do not come back so."""


class KeySchedule:
    """Which key is due when. A key is there once, and is not given out again before it is finished.

    That is client-go's rate-limited work queue (k8s.io/client-go/util/workqueue): what is added while it is worked on
    is due again afterwards; a failure waits twice as long each time; what is added meanwhile is not held up by that.

    Args:
        first_backoff_s: the wait after a key's first failure, in seconds.
        last_backoff_s: no wait after a failure is longer, in seconds.
    """

    def __init__(self, first_backoff_s: float = 0.2, last_backoff_s: float = 60.0) -> None:
        self._first_backoff_s = first_backoff_s
        self._last_backoff_s = last_backoff_s
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._number = 0
        self._active: dict[str, float] = {}
        self._again: dict[str, float] = {}
        self._failures: dict[str, Backoff] = {}

    def __len__(self) -> int:
        """Keys that are due some time, or worked on."""
        return len(self._due.keys() | self._active.keys())

    def add(self, key: str, due_s: float) -> None:
        """Have a key worked on at a time, or earlier where that was wanted before."""
        if key in self._active:
            self._again[key] = min(due_s, self._again.get(key, due_s))
        elif due_s < self._due.get(key, float("inf")):
            self._number += 1  # of two that are due at once, the first that was added comes first
            self._due[key] = due_s
            heapq.heappush(self._heap, (due_s, self._number, key))

    def take(self, now_s: float) -> str | None:
        """Return a key that is due, which is worked on from now until `finish`; None if none is due."""
        self._drop_outdated()
        if not self._heap or self._heap[0][0] > now_s:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        self._active[key] = now_s
        return key

    def finish(self, key: str, now_s: float, *, failed: bool = False, requeue_s: float | None = None) -> None:
        """Say that a key was worked on.

        A key that `failed` is worked on again after its back-off; any key in `requeue_s`, unless that is None.
        """
        self._active.pop(key, None)
        again = self._again.pop(key, None)
        if failed:
            backoff = self._failures.setdefault(
                key, Backoff(self._first_backoff_s, self._last_backoff_s, jitter=_JITTER)
            )
            self.add(key, now_s + backoff.next_wait_s())
        else:
            self._failures.pop(key, None)
        if again is not None:
            self.add(key, again)
        if requeue_s is not None:
            self.add(key, now_s + requeue_s)

    def forget(self, key: str) -> None:
        """Have a key worked on no more, unless it is added again."""
        self._due.pop(key, None)
        self._again.pop(key, None)
        self._failures.pop(key, None)

    def get_next_due_s(self) -> float | None:
        """Return when the next key is due; None if none is."""
        self._drop_outdated()
        return self._heap[0][0] if self._heap else None

    def get_oldest_active_s(self) -> float | None:
        """Return since when the key is worked on that takes longest; None if none is."""
        return min(self._active.values(), default=None)

    def count_due(self, now_s: float) -> int:
        """Return how many keys wait for a worker."""
        return sum(due_s <= now_s for due_s in self._due.values())

    def _drop_outdated(self) -> None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
