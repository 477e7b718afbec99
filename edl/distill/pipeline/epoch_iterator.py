"""`EpochIterator`: what a reader or loader returns for an epoch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

from edl.errors import ClosedError

__all__ = ["EpochIterator"]

T = TypeVar("T")


class EpochIterator(Iterator[T], Generic[T]):
    """The values of a generator. Once it has raised an error, every further `next` is a ClosedError.

    A generator says StopIteration after an error: to a loop that catches the error and goes on, as after a signal
    handler's timeout, the epoch would seem complete.
    """

    __slots__ = ("__weakref__", "_failed", "_values")

    def __init__(self, values: Generator[T, Any, Any]) -> None:
        self._values = values
        self._failed = ""

    def __next__(self) -> T:
        try:
            if self._failed:
                raise ClosedError(f"the epoch ended before all was delivered, with {self._failed}; start another one")
            return next(self._values)
        except StopIteration:
            raise
        except BaseException as exc:
            if not self._failed:  # in words: the error itself would keep alive whatever its traceback holds
                self._failed = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
                self._values.close()  # a signal handler may raise when the generator has just handed over a value
            raise

    def close(self) -> None:
        """End the epoch, and drop what is under way."""
        self._values.close()
