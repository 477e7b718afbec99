"""Handles SIGTERM and Ctrl-C, for programs that poll for a signal, and for programs that SIGTERM interrupts."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of ending the process; only in the main thread.

    A handler that does more than append to a list, such as setting an event, could deadlock on a lock held by the code
    that it interrupts. Poll the list, which contains the numbers of the signals received so far.
    """
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: caught.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the block, as Ctrl-C raises KeyboardInterrupt; a second one ends the process."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
