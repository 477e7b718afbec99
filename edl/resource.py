"""The base class of objects that own threads and connections, safe against forks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import TracebackType
from typing import Final, Protocol, TypeVar

from typing_extensions import Self

from edl.errors import ClosedError

_CLOSE_S: Final = 10.0
"""How long to wait for another thread that is closing a part. Without this limit, a thread that the part waits for
could hang."""


class _Closable(Protocol):
    def close(self) -> object: ...


C = TypeVar("C", bound=_Closable)


class Resource:
    """Base of objects that stay open until `close` or the end of a `with` block. `close` first closes the parts.

    A forked child can neither use nor close the object: the parent still uses the sockets, locks and database handles.
    While the interpreter shuts down, `close` only sets a flag: daemon threads are frozen by then, perhaps with a lock
    held, and closing a channel or joining a thread would hang. Leases then expire like those of a killed process.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._closers: list[tuple[int, object]] = []  # calls of `close` and their threads: the first closes
        self._released = threading.Event()
        self._parts: list[_Closable] = []
        self._owner: Resource | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self) -> None:
        """Raise ClosedError if this object is closed, or was opened by another process."""
        self._check_process()
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed")

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(f"{type(self).__name__} was opened before a fork: open it again in the child")

    def _own(self, part: C) -> C:
        """Register a part, which `close` will close."""
        if isinstance(part, Resource):
            part._owner = self
        self._parts.append(part)
        if not self._closed:
            return part
        part.close()  # perhaps a second time: `close` may have found it in the list
        raise ClosedError(f"{type(self).__name__} is closed")

    def _disown(self, part: _Closable) -> None:
        with contextlib.suppress(ValueError):
            self._parts.remove(part)

    def close(self) -> None:
        """Release all resources. May be called twice, and from any thread."""
        if sys.is_finalizing():
            self._closed = True
            return
        if self._pid != os.getpid() or not self._is_first_closer():
            return
        self._closed = True
        try:
            self._halt()
            while (part := self._pop_part()) is not None:
                part.close()
                if isinstance(part, Resource):
                    part._wait_released()
            self._release()
        finally:
            self._released.set()
        if self._owner is not None:
            self._owner._disown(self)

    def _is_first_closer(self) -> bool:
        closer = (threading.get_ident(), object())  # atomic, unlike a lock plus its holder
        self._closers.append(closer)
        return self._closers[0] is closer

    def _wait_released(self) -> None:
        """Wait for a thread that is closing this object: the thread needs the owner's connection to release leases."""
        if self._closers[0][0] != threading.get_ident():  # else a finalizer interrupted this very close
            self._released.wait(_CLOSE_S)

    def _pop_part(self) -> _Closable | None:
        with contextlib.suppress(IndexError):
            return self._parts.pop()
        return None

    def _halt(self) -> None:
        """End the waits of other threads, before the parts are closed."""

    def _release(self) -> None:
        """Finish closing, after the parts are closed."""
