"""A slot between one thread that knows the newest value and others that wait for it."""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

__all__ = ["Newest"]

T = TypeVar("T")


class Newest(Generic[T]):
    """Holds the newest value only: a slow taker skips values, and never holds the giver up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value: T | None = None
        self._taken: T | None = None
        self._closed = False

    def put(self, value: T) -> None:
        """Make `value` the newest."""
        with self._changed:
            self._value = value
            self._changed.notify_all()

    def take(self, timeout_s: float | None = None) -> T | None:
        """Wait for a value that differs from the one taken last; None when time is up or the slot is closed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                if self._value is not None and self._value != self._taken:
                    self._taken = self._value
                    return self._value
                # Waiting for ever is cut into pieces so that Ctrl-C is noticed by every Python.
                left_s = 3600.0 if deadline is None else deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return None

    def close(self) -> None:
        """End every wait, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
