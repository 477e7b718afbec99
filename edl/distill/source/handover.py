"""Hands batches from the training loop's thread to the thread that feeds the teachers."""

from __future__ import annotations

from collections import deque
from typing import Any

from edl.notifier import Notifier

__all__ = ["Handover"]


class Handover:
    """An iterator over what another thread puts in; ended by that thread, at the latest when it closes.

    It takes no lock, so a finalizer or a signal handler may close it in the middle of any function.
    """

    def __init__(self) -> None:
        self._values: deque[Any] = deque()
        self._changed = Notifier()
        self._ended = False
        self._failure: BaseException | None = None

    def put(self, value: Any) -> None:
        """Have the iterator yield a value, unless it has ended."""
        if self._ended:
            return
        self._values.append(value)
        self._changed.notify()

    def end(self, failure: BaseException | None = None) -> None:
        """End the iterator behind what was put in.

        Args:
            failure: is raised there; None for an end.
        """
        self._failure = failure
        self._ended = True
        self._changed.notify()

    def close(self) -> None:
        """End the iterator at once."""
        self._values.clear()
        self.end()

    def __iter__(self) -> Handover:
        return self

    def __next__(self) -> Any:
        self._changed.wait_for(lambda: self._values or self._ended)
        try:
            return self._values.popleft()
        except IndexError:
            failure, self._failure = self._failure, None
            raise failure or StopIteration from None
