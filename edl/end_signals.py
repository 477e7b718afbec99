"""SIGTERM and Ctrl-C, for programs that look now and then whether they are to end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collect signals that ask for an end, instead of ending by them; only in the main thread.

    A handler that does more than this, such as setting an event, may wait for a lock that the code has which it
    interrupts.

    Yields:
        Their numbers, in the order in which they came; to be looked at.
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
