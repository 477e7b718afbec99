"""Base classes for objects that own threads and connections, safe against forks and signal handlers.

A signal handler may close an object in the middle of any of its methods, in the same thread that runs the method. So
nothing here holds a lock while it calls other code, and the main thread, where handlers run, makes no library calls
that do: a `CallThread` makes them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from typing_extensions import Self

from edl.background import BackgroundLoop
from edl.errors import ClosedError
from edl.notifier import Notifier

_CLOSE_S: Final = 10.0
"""How long to wait for another thread that closes a part. A thread that the part waits for must not hang."""
_IDLE_S: Final = 3600.0
"""How long a `CallThread` waits if no call wakes it."""


class _Closable(Protocol):
    def close(self) -> object: ...


C = TypeVar("C", bound=_Closable)
A = TypeVar("A")


class Resource:
    """Base of objects that stay open until `close` or the end of a `with` block. Closing one closes its parts first.

    A forked child can neither use nor close it: the parent still uses the sockets, locks and database handles. While
    the interpreter shuts down, `close` only sets a flag: daemon threads are frozen by then, perhaps with a lock held,
    and closing a channel or joining a thread would hang. Leases then expire like those of a killed process.
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
        """Raise ClosedError if this is closed, or opened by another process."""
        self._check_process()
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed")

    def _check_process(self) -> None:
        """Raise ClosedError in a forked child."""
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
        """Release everything. May be called twice, from any thread, and by signal handlers."""
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
        """Wait for another thread that closes this: it needs its owner's connection to release leases."""
        if self._closers[0][0] != threading.get_ident():  # else a signal handler interrupted this very close
            self._released.wait(_CLOSE_S)

    def _pop_part(self) -> _Closable | None:
        with contextlib.suppress(IndexError):
            return self._parts.pop()
        return None

    def _halt(self) -> None:
        """End the waits of other threads, before the parts are closed."""

    def _release(self) -> None:
        """Finish closing, after the parts are closed."""


class CallThread(Resource):
    """Makes the main thread's calls of libraries that hold locks, such as gRPC, in a thread with this name.

    A signal handler that closes a client waits for threads that need the same locks. If the main thread held them
    when the handler interrupted it, this would deadlock.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._calls: deque[_Call] = deque()
        self._done = Notifier()
        # Started here, since starting a thread also takes a lock.
        self._background = self._own(BackgroundLoop(name, self._work))

    def run(self, function: Callable[[], A]) -> A:
        """Make a call and return its result, or raise its error. Threads other than the main thread call directly.

        Raises:
            ClosedError: this was closed before the call ended.
        """
        self._check()
        if threading.current_thread() is not threading.main_thread():
            return function()
        call = _Call(function)
        self._calls.append(call)
        self._background.wake()
        self._done.wait_for(lambda: call.over or self._closed)
        if call.failure is not None:
            try:
                raise call.failure
            finally:
                del call  # the error's traceback refers to this frame, which would refer to the error
        if not call.over:
            raise ClosedError("closed while the main thread waited for an answer")
        answer: A = call.answer
        return answer

    def _work(self) -> float:
        while self._calls:
            call = self._calls.popleft()
            try:
                call.answer = call.function()
            except Exception as exc:  # noqa: BLE001 - raised again in `run`
                call.failure = exc
            call.over = True
            self._done.notify()
        return _IDLE_S

    def _halt(self) -> None:
        self._done.notify()


class _Call:
    """A call that the main thread waits for."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.answer: Any = None
        self.failure: Exception | None = None
        self.over = False
