"""Waits that nothing makes last for ever.

For what another thread does: its wake-up may be called anywhere, also in signal handlers and finalizers. And on an
event loop for a result, until a deadline: a cancellation always ends it.
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
"""How long the main thread waits at a stretch. A signal that comes after CPython's last look for signals and before it
blocks in the lock interrupts nothing: its handler would run when the wait ends, which without it may be never."""


class Notifier:
    """Lets threads wait until a predicate holds, with no lock around the state that it looks at.

    `threading.Condition` and `threading.Event` have a lock inside. Garbage collection and signals run code of others in
    the middle of any function, also where that lock is held by the very thread: there `notify` and `set` wait for ever,
    and with a lock that can be taken again they come between a predicate's look and the wait that follows it, and wake
    no thread. Here every wait has a lock of its own, known to `notify` *before* the predicate is looked at: the event
    count of Reed and Kanodia (1979), with a ticket for every wait in place of the count.

    Whoever changes the state does so in steps that are atomic by themselves (an attribute, `deque.append`,
    `set.discard`), and calls `notify` afterwards.
    """

    def __init__(self) -> None:
        self._waits: deque[threading.Lock] = deque()

    def wait_for(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until the predicate holds; False if it does not after `timeout_s`."""
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
                if threading.get_ident() == threading.main_thread().ident:  # only there do handlers run
                    stretch_s = min(stretch_s, _SIGNAL_POLL_S) if stretch_s >= 0 else _SIGNAL_POLL_S
                woken.acquire(timeout=stretch_s)
            finally:
                with contextlib.suppress(ValueError):  # `notify` has taken it out
                    self._waits.remove(woken)

    def notify(self) -> None:
        """Have every wait look at its predicate again. Never blocks, and may interrupt itself."""
        for _ in range(len(self._waits)):  # not those that come back meanwhile: their predicate is looked at first
            try:
                woken = self._waits[0]
            except IndexError:
                return
            # In this order: what interrupts here, and waits for a thread to end, finds that thread's wait and wakes it.
            with contextlib.suppress(RuntimeError):  # it has done so
                woken.release()
            with contextlib.suppress(ValueError):
                self._waits.remove(woken)


class ReentrantEvent:
    """A `threading.Event` that a signal handler may set in the middle of any of its functions."""

    def __init__(self) -> None:
        self._changed = Notifier()
        self._set = False

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._set

    def set(self) -> None:
        """Let every wait end, now and later."""
        self._set = True
        self._changed.notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for `set`; False if it was not called within `timeout_s`."""
        return self._changed.wait_for(self.is_set, timeout_s)


async def wait_within(awaitable: Awaitable[T], timeout_s: float) -> T:
    """Wait for a result, for so long.

    `asyncio.wait_for` loses a cancellation that comes in the moment in which the result is there, before Python 3.12:
    it returns the result, and a task that goes on from there is cancelled no more, so that whoever waits for its end
    waits for ever. Here the cancellation wins, and the result is dropped.

    Args:
        awaitable: gives the result; cancelled, and waited for, where the wait ends before.
        timeout_s: how many seconds to wait.

    Returns:
        The result.

    Raises:
        asyncio.TimeoutError: there was no result by then.
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
        del task  # an error's traceback leads to this frame
