"""Objects that are open, belong to a process, and own threads and other open objects."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Protocol, TypeVar

from edl.errors import ClosedError

__all__ = ["Resource"]


class _Closable(Protocol):
    def close(self) -> object: ...


C = TypeVar("C", bound=_Closable)


class Resource:
    """Base of everything open. Closing closes the parts first; a forked child can neither use nor close it.

    Sockets, locks and database handles that went through a fork must not be touched: the parent still uses them.

    No lock is held here: a signal handler may close this in the middle of any method, in the thread that is in it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._first_close = threading.Lock()  # taken by the first call of `close`, without waiting, and never released
        self._parts: list[_Closable] = []
        self._owner: Resource | None = None

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
        if isinstance(part, Resource):
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
        """Release everything. May be called twice, from any thread, and by signal handlers.

        When the interpreter shuts down this only sets a flag. A suspended generator is closed then, and with it the
        resources of its `with` blocks. But threads no longer run, so waiting for them, or for gRPC's in
        `Channel.close`, would hang. The end of the process releases everything.
        """
        if sys.is_finalizing():
            self._closed = True
            return
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
        """Do what is left after the parts are closed."""
