"""One pass over the user's data: a thread feeds the teachers ahead of the training loop, which takes items in order."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from edl.distill.source import Chunk, Cutter, Item, Trace
from edl.errors import ClosedError, SourceError

__all__ = ["Epoch"]

logger = logging.getLogger("edl.distill")

_SOURCE_STOP_S = 5.0
_LOW = 0.6
"""Backlog at which the feeding thread is woken. It fills it up then: to be woken for each chunk costs more than one."""
_PATIENCE_S = 0.01
"""How long the training loop waits before it tells the engine which chunk it is waiting for."""


class Labels(Protocol):
    """What an epoch needs of the labeller; see `Labeller`."""

    memory_bytes: int

    @property
    def depth(self) -> int: ...
    @property
    def backlog(self) -> float: ...
    def check(self) -> None: ...
    def settle(self) -> None: ...
    def max_rows(self, stopped: Callable[[], bool]) -> int: ...
    def submit(self, chunk: Chunk, changed: Callable[[], None], stopped: Callable[[], bool]) -> None: ...
    def wanted(self, chunk: Chunk) -> None: ...
    def cancel(self, chunks: Iterable[Chunk]) -> None: ...
    def delivered(self, rows: int) -> None: ...
    def waited(self, seconds: float) -> None: ...


class Epoch:
    """An iterator over items whose chunks are done. Closing it drops what is under way.

    The feeding thread takes from `source` only while fewer chunks are open than the teachers can use, and less memory
    is held than the labeller allows.

    The labeller keeps its epoch, and the finalizer of a reader keeps the labeller. So an epoch that has ended may hold
    nothing of the user's, whose objects may hold the reader: neither the source, which only the thread has, nor an
    error that was raised in the training loop, whose traceback leads to the reader.
    """

    def __init__(self, labeller: Labels, source: Iterator[Any], cutter: Cutter) -> None:
        self._labeller = labeller
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._for_loop = threading.Condition(self._lock)  # where the training loop waits
        self._for_feeder = threading.Condition(self._lock)  # where the feeding thread waits
        self._awaited: Chunk | None = None
        self._unsent: Chunk | None = None
        self._needed: set[Chunk] = set()  # of the item that the training loop waits for
        self._items: deque[Item] = deque()
        self._traces: dict[Trace, int] = {}  # arrays that the training loop has not taken yet, and how often each
        self._marks: dict[tuple[int, str], bytes] = {}  # where they lie
        self._open: set[Chunk] = set()
        self._open_nbytes = 0
        self._fed = False
        self._failure: BaseException | None = None
        self._closed = False
        self._feeder = threading.Thread(target=self._feed, args=(source, cutter), name="edl-feed", daemon=True)
        self._feeder.start()

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Item:
        self._labeller.check()
        started = time.monotonic()
        try:
            found = self._next_done()
        except BaseException:
            self.close()
            raise
        finally:
            self._labeller.waited(time.monotonic() - started)
        if isinstance(found, Item):
            return found
        self.close()
        try:
            raise found
        finally:
            del found  # this frame, which the error's traceback holds, would hold the error

    def taken(self, item: Item) -> None:
        """The item's outputs have been read; its memory may go."""
        with self._lock:
            for chunk, start, stop in item.parts:
                chunk.left -= stop - start
                if not chunk.left and chunk in self._open:
                    self._open.remove(chunk)
                    self._open_nbytes -= chunk.nbytes
            for trace in item.traces:
                self._traces[trace] -= 1
                if not self._traces[trace]:
                    del self._traces[trace]
                    self._marks.pop(trace.place, None)
            self._wake_feeder()
        self._labeller.delivered(item.rows)

    def close(self) -> None:
        """Drop what is under way. May be called twice; does nothing in a forked child, whose parent goes on."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._for_loop.notify_all()
            self._for_feeder.notify_all()
        if threading.current_thread() is not self._feeder:  # else the source itself closes the reader
            self._feeder.join(_SOURCE_STOP_S)
            if self._feeder.is_alive():
                logger.warning(
                    "the data source is still busy %g s after the epoch was closed; left alone", _SOURCE_STOP_S
                )
        with self._lock:
            chunks, self._open = self._open, set()
            self._items.clear()
            self._needed.clear()
            self._failure = None
            for chunk in chunks:
                chunk.error = None
        self._labeller.cancel(chunks)

    # The training loop's thread

    def _next_done(self) -> Item | BaseException:
        """The next item once all of its chunks are done, or the error that comes in its place."""
        item = self._next_item()
        if isinstance(item, BaseException):
            return item
        with self._lock:
            self._needed = {chunk for chunk, _, _ in item.parts}
            self._wake_feeder()
        for chunk, _, _ in item.parts:
            failure = self._await(chunk)
            if failure is not None:
                return failure
        return item

    def _next_item(self) -> Item | BaseException:
        with self._lock:
            while True:
                if self._closed:
                    raise ClosedError("this epoch was closed: another one was started, or the reader was closed")
                if self._items:
                    return self._items.popleft()
                if self._fed:
                    return StopIteration() if self._failure is None else self._failure
                self._for_loop.wait()

    def _await(self, chunk: Chunk) -> BaseException | None:
        """Wait until a chunk is done; why it never will be."""
        with self._lock:
            self._awaited = chunk

            def ended() -> bool:
                return chunk.done or self._closed or (self._fed and chunk not in self._open)

            if not self._for_loop.wait_for(ended, _PATIENCE_S):
                self._labeller.wanted(chunk)
                # The source ends or fails in its own time. The engine answers every chunk that was sent, with an error
                # at the latest when its own deadlines have passed.
                self._for_loop.wait_for(ended)
            self._awaited = None
            if self._closed:
                raise ClosedError("this epoch was closed: another one was started, or the reader was closed")
            # Where there is no answer, and no error in its place, the source failed before the chunk was full.
            return chunk.error if chunk.done else self._failure

    # The feeding thread

    def _feed(self, source: Iterator[Any], cutter: Cutter) -> None:
        try:
            try:
                self._take_in(source, cutter)
            finally:
                close = getattr(source, "close", None)
                if close is not None:
                    with contextlib.suppress(RuntimeError):
                        close()
        except BaseException as exc:  # noqa: BLE001 - raised again in the training loop, in its place in the order
            self._end(exc)
        else:
            self._end(None)

    def _take_in(self, source: Iterator[Any], cutter: Cutter) -> None:
        self._labeller.settle()
        begins = True  # a new chunk, whose size may be another one; asked for each sample it takes its time
        for value in source:
            if begins:
                cutter.max_rows = self._labeller.max_rows(lambda: self._closed)
            item, ready = cutter.put(value)
            begins = bool(ready)
            self._offer(item)
            if not self._submit(ready):
                return
        self._submit(cutter.finish())

    def _end(self, failure: BaseException | None) -> None:
        """There is no more to come, be it that the source is at its end."""
        with self._lock:
            self._fed = True
            if self._closed:
                self._items.clear()  # the source took longer than `close` waits
            elif failure is not None:
                self._failure = failure
                self._drop_unsent()
            self._for_loop.notify_all()

    def _offer(self, item: Item) -> None:
        with self._lock:
            for trace in item.traces:
                if self._marks.setdefault(trace.place, trace.marks) != trace.marks:
                    raise SourceError(
                        "the source filled an array again that it had yielded before, while its soft labels were "
                        "still on their way: yield a new array each time (for example array.copy())"
                    )
                self._traces[trace] = self._traces.get(trace, 0) + 1
            self._items.append(item)
            if self._awaited is None:
                self._for_loop.notify_all()

    def _drop_unsent(self) -> None:
        """Items with rows that were never sent come behind the failure."""
        while self._items and any(chunk not in self._open and not chunk.done for chunk, _, _ in self._items[-1].parts):
            self._items.pop()

    def _submit(self, chunks: list[Chunk]) -> bool:
        for chunk in chunks:
            with self._lock:
                self._unsent = chunk
                self._for_feeder.wait_for(lambda chunk=chunk: self._closed or self._has_room(chunk))  # type: ignore[misc]
                self._unsent = None
                if self._closed:
                    return False
                self._open.add(chunk)
                self._open_nbytes += chunk.nbytes
            try:
                self._labeller.submit(chunk, self._notify, lambda: self._closed)
            except BaseException as exc:
                chunk.error = exc
                raise
            if self._awaited is chunk:
                self._labeller.wanted(chunk)
        return not self._closed

    def _has_room(self, chunk: Chunk, backlog: float = 1.0) -> bool:
        if len(self._open) < 2 or chunk in self._needed:
            return True
        if self._open_nbytes + chunk.nbytes > self._labeller.memory_bytes:
            return False
        return self._labeller.backlog < backlog and len(self._open) < self._labeller.depth

    # The event loop's thread

    def _notify(self) -> None:
        # Whoever waits has said for what before it looked whether that is so, so this look without the lock misses
        # nobody; most of the time there is nobody to wake, and the lock is somebody else's.
        awaited, unsent = self._awaited, self._unsent
        if (awaited is None or not awaited.done) and (unsent is None or not self._has_room(unsent, _LOW)):
            return
        with self._lock:
            if self._awaited is not None and self._awaited.done:
                self._for_loop.notify_all()
            self._wake_feeder()

    def _wake_feeder(self) -> None:
        if self._unsent is not None and self._has_room(self._unsent, _LOW):
            self._for_feeder.notify_all()
