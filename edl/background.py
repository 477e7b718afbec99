"""Runs background threads: a loop that can be woken and closed, or a call whose result is a future.

EDL starts threads only in these two ways, except for the reader's own threads (`edl.distill`). Both kinds of thread are
daemon threads, which never keep a process alive.
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
"""Pause after an unexpected error: without it, a step that fails at once would occupy a core."""
_CLOSE_TIMEOUT_S: Final = 60.0
"""How long `close` waits for a running step: longer than the deadline of any request (5 s by default)."""


class BackgroundLoop:
    """A daemon thread that calls a step repeatedly until it is closed.

    If a step raises an exception, the traceback is logged, and the step is called again a second later, because leases
    must be renewed and changes followed after any failure. To end the loop, a step returns None.

    `wake` and `close` hold no lock, so a signal handler or finalizer may call them at any point, even during `wake` and
    `close`. Calls of the step never overlap.

    Args:
        name: name of the thread for debuggers and `threading.enumerate`; begins with `edl-`.
        step: does a piece of work. Returns the seconds to wait before the next call (`wake` ends this wait early), or
            None when nothing is left to do. If `wake` is called during a step, the next step follows immediately.
        interrupt: makes a blocked step return soon; every `close` calls it once.
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

    def wake(self) -> None:
        """Call the step now instead of after the wait. Returns immediately."""
        self._woken = True
        self._changed.notify()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Stop calling the step, and wait for a running call.

        Args:
            timeout_s: seconds to wait. The loop's own thread, which may close it, does not wait.

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
            Whether the thread has ended; True in a forked child, which does not have the thread.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing:
            try:
                wait_s = self._step()
            except Exception:
                logger.exception("%s: unexpected error; continuing", self._thread.name)
                wait_s = _ERROR_PAUSE_S
            if wait_s is None:
                return
            self._changed.wait_for(lambda: self._woken or self._closing, wait_s)
            self._woken = False


def start_call(name: str, function: Callable[[], R]) -> Future[R]:
    """Call a function in a daemon thread of its own.

    Unlike the threads of a `ThreadPoolExecutor`, this thread does not keep the process alive. Use this function for
    calls that may hang, such as calls to storage that does not respond.

    Args:
        name: name of the thread; begins with `edl-`.
        function: called without arguments.

    Returns:
        A future with the result or exception. Exceptions are not logged: if you would ignore the future, use a
        `BackgroundLoop`, which logs them. In an event loop, await `asyncio.wrap_future(future)`.
    """
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()  # can no longer be cancelled, so the result can be set

    def run() -> None:
        try:
            result = function()
        except BaseException as exc:  # noqa: BLE001 - raised again by `result`
            future.set_exception(exc)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
