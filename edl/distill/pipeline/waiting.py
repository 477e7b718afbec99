"""What the training loop waits for: labels, or the data source that has not made the samples yet."""

from __future__ import annotations

import time
from collections.abc import Collection

from edl.distill.source.chunk import Chunk

__all__ = ["SourceClock", "source_wait_s"]


class SourceClock:
    """Adds up the seconds that a data source takes to make its values.

    `begin` and `end` are for the thread that draws from the source, `read` is for any: its two numbers are replaced
    together, so that no reader finds a second counted twice or not at all.
    """

    def __init__(self) -> None:
        self._drawing: tuple[float, float | None] = (0.0, None)  # seconds before this value; when it was asked for

    def begin(self, now: float) -> None:
        """Note that the source is asked for a value.

        Args:
            now: seconds of `time.monotonic()`.
        """
        self._drawing = (self._drawing[0], now)

    def end(self) -> None:
        """Note that the source has made the value, or has failed."""
        before_s, began = self._drawing
        if began is not None:
            self._drawing = (before_s + time.monotonic() - began, None)

    def read(self) -> float:
        """Return the seconds so far, with those of the value that the source makes now."""
        before_s, began = self._drawing
        return before_s if began is None else before_s + time.monotonic() - began


def source_wait_s(waited_s: float, source_s: float, clock: SourceClock, chunks: Collection[Chunk]) -> float:
    """Return how much of a wait was for the data source: until the last of the chunks was sent.

    Args:
        waited_s: how long the training loop has waited.
        source_s: what the clock showed when the wait began.
        clock: of the source.
        chunks: that the training loop waits for, or has waited for; none while the source has not made their rows.
    """
    if chunks and all(chunk.sent for chunk in chunks):
        until_s = max(chunk.source_s for chunk in chunks)
    else:
        until_s = clock.read()
    return min(max(until_s - source_s, 0.0), waited_s)
