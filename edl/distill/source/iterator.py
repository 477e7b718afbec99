"""Iterates over the user's data so that no error in the user's code is mistaken for the end of the data.

Python ends a `for` loop at any `StopIteration`, and a loop over an object that has only `__getitem__` also at any
`IndexError`. If one of these is raised by mistake in a transform or a collate function, it would silently end the
epoch.
"""

from __future__ import annotations

import functools
import gc
import itertools
import queue
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NoReturn

from edl.errors import SourceError

_FRAMEWORKS = ("torch", "paddle")
_APPLIES = ("builtins", "itertools")  # modules of iterators that may call user functions without a frame of their own
_REPLACED = (itertools.chain, type(iter(int, 1)))  # types that end at a user function's `StopIteration`


class SourceIterator(Iterator[Any]):
    """An iterator over a user's source. Tells the source's end from a `StopIteration` that its code raised by mistake.

    The first batch of a PyTorch `DataLoader` without workers is read at once, in the caller's thread. This read draws
    the order from torch's global generator, and would otherwise race with random draws in the training loop.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._expected = _batches_of(source)
        self._seen = 0
        alone = hasattr(source, "__getitem__") and not hasattr(type(source), "__iter__")
        self._iterator = _by_position(source) if alone else _guarded(iter(source))
        self._guard_torch()
        self._first: list[Callable[[], Any]] = []
        if _draws_when_read(source):
            self._first.append(_outcome(self._iterator))

    def __next__(self) -> Any:
        try:
            value = self._first.pop()() if self._first else next(self._iterator)
        except StopIteration as exc:
            self._check_end(exc)
            raise
        self._seen += 1
        return value

    def _guard_torch(self) -> None:
        fetcher = getattr(self._iterator, "_dataset_fetcher", None)
        for holder, name in ((fetcher, "dataset_iter"), (self._iterator, "_sampler_iter")):
            iterator = getattr(holder, name, None)
            if isinstance(iterator, Iterator) and _applies(iterator):
                setattr(holder, name, SourceIterator(iterator))

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _check_end(self, end: StopIteration) -> None:
        if _came_through_fetching(end.__traceback__) or "Caught StopIteration in DataLoader worker" in str(end):
            what = f"after {self._seen} batches the data set"
        elif self._expected is not None and self._seen < self._expected:
            what = f"the data loader ended after {self._seen} of its {self._expected} batches: its data set"
        elif _applies(self._iterator) and _raised_by_function(end.__traceback__):
            what = f"after {self._seen} items of the source, a function that it applies"
        else:
            return
        raise SourceError(
            f"{what}, a transform or the collate function raised StopIteration, which would end the epoch early: let "
            "it raise another error, or catch it"
        ) from end


def _draws_when_read(source: Any) -> bool:
    loader = any(kind.__name__ == "DataLoader" for kind in type(source).__mro__)
    # Loaders prepared by Accelerate are always read in the caller's thread, and count their batches.
    return loader and getattr(source, "num_workers", None) == 0 and not hasattr(source, "gradient_state")


def _outcome(iterator: Iterator[Any]) -> Callable[[], Any]:
    """Read the next value; return a function that returns the value, or raises the error from reading it."""
    try:
        value = next(iterator)
    except Exception as exc:  # noqa: BLE001 - raised by the returned function
        return functools.partial(_raise, exc)
    return lambda: value


def _raise(error: BaseException) -> NoReturn:
    raise error


def _by_position(source: Any) -> Iterator[Any]:
    """Yield the items of an object with only `__getitem__`; in a generator `StopIteration` becomes a RuntimeError."""
    for at in itertools.count():
        try:
            item = source[at]
        except IndexError as exc:
            if hasattr(source, "__len__") and at < len(source):
                raise SourceError(f"the source has {len(source)} items, but raised IndexError at {at}: {exc}") from exc
            return
        yield item


def _applies(iterator: Any) -> bool:
    """Return whether an iterator's type or a base class may call user functions without its own stack frame."""
    return any(kind.__module__ in _APPLIES for kind in type(iterator).__mro__[:-1])


def _guarded(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that reports the user's `StopIteration`: a replacement if its type is in `_REPLACED`."""
    if type(iterator) not in _REPLACED:
        return iterator
    held = [held for held in gc.get_referents(iterator) if held is not itertools.chain]
    if not held:  # the iterator has ended
        return iterator
    if isinstance(iterator, itertools.chain):
        return _parts_of((held[1:], *held[:1]))  # the iterator over its parts, and the current part, if any
    return _returned_by(*held)


def _parts_of(chain: Iterable[Any]) -> Iterator[Any]:
    for parts in chain:
        for part in SourceIterator(parts):
            yield from SourceIterator(part)


def _returned_by(function: Callable[[], Any], sentinel: object) -> Iterator[Any]:
    """Yield a function's results. In this generator, the function's `StopIteration` becomes a RuntimeError."""
    while (value := function()) != sentinel:
        yield value


def _batches_of(source: Any) -> int | None:
    """Return how many batches a `DataLoader` yields; None for user-defined samplers, whose length may be a guess."""
    if type(source).__name__ != "DataLoader" or not _is_framework(source):
        return None
    batches = getattr(source, "batch_sampler", None)
    samplers = [getattr(source if batches is None else batches, "sampler", None), batches]
    samplers = [sampler for sampler in samplers if sampler is not None]
    if not samplers or not all(map(_is_framework, samplers)):
        return None
    if any("Infinite" in type(sampler).__name__ for sampler in samplers):  # used for an iterable data set
        return None
    try:
        return len(source)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _is_framework(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _FRAMEWORKS


def _raised_by_function(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised in a function that an iterator applies, not in a nested `__next__`."""
    below = traceback.tb_next if traceback is not None else None
    return below is not None and below.tb_frame.f_code.co_name != "__next__"


def _came_through_fetching(traceback: TracebackType | None) -> bool:
    """Return whether an error was raised below PyTorch's `fetch`, in the data set or the collate function."""
    while traceback is not None:
        frame, below = traceback.tb_frame, traceback.tb_next
        if frame.f_code.co_name == "fetch" and frame.f_globals.get("__name__", "").startswith("torch.utils.data."):
            fetcher = frame.f_locals.get("self")
            # An iterable data set that creates its own batches raises below `fetch` at its regular end.
            own = type(fetcher).__name__ != "_MapDatasetFetcher" and not getattr(fetcher, "auto_collation", False)
            return below is not None and not own
        traceback = below
    return False


class Handover:
    """An iterator over values that another thread reads from the source `given`. Ends after `end` or `close`.

    The garbage collector may call `close` in the middle of any function; this is safe with `SimpleQueue.put`.
    """

    def __init__(self, given: object) -> None:
        self.given = given
        self._values: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._closed = False

    def put(self, value: Any) -> None:
        self._values.put(lambda: value)

    def end(self, failure: BaseException | None = None) -> None:
        self._values.put(functools.partial(_raise, StopIteration() if failure is None else failure))

    def close(self) -> None:
        self._closed = True
        self.end()

    def __iter__(self) -> Handover:
        return self

    def __next__(self) -> Any:
        take = self._values.get()
        if self._closed:
            raise StopIteration
        return take()
