"""`WorkQueue`: threads that work on keys when they are due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from edl.background import BackgroundLoop
from edl.errors import ClosedError, ConflictError, EDLError, TemporaryError
from edl.master.kube.operator.queue.key_schedule import KeySchedule

__all__ = ["WorkQueue"]

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""Longest wait of a worker at a time, so that it sees soon that the queue is closed."""
_CLOSE_S: Final = 10.0
"""How long `close` waits for work under way, some requests. What is cut off is done by the next operator."""


class WorkQueue:
    """Calls a function for each key that is due, in a few threads, never twice for a key at the same time.

    Args:
        work: does what is to be done about a key. Returns seconds after which to do it again, None for no such need. An
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
        """Have a key worked on no more, unless it is added again."""
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
        """Begin no more work, and wait for what is under way, some seconds."""
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
