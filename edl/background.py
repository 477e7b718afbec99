"""Threads that run beside their caller: a loop that is woken and closed, and a call whose result is a future.

Python code starts a thread in either of two ways; both are daemon threads, which never keep a process from ending.
What does not belong here: event loops (`asyncio`), pools of threads, and what a thread does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from edl.notifier import Notifier

logger = logging.getLogger(__name__)

R = TypeVar("R")

_ERROR_PAUSE_S: Final = 1.0
"""A pause after an error that was not foreseen: without it, a step that fails at once would take a core."""
_CLOSE_TIMEOUT_S: Final = 60.0
"""How long `close` waits for a step under way: longer than any request's own deadline (5 s unless set otherwise)."""


class BackgroundLoop:
    """A daemon thread that calls a step again and again, until it is closed.

    An exception of the step is logged with its traceback, and the step is called again a second later: leases are to be
    renewed and changes to be followed after any failure. A step that wants to end the loop returns None.

    `wake` and `close` hold no lock, so a signal handler or finalizer may call them in the middle of any line, also of
    `wake` and `close`. A step is never called twice at the same time.

    Args:
        name: of the thread, as debuggers and `threading.enumerate` show it; begins with `edl-`.
        step: does a piece of work. Returns the seconds to wait before the next call, which `wake` cuts short, or None
            when there is nothing left to do. A wake during a step makes the next step follow without a wait.
        interrupt: makes a step that is blocked return soon; `close` calls it, once for every call of `close`.
    """

    def __init__(
        self, name: str, step: Callable[[], float | None], interrupt: Callable[[], object] = lambda: None
    ) -> None:
        self._step = step
        self._interrupt = interrupt
        self._changed = Notifier()
        self._woken = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether `close` was called; a step that takes long looks at this."""
        return self._closing

    def wake(self) -> None:
        """Call the step now rather than when its wait is over. Returns at once."""
        self._woken = True
        self._changed.notify()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Call no more steps, and wait for the step under way.

        Args:
            timeout_s: how long to wait, in seconds. The loop's own thread, which may close it, does not wait.

        Returns:
            Whether the thread has ended.
        """
        self._closing = True
        self._interrupt()
        self._changed.notify()
        if self._thread is threading.current_thread():
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until a step has ended the loop by returning None, or the loop is closed.

        Args:
            timeout_s: how long to wait, in seconds.

        Returns:
            Whether the thread has ended. In a fork of the process, where the thread is not, it has.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing:
            try:
                wait_s = self._step()
            except Exception:
                logger.exception("%s met an error that was not foreseen, and goes on", self._thread.name)
                wait_s = _ERROR_PAUSE_S
            if wait_s is None:
                return
            self._changed.wait_for(lambda: self._woken or self._closing, wait_s)
            self._woken = False


def start_call(name: str, function: Callable[[], R]) -> Future[R]:
    """Call a function in a daemon thread of its own.

    Unlike a `ThreadPoolExecutor`'s, the thread does not keep the process from ending: for calls that may hang, such as
    calls to a storage that does not answer.

    Args:
        name: of the thread; begins with `edl-`.
        function: called without arguments.

    Returns:
        The result, or the exception, which is logged nowhere: a caller that never asks for it does not hear of it. A
        thread whose errors are not asked for is a `BackgroundLoop`. In an event loop await `asyncio.wrap_future` of it.
    """
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()  # no more to be cancelled, which would leave no place for the result

    def run() -> None:
        try:
            result = function()
        except BaseException as exc:  # noqa: BLE001 - raised again where the result is asked for
            future.set_exception(exc)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
