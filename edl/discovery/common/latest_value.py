"""A slot between a thread that knows the newest value and others that wait for it."""

from __future__ import annotations

from typing import Generic, TypeVar

from edl.notifier import Notifier

__all__ = ["LatestValue"]

T = TypeVar("T")


class LatestValue(Generic[T]):
    """Holds the newest value only: a slow taker skips values, and never holds the giver up.

    `put` and `close` may be called by a signal handler, also in the middle of `take`.
    """

    def __init__(self) -> None:
        self._changed = Notifier()
        self._value: T | None = None
        self._taken: T | None = None
        self._closed = False

    def put(self, value: T) -> None:
        """Make `value` the newest."""
        self._value = value
        self._changed.notify()

    def take(self, timeout_s: float | None = None) -> T | None:
        """Wait for a value that differs from the value taken last; None when time is up or the slot is closed."""
        self._changed.wait_for(lambda: self._closed or self._is_new(self._value), timeout_s)
        value = self._value
        if self._closed or not self._is_new(value):
            return None
        self._taken = value
        return value

    def close(self) -> None:
        """End every wait, now and later."""
        self._closed = True
        self._changed.notify()

    def _is_new(self, value: T | None) -> bool:
        return value is not None and value != self._taken
