"""Waits that cannot hang.

With `Notifier`, a thread waits for other threads, which may call `notify` anywhere, even in signal handlers and
finalizers. `wait_within` waits on an event loop for a result until a deadline, and a cancellation always ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

_SIGNAL_POLL_S: Final = 0.5
"""Longest single wait of the main thread. If a signal arrives between CPython's last check for signals and the blocking
lock call, it does not interrupt the wait: the signal's handler would run only when the wait ends, which may be
never."""


class Notifier:
    """Lets threads wait until a predicate holds, without a lock around the state that the predicate reads.

    `threading.Condition` and `threading.Event` contain a lock. Garbage collection and signals can run other code in the
    middle of any function, even while the same thread holds that lock: `notify` and `set` would then deadlock. With a
    reentrant lock, `notify` and `set` could run between the check of a predicate and the wait that follows, and wake no
    thread. In `Notifier`, every wait has its own lock, which `notify` knows *before* the predicate is checked. This is
    the event count of Reed and Kanodia (1979), with a ticket per wait in place of the count.

    Code that changes the state must change it in atomic steps (setting an attribute, `deque.append`, `set.discard`),
    and then call `notify`.
    """

    def __init__(self) -> None:
        self._waits: deque[threading.Lock] = deque()

    def wait_for(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until the predicate holds; return False if it does not hold after `timeout_s`."""
        if predicate():
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            woken = threading.Lock()
            woken.acquire()
            self._waits.append(woken)
            try:
                if predicate():
                    return True
                left_s = -1.0 if deadline is None else deadline - time.monotonic()
                if deadline is not None and left_s <= 0:
                    return False
                stretch_s = min(left_s, threading.TIMEOUT_MAX)
                if threading.get_ident() == threading.main_thread().ident:  # handlers run only there
                    stretch_s = min(stretch_s, _SIGNAL_POLL_S) if stretch_s >= 0 else _SIGNAL_POLL_S
                woken.acquire(timeout=stretch_s)
            finally:
                with contextlib.suppress(ValueError):  # `notify` has removed it
                    self._waits.remove(woken)

    def notify(self) -> None:
        """Make every wait check its predicate again. Never blocks, and is reentrant."""
        for _ in range(len(self._waits)):  # not those added meanwhile: they check first
            try:
                woken = self._waits[0]
            except IndexError:
                return
            # In this order: code that interrupts here and waits for a thread still finds and wakes that thread's wait.
            with contextlib.suppress(RuntimeError):  # already released
                woken.release()
            with contextlib.suppress(ValueError):
                self._waits.remove(woken)


async def wait_within(awaitable: Awaitable[T], timeout_s: float) -> T:
    """Wait for a result; raise `asyncio.TimeoutError` if late. If the wait ends early, cancel and await the awaitable.

    Before Python 3.12, `asyncio.wait_for` loses a cancellation that arrives together with the result: it returns the
    result, the task continues uncancelled, and code that waits for the task to end hangs. Here the cancellation wins,
    and the result is dropped.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
    except (asyncio.CancelledError, asyncio.TimeoutError):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    try:
        return task.result()
    finally:
        del task  # an error's traceback refers to this frame
