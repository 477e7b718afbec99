"""Runs the event loop that all readers of a process share, in a background thread.

It starts with the first reader and ends with the last. grpc.aio wants all its channels on a single loop, and a forked
child inherits neither thread nor loop: what belongs to the parent raises `ClosedError` there. So does the attempt to
have a loop in the child where the parent has had one, be it closed: gRPC stays initialized for the life of a process,
and waits in the child for threads that only the parent has.
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

__all__ = ["EventLoopThread"]

logger = logging.getLogger("edl.distill")

T = TypeVar("T")

_LINGER_S = 0.05
"""For callbacks that gRPC schedules as it closes, before the loop does: milliseconds on a busy machine."""
_STOP_S = 10.0
"""How long the last user waits for the loop's thread. It ends within milliseconds, unless what it logs has to wait."""
_REMEDY = (
    "gRPC does not work in a process that is forked from one that has used it. Start this process with "
    'multiprocessing.get_context("spawn") or ("forkserver") and make its reader there, or fork it before the first '
    "reader of its parent is used"
)


class EventLoopThread:
    """A counted reference to the process's event loop. `acquire` takes a reference, `release` gives it back."""

    _lock = threading.Lock()  # of what follows, and of `_users`
    _shared: EventLoopThread | None = None
    used = False  # whether a loop was ever taken for gRPC, in this process or in a process that it was forked from
    inherited = False  # whether that was before a fork

    def __init__(self) -> None:
        self._users = 0
        self._pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        # Not a `BackgroundLoop`: what it runs is asyncio's loop, which has wake-ups and an end of its own.
        self._thread = threading.Thread(target=self._run, name="edl-distill", daemon=True)

    @classmethod
    def acquire(cls, *, for_grpc: bool = True) -> EventLoopThread:
        """Return the process's loop, and start it if need be."""
        if for_grpc and cls.inherited:
            raise ClosedError(
                f"a reader cannot connect in process {os.getpid()}: a process that it was forked from has used a "
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
        """Give the reference back; the last user stops the loop and waits for its thread."""
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
                logger.warning("the event loop of the readers has not ended after %g s; left alone", _STOP_S)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run a function on the loop soon, from any thread. Takes no lock: finalizers call it as well."""
        self.check()
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            raise ClosedError("the reader is closed") from None

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            TimeoutError: it took longer than `timeout_s`; it is cancelled then.
        """
        self.check()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"no result within {timeout_s:g} s") from None

    def check(self) -> None:
        """Raise `ClosedError` if the loop has ended, or belongs to a parent process."""
        if self._pid != os.getpid():
            raise ClosedError(
                f"this reader belongs to process {self._pid} and cannot be used in process {os.getpid()}, forked "
                f"from it: {_REMEDY}"
            )

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            # gRPC still has events of closed channels on their way to this loop; behind a closed one they would be
            # tracebacks in the log of the next reader.
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

    A gRPC channel that waits for the parent's collector would be taken apart by the child's, which then waits for ever
    for a thread that only the parent has. Frozen, what is inherited is left alone; the child's own garbage is not.

    Several threads may fork at once: the first turns the parent's collector off, the last turns it on again.
    """

    lock = threading.Lock()
    forks = 0  # under way
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
        cls.lock = threading.Lock()  # another thread of the parent may hold those inherited
        EventLoopThread._lock = threading.Lock()
        EventLoopThread._shared = None  # its thread is not here
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
