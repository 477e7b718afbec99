"""Tells whether a source refills the memory of an item that the training loop works with."""

from __future__ import annotations

import collections

from edl.distill.source.chunk import Item
from edl.distill.source.fingerprint import MemoryLocation
from edl.errors import SourceError

__all__ = ["ReuseDetector"]


class ReuseDetector:
    """Tells whether a source refills the memory of an item that the training loop works with.

    A source that fills a single buffer again and again does so while the training loop works with the item before, if
    the loop is the quicker of the two. An item that has changed then is not accused for that alone, since the training
    loop may work in place; but it is if the source yields the same memory, list or dictionary again.

    No lock: `begin_draw` and `check_drawn` are for the feeding thread, `release` and `check_delivered` for the training
    loop's, `clear` for any.
    """

    def __init__(self) -> None:
        self._current: Item | None = None
        self._released: collections.deque[Item] = collections.deque()  # while the source was at work
        self._at_work = False
        self._error: SourceError | None = None

    def begin_draw(self) -> None:
        """Note that the source is asked for another item."""
        self._released.clear()
        self._at_work = True

    def check_drawn(self, item: Item) -> None:
        """Check that a new item does not share changed memory with items in use.

        Raises:
            SourceError: it does.
        """
        current = self._current  # before those released: `release` puts it there before it lets go of it
        earlier = [*self._released, *([current] if current is not None else [])]
        self._at_work = False
        if not earlier:
            return
        found: list[set[MemoryLocation]] = []

        def locations() -> set[MemoryLocation]:
            if not found:  # most of the time nobody asks
                found.append({location for fingerprint in item.fingerprints for location in fingerprint.locations})
            return found[0]

        try:
            for used in earlier:
                for fingerprint in used.fingerprints:
                    fingerprint.check_locations(locations)
        except SourceError as exc:
            self._error = exc
            raise

    def release(self) -> None:
        """Note that the training loop is done with its item.

        Raises:
            SourceError: the source has changed it meanwhile.
        """
        current = self._current
        if current is not None and self._at_work:
            self._released.append(current)
        self._current = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def check_delivered(self, item: Item) -> None:
        """Note that the training loop gets this item next.

        Raises:
            SourceError: it has changed since it was sent.
        """
        self._current = item
        for fingerprint in item.fingerprints:
            fingerprint.check()

    def clear(self) -> None:
        """Let go of all items."""
        self._current = self._error = None
        self._released.clear()
