"""One pass over the user's data: a thread sends it to teachers ahead of the training loop, which takes items in order.

The garbage collector may close an abandoned iterator in any thread at any time, so no code in this module takes a lock.
Every piece of state has a single writer or is changed by atomic operations, and threads wait on a `Notifier`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import Any, Generic, TypeVar

from edl.distill.pipeline.chunk_labeller import ChunkLabeller
from edl.distill.source.chunk import Chunk, Item, ReuseDetector
from edl.distill.source.cutters import Cutter
from edl.errors import ClosedError, SourceError
from edl.notifier import Notifier

logger = logging.getLogger("edl.distill")

READING: dict[Epoch, object] = {}
"""For each epoch whose feeding thread is running: the loader or iterator that the thread reads and that other readers
may need. Sources that create a new iterator for each reader are not listed."""


class SourceClock:
    """Adds up the seconds that a data source takes to produce its values. Any thread may call `read`."""

    def __init__(self) -> None:
        self._drawing: tuple[float, float | None] = (0.0, None)  # seconds before this value; when it was requested

    def begin(self, now: float) -> None:
        self._drawing = (self._drawing[0], now)

    def end(self) -> None:
        before_s, began = self._drawing
        if began is not None:
            self._drawing = (before_s + time.monotonic() - began, None)

    def read(self) -> float:
        before_s, began = self._drawing
        return before_s if began is None else before_s + time.monotonic() - began


def source_wait_s(waited_s: float, source_s: float, clock: SourceClock, chunks: Collection[Chunk]) -> float:
    """Return how many seconds of a wait the source caused: the seconds until the last chunk was sent."""
    if chunks and all(chunk.sent for chunk in chunks):
        until_s = max(chunk.source_s for chunk in chunks)
    else:
        until_s = clock.read()
    return min(max(until_s - source_s, 0.0), waited_s)


T = TypeVar("T")


class EpochIterator(Iterator[T], Generic[T]):
    """The values of a generator. After an error, every further `next` raises `ClosedError`.

    A plain generator would raise `StopIteration`. A loop that catches the error and continues would then treat the
    epoch as complete.
    """

    __slots__ = ("__weakref__", "_failed", "_values")

    def __init__(self, values: Generator[T, Any, Any]) -> None:
        self._values = values
        self._failed = ""

    def __next__(self) -> T:
        try:
            if self._failed:
                raise ClosedError(f"the epoch ended early, with {self._failed}; start a new one")
            return next(self._values)
        except StopIteration:
            raise
        except BaseException as exc:
            if not self._failed:  # as text: the error's traceback would keep objects alive
                self._failed = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
                self._values.close()  # a signal handler may raise when the generator has just handed over a value
            raise

    def close(self) -> None:
        self._values.close()


_LOW = 0.6  # backlog at which the feeding thread is woken; waking it for every chunk would cost more than a chunk
_PATIENCE_S = 0.01  # how long the training loop waits before it tells the engine which chunk it needs
_SHORTEST_LOOK_S = 0.001  # pause between checks of a silent source; with 0, a `linger_s` of 0 would spin
_SHORTEST_WAIT_S = 0.0001  # shorter waits are an item's hand-over, thousands per second; their cause is not determined


class Epoch:
    """An iterator over items whose chunks are done. Closing it drops pending requests.

    The feeding thread reads `source` only while fewer chunks are open than the teachers can use, and less memory is
    held than the session allows. While the source produces a value, another thread may use the cutter. If the training
    loop waits for a partly filled request, and the source has yielded nothing for `linger_s`, the training loop's
    thread sends the request.

    The session refers to its epoch, and a reader's finalizer refers to the session. So an ended epoch must not hold
    objects that may refer to the reader: the source (only the thread has it), or an error raised in the training loop,
    whose traceback refers to the reader.

    `end_source` ends a source that waits for the training loop. `close` calls `end_source`, which must therefore
    neither wait nor take a lock.
    """

    def __init__(
        self,
        labeller: ChunkLabeller,
        source: Iterator[Any],
        cutter: Cutter,
        end_source: Callable[[], None] | None = None,
    ) -> None:
        self._labeller = labeller
        self._end_source = end_source
        self._pid = os.getpid()
        self._for_loop = Notifier()  # where the training loop waits
        self._for_feeder = Notifier()  # where the feeding thread waits
        self._awaited: Chunk | None = None
        self._unsent: Chunk | None = None
        self._needed: frozenset[Chunk] = frozenset()  # chunks of the item that the training loop waits for
        self._items: deque[Item] = deque()
        self._reuse = ReuseDetector()
        self._open: set[Chunk] = set()
        # Counts of open chunks and of the bytes of their inputs and answers, each written by a single thread.
        self._opened = self._opened_nbytes = 0  # by the thread that sends
        self._answers_nbytes = 0  # by the event loop: bytes of answers beyond the estimates
        self._taken = self._taken_nbytes = 0  # by the training loop
        self._lent: deque[Cutter] = deque()  # holds the cutter while no thread uses it
        self._asked_at = 0.0  # when the source was asked for its current value
        self._source_clock = SourceClock()
        self._waiting: tuple[float, float] | None = None  # when the training loop's wait began; the source's clock then
        self._limited = False  # whether requests wait until there is memory for their answers
        self._fed = False
        self._failure: BaseException | None = None
        self._closed = False
        # Not a `BackgroundLoop`: the source is the user's code, and its errors must be raised in the training loop.
        self._feeder = threading.Thread(target=self._feed, args=(source, cutter), name="edl-feed", daemon=True)

    def start(self, shared: object = None) -> None:
        """Start reading the source, unless the epoch is already closed. `shared`: see `READING`.

        This is not part of `__init__`, because the source may use its reader at once, and by then the reader must know
        this epoch.
        """
        if not self._closed:
            if shared is not None:
                READING[self] = shared
            self._feeder.start()

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Item:
        self._labeller.check()
        started = time.monotonic()
        self._waiting = waiting = (started, self._source_clock.read())
        try:
            found = self._next_done()
        except BaseException:
            self.close()
            raise
        finally:
            waited_s, source_s = self._split_wait(*waiting)
            self._waiting = None  # reset before recording, so that the wait is never counted twice
            self._labeller.wait_s += waited_s
            self._labeller.source_wait_s += source_s
        if isinstance(found, Item):
            return found
        self.close()
        try:
            raise found
        finally:
            del found  # otherwise this frame, held by the error's traceback, would hold the error: a cycle

    def taken(self, item: Item) -> None:
        for chunk, start, stop in item.parts:
            chunk.left -= stop - start
            if not chunk.left and chunk in self._open:
                self._open.discard(chunk)
                self._taken_nbytes += chunk.weight
                self._taken += 1
                chunk.release()
        self._wake_feeder()
        self._labeller.record_delivery(item.rows)

    @property
    def rows(self) -> int:
        return 0 if self._closed else sum(chunk.left for chunk in self._open.copy())

    @property
    def nbytes(self) -> int:
        """Size in bytes of items not yet taken, and their answers; the size of pending answers is estimated."""
        return 0 if self._closed else max(self._opened_nbytes + self._answers_nbytes - self._taken_nbytes, 0)

    @property
    def waiting_s(self) -> tuple[float, float]:
        """Seconds that the training loop has waited for the next item, and how many of them the source caused."""
        waiting = self._waiting
        return (0.0, 0.0) if waiting is None else self._split_wait(*waiting)

    def _split_wait(self, started: float, source_s: float) -> tuple[float, float]:
        waited_s = time.monotonic() - started
        if waited_s < _SHORTEST_WAIT_S:
            return waited_s, 0.0
        return waited_s, source_wait_s(waited_s, source_s, self._source_clock, self._needed)

    def close(self) -> None:
        """Drop pending requests. May be called twice; has no effect in a forked child, as the parent continues."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        if self._end_source is not None:
            self._end_source()
        self._for_loop.notify()
        self._for_feeder.notify()
        chunks = self._open.copy()
        self._open.clear()  # a chunk added between these two lines is cancelled by the thread that sent it
        self._items.clear()
        self._needed = frozenset()
        self._reuse.clear()
        self._failure = None
        for chunk in chunks:
            chunk.error = None
        if chunks:
            self._labeller.cancel(chunks)
        if self._limited:
            self._call_limit_answers()

    def is_feeding(self) -> bool:
        return threading.current_thread() is self._feeder

    def join(self, timeout_s: float) -> bool:
        """Wait, after `close`, until the feeding thread no longer uses the source; return False if it still does.

        Returns at once if called in the feeding thread, because a source may close its own reader there.
        """
        if self.is_feeding() or os.getpid() != self._pid:
            return True
        with contextlib.suppress(RuntimeError):  # closed before it was started
            self._feeder.join(timeout_s)
        return not self._feeder.is_alive()

    # The training loop's thread

    def _next_done(self) -> Item | BaseException:
        """Return the next item once all its chunks are done, or the error to raise instead."""
        self._reuse.release()
        self._needed = frozenset()
        item = self._next_item()
        if isinstance(item, BaseException):
            return item
        self._needed = frozenset(chunk for chunk, _, _ in item.parts)
        self._wake_feeder()
        for chunk, _, _ in item.parts:
            failure = self._await(chunk)
            if failure is not None:
                return failure
        self._reuse.check_delivered(item)
        return item

    def _next_item(self) -> Item | BaseException:
        while True:
            self._check_open()
            fed = self._fed  # read before the items: if it is set, all items are in the queue
            with contextlib.suppress(IndexError):
                return self._items.popleft()
            if fed:
                self._check_open()
                return StopIteration() if self._failure is None else self._failure
            self._for_loop.wait_for(lambda: self._items or self._fed or self._closed)

    def _await(self, chunk: Chunk) -> BaseException | None:
        self._awaited = chunk

        def ended() -> bool:
            return chunk.done or self._closed or (self._fed and not chunk.sent)

        if not self._for_loop.wait_for(ended, _PATIENCE_S):
            self._labeller.set_awaited(chunk)
            if not chunk.sent:
                self._for_feeder.notify()
                self._await_sent(chunk)
            # No deadline here: the source eventually ends or fails, and the engine answers every sent chunk, with an
            # error after its own deadlines.
            self._for_loop.wait_for(ended)
        self._awaited = None
        self._check_open()
        return chunk.error if chunk.done else self._failure  # else the source failed before the chunk was full

    def _await_sent(self, chunk: Chunk) -> None:
        """Wait until a partly filled request is sent; send it in this thread if the source yields nothing."""

        def over() -> bool:
            return chunk.sent or self._closed or self._fed

        while not over():
            left_s = self._asked_at + self._labeller.linger_s - time.monotonic()
            if left_s <= 0:
                self._flush(chunk)
            self._for_loop.wait_for(over, max(left_s, _SHORTEST_LOOK_S))

    def _flush(self, chunk: Chunk) -> None:
        try:
            cutter = self._lent.pop()
        except IndexError:
            return
        try:
            if not chunk.sent and not self._closed and not self._fed:
                self._submit(cutter, cutter.seal(chunk))
        except Exception as exc:  # noqa: BLE001 - raised for this chunk, like any other reason for missing labels
            chunk.error = _failure_of(exc)
        finally:
            self._lent.append(cutter)
            self._for_feeder.notify()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this epoch was closed: a new one was started, or the reader was closed")

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
            self._end(_failure_of(exc))
        else:
            self._end(None)
        finally:
            READING.pop(self, None)

    def _take_in(self, source: Iterator[Any], cutter: Cutter) -> None:
        self._labeller.prepare_epoch()
        while not self._closed:
            self._asked_at = time.monotonic()
            self._source_clock.begin(self._asked_at)
            self._reuse.begin_draw()
            self._lent.append(cutter)
            try:
                try:
                    value = next(source)
                finally:
                    self._source_clock.end()
            except StopIteration:
                if self._take_back():
                    self._submit(cutter, cutter.finish())
                return
            except BaseException:
                self._take_back()  # a chunk that the training loop is sending precedes the error
                raise
            if not self._take_back():
                return
            item, ready = cutter.put(value, functools.partial(self._set_limits, cutter))
            self._reuse.check_drawn(item)
            self._offer(item)
            if not self._submit(cutter, ready):
                return

    def _set_limits(self, cutter: Cutter, longest: Mapping[int | None, int]) -> None:
        """Set in the cutter the limits of a value's teachers; raise `ClosedError` if the epoch is closed.

        This may wait for a teacher. Before that, it sends earlier rows, because their teachers are connected.
        """
        labeller = self._labeller
        for route, rows in longest.items():
            part = cutter.routes[route]
            if not part.wants_limits:
                continue
            if route is not None and not labeller.knows_teacher(route):
                self._submit(cutter, cutter.finish())
            part.max_rows = labeller.max_rows(lambda: self._closed, route)
            part.max_sequence = labeller.max_sequence(route)
            if rows > part.max_sequence > 0:
                self._submit(cutter, cutter.finish())
                part.max_sequence = labeller.await_max_sequence(rows, lambda: self._closed, route)
                part.max_rows = labeller.max_rows(lambda: self._closed, route)  # others may have joined meanwhile
        self._check_open()

    def _take_back(self) -> bool:
        """Wait until the training loop does not use the cutter; return False if the epoch is closed."""
        while True:
            try:
                self._lent.pop()
            except IndexError:
                if self._closed:
                    return False
                self._for_feeder.wait_for(lambda: self._lent or self._closed)
            else:
                return not self._closed

    def _end(self, failure: BaseException | None) -> None:
        if failure is not None:
            self._failure = failure
            self._drop_unsent()
        if self._closed:  # the source took longer than the training loop
            self._items.clear()
            self._failure = None
        self._fed = True
        self._for_loop.notify()

    def _offer(self, item: Item) -> None:
        self._items.append(item)
        if self._awaited is None:
            self._for_loop.notify()

    def _drop_unsent(self) -> None:
        """Remove the last items, if they have unsent rows, because the failure is raised in their place."""
        with contextlib.suppress(IndexError):  # the training loop takes from the other end
            while True:
                item = self._items.pop()
                if all(chunk.sent or chunk.done for chunk, _, _ in item.parts):
                    self._items.append(item)
                    return

    def _submit(self, cutter: Cutter, chunks: list[Chunk]) -> bool:
        """Send chunks as room permits; return False if the epoch is closed. Only the holder of the cutter calls it."""
        unsent = list(chunks)
        while unsent and not self._closed:
            chunk = self._next_chunk(cutter, unsent)
            if chunk is None:
                return False
            self._open.add(chunk)
            self._opened_nbytes += chunk.weight
            self._opened += 1
            chunk.source_s = self._source_clock.read()
            chunk.sent = True
            try:
                self._opened_nbytes += self._labeller.submit(chunk, self._notify, lambda: self._closed)
            except BaseException as exc:
                chunk.error = _failure_of(exc)
                raise
            if self._closed:  # possibly before the chunk was added to the open ones
                self._labeller.cancel([chunk])
            elif self._awaited is chunk:
                self._labeller.set_awaited(chunk)
        return not self._closed

    def _next_chunk(self, cutter: Cutter, unsent: list[Chunk]) -> Chunk | None:
        """Wait for room for the first of these chunks; remove and return it, or None if the epoch is closed.

        The chunk that the training loop waits for is sent first, even if it is only partly filled: with several routes,
        a later request may be full before this chunk is.
        """
        while not self._closed:
            awaited = self._awaited
            if awaited is not None and not awaited.sent and awaited is not unsent[0]:
                if awaited in unsent:
                    unsent.remove(awaited)
                    unsent.insert(0, awaited)
                else:
                    unsent[:0] = cutter.seal(awaited)
            chunk = unsent[0]
            self._labeller.estimate_answers(chunk)
            self._unsent = chunk
            self._for_feeder.wait_for(
                lambda chunk=chunk, before=awaited: (  # type: ignore[misc]
                    self._closed or self._has_room(chunk) or self._awaits_other(chunk, before)
                )
            )
            self._unsent = None
            if not self._closed and self._has_room(chunk):
                return unsent.pop(0)
        return None

    def _awaits_other(self, chunk: Chunk, before: Chunk | None) -> bool:
        awaited = self._awaited
        return awaited is not None and awaited is not before and awaited is not chunk and not awaited.sent

    def _has_room(self, chunk: Chunk, backlog: float = 1.0) -> bool:
        count = self._opened - self._taken
        if count < 2 or chunk in self._needed:
            return True
        # While the size of answers is unknown, request only one ahead, until the first arrives.
        if not chunk.foreseen or self.nbytes + chunk.weight > self._labeller.memory_bytes:
            return False
        return self._labeller.backlog(chunk.route) < backlog and count < self._labeller.depth

    # The event loop's thread

    def _notify(self, surplus_nbytes: int = 0) -> None:
        """Wake waiting threads after a chunk was sent, or after an answer `surplus_nbytes` larger than estimated."""
        if surplus_nbytes:
            self._answers_nbytes += surplus_nbytes
            if surplus_nbytes > 0 and self.nbytes > self._labeller.memory_bytes:
                self._call_limit_answers()
        # A waiting thread sets `_awaited` before it checks the condition, so this check misses none.
        awaited = self._awaited
        if awaited is not None and awaited.done:
            self._for_loop.notify()
        self._wake_feeder()

    def _limit_answers(self) -> None:
        needed = None
        while not self._closed and needed is not self._needed:  # the training loop may have changed it meanwhile
            needed = self._needed
            self._limited = self._labeller.limit_answers(self._open.copy(), needed, limited=self._limited)
        if self._closed:
            self._labeller.limit_answers((), (), limited=True)  # so that the next epoch starts without a limit

    # Any thread

    def _call_limit_answers(self) -> None:
        with contextlib.suppress(ClosedError):  # another thread may close this meanwhile
            self._labeller.thread.call(self._limit_answers)

    def _wake_feeder(self) -> None:
        if self._limited:
            self._call_limit_answers()
        unsent = self._unsent
        if unsent is not None and self._has_room(unsent, _LOW):
            self._for_feeder.notify()


def _failure_of(error: BaseException) -> BaseException:
    """Return the error to raise in the training loop, where a `StopIteration` would look like the source's end."""
    if not isinstance(error, StopIteration):
        return error
    failure = SourceError("StopIteration was raised while reading the fields of an item of the source")
    failure.__cause__ = error
    return failure
