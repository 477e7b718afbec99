"""Waiting in tests: for a condition, never for a time.

`wait_until` is the only way to wait for what another thread or process does. It has a deadline that only a test that
hangs reaches, so that a busy machine makes a test slow and never red.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 90.0
"""Longer than a busy machine stalls, and shorter than the timeout of a test, so that the message is read."""
PAUSE_S = 0.005
"""Short beside what is waited for, which takes a few milliseconds at least; polling costs 1% of a core."""
MOST_PAUSE_S = 0.2
"""Of a condition that takes so long itself that asking all the time would take a core from what it waits for."""


def wait_until(condition: Callable[[], T], what: str = "", deadline_s: float = DEADLINE_S) -> T:
    """Call `condition` until its result is true, and return that result.

    Args:
        condition: Called every few milliseconds, a slow one less often. An exception that it raises ends the wait.
        what: What the test waits for, for the message.
        deadline_s: Seconds until the wait fails.

    Raises:
        TimeoutError: The deadline has passed.
    """
    pause, begin = threading.Event(), time.monotonic()
    deadline = begin + deadline_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what or condition} did not come true within {deadline_s:g} s")
        pause.wait(max(PAUSE_S, min(4 * (time.monotonic() - begin), MOST_PAUSE_S)))
        begin = time.monotonic()
    return result
