"""Objects that are open, belong to one process, and own threads and other open objects."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from edl.errors import ClosedError
from edl.notifier import Notifier

__all__ = ["Background", "Owned"]

logger = logging.getLogger("edl.discovery")


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)

_AFTER_ERROR_S = 1.0
"""A pause after an error that was not foreseen: a thread that meets it at once again must not take a core."""


class Owned:
    """Base of everything open. Closing closes the parts first; a forked child can neither use nor close it.

    Sockets, locks and database handles that went through a fork must not be touched: the parent still uses them.

    No lock is held here: a signal handler may close this in the middle of any method, in the thread that is in it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._first_close = threading.Lock()  # taken by the first call of `close`, without waiting, and never released
        self._parts: list[_Closable] = []
        self._owner: Owned | None = None

    def _check(self) -> None:
        """Raise ClosedError unless this is open, in the process that opened it."""
        self._check_process()
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed")

    def _check_process(self) -> None:
        """Raise ClosedError in a forked child."""
        if self._pid != os.getpid():
            raise ClosedError(f"{type(self).__name__} was opened before a fork: open it again in the child")

    def _own(self, part: C) -> C:
        """Close `part` when this closes."""
        if isinstance(part, Owned):
            part._owner = self
        self._parts.append(part)
        if not self._closed:
            return part
        part.close()  # maybe a second time: `close` may have come across it
        raise ClosedError(f"{type(self).__name__} is closed")

    def _disown(self, part: _Closable) -> None:
        with contextlib.suppress(ValueError):
            self._parts.remove(part)

    def close(self) -> None:
        """Release everything. May be called twice, from any thread, and by signal handlers."""
        if self._pid != os.getpid() or not self._first_close.acquire(blocking=False):
            return
        self._closed = True
        self._halt()
        while (part := self._pop_part()) is not None:
            part.close()
        self._release()
        if self._owner is not None:
            self._owner._disown(self)

    def _pop_part(self) -> _Closable | None:
        with contextlib.suppress(IndexError):
            return self._parts.pop()
        return None

    def _halt(self) -> None:
        """End what other threads wait for, before the parts are closed."""

    def _release(self) -> None:
        """What is left to do after the parts are closed."""


class Background:
    """A daemon thread that calls `step` until closed.

    Args:
        step: does a piece of work; returns the seconds to wait before the next call (cut short by `wake`), or None when
            there is nothing left to do.
        interrupt: makes a `step` that is blocked return soon; called by `close`.
    """

    def __init__(
        self, name: str, step: Callable[[], float | None], interrupt: Callable[[], None] = lambda: None
    ) -> None:
        self._step = step
        self._interrupt = interrupt
        self._changed = Notifier()  # a signal handler may wake or close this in the middle of another wake
        self._woken = self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            try:
                wait_s = self._step()
            except Exception:
                # Whatever it was, leases are to be renewed and changes to be heard of after it as before.
                logger.exception("%s met an error that was not foreseen, and goes on", self._thread.name)
                wait_s = _AFTER_ERROR_S
            if wait_s is None:
                return
            self._changed.wait_for(lambda: self._woken or self._closing, wait_s)
            self._woken = False

    def wake(self) -> None:
        """Call `step` now rather than when its wait is over."""
        self._woken = True
        self._changed.notify()

    def close(self, timeout_s: float = 60.0) -> None:
        """Stop, and wait for the thread to end; what it does meanwhile has a deadline of its own."""
        self._closing = True
        self._interrupt()
        self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
