"""Objects that are open, belong to one process, and own threads and other open objects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from edl.errors import ClosedError

__all__ = ["Background", "Owned"]


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class Owned:
    """Base of everything open. Closing closes the parts first; a forked child can neither use nor close it.

    Sockets, locks and database handles that went through a fork must not be touched: the parent still uses them.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._closing = threading.Lock()
        self._parts: list[_Closable] = []
        self._owner: Owned | None = None

    def _check(self) -> None:
        """Raise ClosedError unless this is open, in the process that opened it."""
        if self._pid != os.getpid():
            raise ClosedError(f"{type(self).__name__} was opened before a fork: open it again in the child")
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed")

    def _own(self, part: C) -> C:
        """Close `part` when this closes."""
        with self._closing:
            if not self._closed:
                self._parts.append(part)
                if isinstance(part, Owned):
                    part._owner = self
                return part
        part.close()
        raise ClosedError(f"{type(self).__name__} is closed")

    def _disown(self, part: _Closable) -> None:
        with self._closing:
            if part in self._parts:
                self._parts.remove(part)

    def close(self) -> None:
        """Release everything. May be called twice, and from any thread."""
        if self._pid != os.getpid():
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            parts, self._parts = self._parts, []
        self._halt()
        for part in reversed(parts):
            part.close()
        self._release()
        if self._owner is not None:
            self._owner._disown(self)

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
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            wait_s = self._step()
            if wait_s is None:
                return
            self._wake.wait(wait_s)
            self._wake.clear()

    def wake(self) -> None:
        """Call `step` now rather than when its wait is over."""
        self._wake.set()

    def close(self, timeout_s: float = 60.0) -> None:
        """Stop, and wait for the thread to end; what it does meanwhile has a deadline of its own."""
        self._closing = True
        self._interrupt()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
