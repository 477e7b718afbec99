"""Code that is interrupted where garbage collection or a signal could do so: before any line of some files, in turn."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class InterruptAt:
    """Calls `action` before the `number`-th line that a thread executes in one of `files`, in that thread.

    That is where Python runs the handlers of signals, and finalizers: in the thread that is there, with the locks that
    it holds.

    Attributes:
        lines: how many lines have been executed.
        reached: whether `action` was called.
    """

    def __init__(self, number: int, action: Callable[[], object], files: str, thread: str = "MainThread") -> None:
        self._number, self._action, self._files, self._thread = number, action, files, thread
        self.lines = 0
        self.reached = self._over = False

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace(), threading.gettrace()  # coverage's, where that is measured
        if self._thread == "MainThread":
            sys.settrace(self._calls)
        else:
            threading.settrace(self._calls)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        sys.settrace(self._before[0])
        threading.settrace(self._before[1])  # type: ignore[arg-type]

    def _calls(self, frame: FrameType, event: str, arg: object) -> Any:
        if self._over or self._files not in frame.f_code.co_filename:
            return None
        return self._lines if threading.current_thread().name.startswith(self._thread) else None

    def _lines(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not self._over:
            self.lines += 1
            if self.lines == self._number:
                self.reached = self._over = True
                self._action()
        return self._lines


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Fail in the main thread, also where it waits for a lock, if the block takes longer."""

    def fail(*_: Any) -> None:
        raise AssertionError(f"{what}: not done within {seconds:g} s")

    before = signal.signal(signal.SIGUSR2, fail)
    over = threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        if not over.wait(seconds):
            signal.pthread_kill(main, signal.SIGUSR2)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGUSR2, before)
