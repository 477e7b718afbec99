"""The main thread's calls, made by another thread: signal handlers find no lock of a library held below them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from edl.background import BackgroundLoop
from edl.discovery.common.resource import Resource
from edl.errors import ClosedError
from edl.notifier import Notifier

__all__ = ["CallThread"]

A = TypeVar("A")

_IDLE_S: Final = 3600.0
"""How long the thread waits for a call, unless it is woken: it always is."""


class CallThread(Resource):
    """Makes calls that would leave locks held in the middle of the main thread, where signal handlers run.

    In the middle of a call gRPC holds locks, some of them for the whole process. A signal handler that closes a client
    waits for threads that need these locks, so the main thread makes no call of gRPC's itself.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._calls: deque[_Call] = deque()
        self._done = Notifier()
        # Now, since `close` must not start a thread: there is a lock in that, too.
        self._background = self._own(BackgroundLoop(name, self._work))

    def run(self, function: Callable[[], A]) -> A:
        """Make a call and wait for its end: in this object's thread, or where another than the main thread asks, here.

        Returns:
            What `function` returns. What it raises is raised here.

        Raises:
            ClosedError: this was closed before the call was over.
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
                del call  # this frame, which the error's traceback holds, would hold the error
        if not call.over:
            raise ClosedError("closed while the main thread waited for an answer")
        answer: A = call.answer
        return answer

    def _work(self) -> float:
        while self._calls:
            call = self._calls.popleft()
            try:
                call.answer = call.function()
            except Exception as exc:  # noqa: BLE001 - raised again where it is waited for
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
