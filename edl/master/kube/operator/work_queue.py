"""`WorkQueue`: which resource is looked at when, each by a single worker at a time.

`KeySchedule` is the state of the queue, with the time given, without locks, threads and clocks. That is client-go's
rate-limited work queue (k8s.io/client-go/util/workqueue): what is added while it is worked on is due again afterwards;
a failure waits twice as long each time; what is added meanwhile is not held up by that.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.errors import ClosedError, ConflictError, EDLError, TemporaryError

logger = logging.getLogger(__name__)

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
        """Stop working on a key, unless it is added again."""
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


_LOOK_S: Final = 1.0
"""Longest wait of a worker at a time, so that it sees soon that the queue is closed."""
_CLOSE_S: Final = 10.0
"""How long `close` waits for work under way, some requests. What is cut off is done by the next operator."""


class WorkQueue:
    """Calls a function for each key that is due, in a few threads, never twice for a key at the same time.

    Args:
        work: does what a key needs. Returns seconds after which to do it again, None for no such need. An
            error has it called again, after a back-off.
        workers: threads; as many requests of the API server are under way at most.
        on_result: called after each work, with the key, its seconds, and the error or None.
        schedule: which key is due when; None for the usual back-off.
    """

    def __init__(
        self,
        work: Callable[[str], float | None],
        *,
        workers: int = 4,
        on_result: Callable[[str, float, Exception | None], None] = lambda key, seconds, error: None,
        schedule: KeySchedule | None = None,
    ) -> None:
        self._work = work
        self._on_result = on_result
        self._schedule = schedule or KeySchedule()
        self._changed = threading.Condition()
        self._closed = False
        self._loops = [BackgroundLoop(f"edl-reconcile-{number}", self._step) for number in range(workers)]

    def add(self, key: str, delay_s: float = 0.0) -> None:
        """Have a key worked on soon.

        `delay_s` gives what comes in between the time to come, so that all of it is a single look.
        """
        with self._changed:
            self._schedule.add(key, time.monotonic() + delay_s)
            self._changed.notify()

    def forget(self, key: str) -> None:
        """Stop working on a key, unless it is added again."""
        with self._changed:
            self._schedule.forget(key)

    def __len__(self) -> int:
        """Keys that are due some time, or worked on."""
        with self._changed:
            return len(self._schedule)

    def count_due(self) -> int:
        """Return how many keys wait for a worker."""
        with self._changed:
            return self._schedule.count_due(time.monotonic())

    def get_stuck_s(self) -> float:
        """Return for how many seconds the slowest work is under way."""
        with self._changed:
            since_s = self._schedule.get_oldest_active_s()
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        """Begin no new work, and wait some seconds for what is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_S
        for loop in self._loops:
            loop.close(max(0.0, deadline - time.monotonic()))

    def _step(self) -> float | None:
        key = self._take()
        if key is None:
            return None if self._closed else 0.0
        begun_s = time.monotonic()
        requeue_s: float | None = None
        error: Exception | None = None
        try:
            requeue_s = self._work(key)
        except ClosedError as exc:
            error = exc
            if self._closed:
                return None
            raise
        except (EDLError, TimeoutError) as exc:
            error = exc
            level = logging.DEBUG if isinstance(exc, (ConflictError, TemporaryError)) else logging.WARNING
            logger.log(level, "%s: %s", key, exc)
        except Exception as exc:
            error = exc
            raise  # the loop logs it with its traceback
        finally:
            with self._changed:
                now_s = time.monotonic()
                self._schedule.finish(key, now_s, failed=error is not None, requeue_s=requeue_s)
                self._changed.notify()
            self._on_result(key, now_s - begun_s, error)
        return 0.0

    def _take(self) -> str | None:
        with self._changed:
            if self._closed:
                return None
            key = self._schedule.take(time.monotonic())
            if key is None:
                due_s = self._schedule.get_next_due_s()
                wait_s = _LOOK_S if due_s is None else min(_LOOK_S, max(0.0, due_s - time.monotonic()))
                self._changed.wait(wait_s)
                key = None if self._closed else self._schedule.take(time.monotonic())
            return key
