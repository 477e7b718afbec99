"""Runs the event loop that all readers of a process share, in a background thread.

The thread starts with the first reader and ends with the last. A forked child inherits neither the thread nor the loop,
so using the parent's reader in the child raises `ClosedError`. If the parent ever had a loop, the child cannot start
its own either: gRPC stays initialized, and would wait in the child for threads that exist only in the parent.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from edl.errors import ClosedError

logger = logging.getLogger("edl.distill")

T = TypeVar("T")

_LINGER_S = 0.05  # for callbacks that gRPC schedules while closing: milliseconds on a busy machine
_STOP_S = 10.0  # how long the last user waits for the thread, which ends within milliseconds unless logging blocks
_REMEDY = (
    "gRPC does not work in a process whose parent had used gRPC before the fork. Start this process with "
    'multiprocessing.get_context("spawn") or ("forkserver") and create its reader there, or fork before the first '
    "reader of the parent is used"
)


class EventLoopThread:
    """The process's event loop, with a reference count: `acquire` adds a reference and `release` removes it."""

    _lock = threading.Lock()  # guards the following fields and `_users`
    _shared: EventLoopThread | None = None
    used = False  # whether a loop was ever acquired for gRPC, in this process or an ancestor
    inherited = False  # whether that happened before this process was forked

    def __init__(self) -> None:
        self._users = 0
        self._pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        # Not a `BackgroundLoop`, because asyncio's loop has its own wake-up and shutdown.
        self._thread = threading.Thread(target=self._run, name="edl-distill", daemon=True)

    @classmethod
    def acquire(cls, *, for_grpc: bool = True) -> EventLoopThread:
        """Return the process's loop, and start it if necessary; add a reference."""
        if for_grpc and cls.inherited:
            raise ClosedError(
                f"a reader cannot connect in process {os.getpid()}: an ancestor process has used a "
                f"reader, and {_REMEDY}"
            )
        with cls._lock:
            cls.used = cls.used or for_grpc
            if cls._shared is None:
                cls._shared = cls()
                cls._shared._thread.start()
            cls._shared._users += 1
            return cls._shared

    def release(self) -> None:
        """Release the caller's reference. The last user stops the loop and waits for its thread."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._users -= 1
            if self._users:
                return
            EventLoopThread._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                logger.warning("the readers' event loop has not ended after %g s; no longer waiting for it", _STOP_S)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule a function on the loop, from any thread. Takes no lock, because finalizers call this too."""
        self.check()
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            raise ClosedError("the reader is closed") from None

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and return its result. After `timeout_s`, cancel it and raise `TimeoutError`."""
        self.check()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"no result within {timeout_s:g} s") from None

    def check(self) -> None:
        """Raise `ClosedError` if the loop belongs to a parent process."""
        if self._pid != os.getpid():
            raise ClosedError(
                f"this reader belongs to process {self._pid} and cannot be used in process {os.getpid()}, forked "
                f"from it: {_REMEDY}"
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            # gRPC may still deliver events of closed channels to this loop. On a closed loop, they would appear as
            # tracebacks in the next reader's log.
            self.loop.run_until_complete(asyncio.sleep(_LINGER_S))
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


class _GarbageGuard:
    """Keeps a forked child from collecting the parent's garbage.

    If the child collected an unreachable gRPC channel of the parent, it would wait forever for a thread that only the
    parent has. So inherited objects are frozen (`gc.freeze`). Several threads may fork at once: the first thread turns
    the parent's collector off, and the last thread turns it on again.
    """

    lock = threading.Lock()
    forks = 0  # number of forks in progress
    turned_off = False

    @classmethod
    def before(cls) -> None:
        with cls.lock:
            cls.forks += 1
            if EventLoopThread.used and gc.isenabled():
                cls.turned_off = True
                gc.disable()

    @classmethod
    def after_in_parent(cls) -> None:
        with cls.lock:
            cls.forks -= 1
            if cls.turned_off and not cls.forks:
                cls.turned_off = False
                gc.enable()

    @classmethod
    def after_in_child(cls) -> None:
        cls.lock = threading.Lock()  # another thread of the parent may hold the inherited lock
        EventLoopThread._lock = threading.Lock()
        EventLoopThread._shared = None  # its thread does not exist in the child
        turned_off = cls.turned_off
        cls.turned_off = False
        cls.forks = 0
        if EventLoopThread.used:
            EventLoopThread.inherited = True
            gc.freeze()
        if turned_off:
            gc.enable()


os.register_at_fork(
    before=_GarbageGuard.before,
    after_in_parent=_GarbageGuard.after_in_parent,
    after_in_child=_GarbageGuard.after_in_child,
)
