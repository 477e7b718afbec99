"""`ShardLabeller`: labels ranges of rows from a `ShardSource`; reports each range once its labels are on disk.

The caller's thread takes a shard and starts a stream of batches, to which the loading thread adds further shards. From
time to time, and after each stream, the caller's thread commits: it waits until all labels are on disk, and reports the
shards in which every row has a label. A bad row (one that teachers reject, or that cannot be loaded) ends its stream.
The rows of its shard are then bisected: the good rows are labelled, and the shard is reported as failed, with the ids
of the bad rows.

The two threads share queues with atomic operations; the caller's thread changes other state only after the loading
thread has ended.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edl.datasets.rows import Batch, IndexedData, SampleId
from edl.distill.cache import SoftLabelCache
from edl.distill.labelling.fingerprint import DataGuard
from edl.distill.labelling.labeller import (
    OF_THE_ROWS,
    Labeller,
    LabelPlan,
    LabelProgress,
    label_batches,
    lookup_of,
    session_of,
)
from edl.errors import EDLError, PermanentError, SourceError
from edl.protocol.tensors import Array

logger = logging.getLogger("edl.distill")

_LOOK_S = 0.2  # wait for a shard before the worker checks whether it should end: too short for a person to notice
_FIRST_COMMIT_S, _LAST_COMMIT_S, _COMMIT_SHARE = 0.5, 10.0, 0.02
"""Time between two commits, each of which waits for the disk. It is a fiftieth of the run's time so far, so that a
crash loses little work, and at most as long as a person would wait for new figures."""
_BUSY_SHARE = 0.05  # share of the time that commits may take on a slow disk, while answers queue
_MOST_SKIPPED = 64  # labelled shards to take in a row before a report: a folder may have a whole job's labels
_FEW_ROWS = 8  # a shard with at most this many rows left, and others labelled, probably failed before: try each row
_MOST_BAD = 8  # bad rows named per shard: people read the first few, and if all are bad, trying each is a waste
_LONGEST_TRY_S = 20.0  # for a bad shard's rows: a teacher that fails slowly must not block a worker for hours
_PAUSE_S = 0.05  # of a teacher that failed while rows are tried: the row is at fault, not the teacher
_NEVER = 1 << 30  # failures in a row that set a teacher aside while rows are tried: more than there are rows
_MOST_FAILED = 3  # shards that may fail in a row without a labelled row; after that, the rows are not at fault
_LONGEST_REASON = 1000  # characters: the master keeps each reason, and data set errors contain whole tracebacks


@dataclass(frozen=True, eq=False)
class RowShard:
    """The rows to label, from `start` to `stop` - 1. Two objects are two shards, even if their rows are the same."""

    start: int
    stop: int
    lease: Any = None  # identifies the shard to the source

    def __len__(self) -> int:
        return self.stop - self.start


class ShardSource(abc.ABC):
    """Hands out ranges of rows and receives reports about them. Two threads call `take`, but never at the same time."""

    @abc.abstractmethod
    def take(self, timeout_s: float) -> RowShard | None:
        """Wait up to `timeout_s` for a shard; return None if there is none; raise `EDLError` to end the worker."""

    @property
    @abc.abstractmethod
    def finished(self) -> bool:
        """Whether all shards are done or given up, on all workers."""

    @abc.abstractmethod
    def report_done(self, shard: RowShard) -> None:
        """Record that the labels of all rows of a shard are on disk."""

    @abc.abstractmethod
    def report_failed(self, shard: RowShard, reason: str) -> None:
        """Record that some rows of a shard have no label, and why."""


class ShardLabeller(Labeller):
    """A `Labeller` for the shards of a source. Its data set must be `IndexedData`."""

    _data: IndexedData

    def __init__(self, guard: DataGuard, plan: LabelPlan, cache: SoftLabelCache) -> None:
        super().__init__(guard, plan, cache)
        self._waiting: deque[tuple[RowShard, Array]] = deque()  # rows to load, one request each
        self._asked: deque[tuple[RowShard, Array]] = deque()  # rows being loaded or labelled, in order
        self._left: dict[RowShard, int] = {}  # requests of each shard in these two queues
        self._answered: deque[RowShard] = deque()  # shards to commit
        self._suspects: deque[tuple[RowShard, str]] = deque()  # shards to try row by row, and why
        self._failed_in_a_row: set[tuple[int, int]] = set()  # rows of shards that failed since a row was labelled
        self._skipped = 0  # shards without rows to load since the last commit or the last rows
        self._in_hand: RowShard | None = None  # shard whose rows are being looked up or tried
        self._committing = False
        self._commit_at = 0.0
        self._failure: Exception | None = None  # the source's error

    def label_shards(
        self, source: ShardSource, tell: Callable[[LabelProgress], None] = lambda _: None
    ) -> LabelProgress:
        """Label shards until the source has finished. Call `key` first; `tell` is called after every batch.

        Even after an error, shards whose labels are on disk are reported. Raises `ConflictError` if the data changed,
        and `PermanentError` if several shards in a row failed without a single labelled row.
        """
        self._source = source
        self._begin(tell)
        self._schedule_commit()
        try:
            while self._waiting or not source.finished:
                if self._has_more(_LOOK_S):
                    self._label_waiting()
                self._commit()
                while self._suspects:
                    self._label_singly(*self._suspects.popleft())
                if self._failure is not None:
                    raise self._failure
            self._guard.check_unchanged(self._view, in_job=True, at_end=True)
        except BaseException as exc:
            self._end_with(exc)
            raise
        return self._progress()

    # The caller's thread

    def _label_waiting(self) -> None:
        try:
            label_batches(self._session, self._data, self._plan, self._batches(), self._note_answer)
        except OF_THE_ROWS as exc:
            if self._committing or not self._asked:
                raise
            failed = self._asked[0][0]  # answers arrive in the order of `_asked`
            logger.warning("some of the rows %d to %d cannot be labelled: %s", failed.start, failed.stop - 1, exc)
            del self._left[failed]
            again = [part for part in (*self._asked, *self._waiting) if part[0] is not failed]
            self._asked.clear()
            self._waiting = deque(again)
            self._suspects.append((failed, str(exc)))

    def _note_answer(self, batch: Batch) -> None:
        shard, _ = self._asked.popleft()
        self._left[shard] -= 1
        if not self._left[shard]:
            del self._left[shard]
            self._answered.append(shard)
        self._note_labelled(len(batch[0]))
        if time.monotonic() >= self._commit_at:
            self._commit()

    def _note_labelled(self, rows: int) -> None:
        self._labelled += rows
        self._failed_in_a_row.clear()
        self._tell(self._progress())

    def _commit(self) -> None:
        """Wait until the labels of answered shards are on disk, and report these shards as done."""
        self._committing = True
        shards = [self._answered.popleft() for _ in range(len(self._answered))]
        self._skipped = 0
        self._guard.check_unchanged(self._view, in_job=True)  # after the rows were read, before they are reported
        begun = time.monotonic()
        if shards:
            self._session.labeller.prepare_epoch()
            self._cache.flush()
        looked_up = [self._data.unknown(self._is_known, shard.start, shard.stop) for shard in shards]
        self._folder.check_data_set(self._view.space)  # fails if another run took the folder for other data
        for shard, lost in zip(shards, looked_up, strict=True):
            if not len(lost):
                self._source.report_done(shard)
        self._check_stored(sum(map(len, looked_up)))
        self._schedule_commit(time.monotonic() - begun)
        self._committing = False

    def _schedule_commit(self, took_s: float = 0.0) -> None:
        now = time.monotonic()
        interval_s = max(_COMMIT_SHARE * (now - self._started), took_s / _BUSY_SHARE, _FIRST_COMMIT_S)
        self._commit_at = now + min(interval_s, _LAST_COMMIT_S)

    def _end_with(self, exc: BaseException) -> None:
        """Report the known results before an error ends the run. The source hands out the other shards again."""
        if self._committing:
            return
        try:
            self._commit()
        except EDLError as failure:
            logger.warning("the latest labels may be lost and will be requested again: %s", failure)
        if isinstance(exc, Exception) and not isinstance(exc, EDLError):
            # User code raised it, perhaps because of these rows. Without a counted failure, every restarted worker
            # would get the same shard first.
            shard = self._in_hand or next(iter([*self._left]), None)
            if shard is not None:
                self._source.report_failed(shard, _cut(f"{type(exc).__name__}: {exc}"))

    def _label_singly(self, shard: RowShard, why: str) -> None:
        """Label the good rows of a suspect shard; report the shard as failed if it has bad rows."""
        self._in_hand = shard
        index = self._unknown(shard)
        bad, untried = self._find_bad_rows(self._parts_of(index))
        labelled = len(index) - len(bad) - untried
        if labelled:
            self._note_labelled(labelled)
        if bad or untried:
            ids = ", ".join(map(repr, self._data.ids_of(np.array(sorted(bad), np.int64))))
            more = f"; others may be among {untried} samples that were not tried" if untried else ""
            named = f"sample{'s' if len(bad) > 1 else ''} {ids}{more}: {bad[min(bad)]}" if bad else ""
            reason = _cut(named or why or "not all rows were tried in time")
            self._source.report_failed(shard, reason)
            if len(index) == len(shard) and not labelled:
                self._failed_in_a_row.add((shard.start, shard.stop))
            if len(self._failed_in_a_row) >= _MOST_FAILED:
                raise PermanentError(
                    f"{_MOST_FAILED} shards failed here in a row, and none of their rows was labelled, so the "
                    f"cause is not a single row; the last failure: {reason}"
                )
        else:
            self._add(shard, index[:0])
        self._in_hand = None

    def _find_bad_rows(self, parts: list[Array]) -> tuple[dict[int, str], int]:
        """Bisect rows that fail, over separate connections; return why they failed, and how many were not tried."""
        options = self._plan.options
        policy = replace(
            options.policy, failures_to_open=_NEVER, open_min_s=_PAUSE_S, aside_s=_PAUSE_S, task_failures=2
        )
        plan = replace(self._plan, options=replace(options, policy=policy))
        bad: dict[int, str] = {}
        waiting = parts[::-1]
        deadline = time.monotonic() + _LONGEST_TRY_S
        with contextlib.closing(session_of(plan, self._cache)) as session:
            while waiting and len(bad) < _MOST_BAD and time.monotonic() < deadline:
                part = waiting.pop()
                try:
                    label_batches(session, self._data, plan, _loaded(self._data, [part]), lambda _: None)
                except OF_THE_ROWS as exc:
                    if len(part) == 1:
                        bad[int(part[0])] = str(exc)
                    else:
                        half = len(part) // 2
                        waiting += [part[half:], part[:half]]
        return bad, sum(map(len, waiting))

    # Either thread

    def _has_more(self, timeout_s: float) -> bool:
        """Return whether there are rows to load, or a new shard that may contain rows to load."""
        if self._waiting:
            return True
        ends = self._suspects or self._failure is not None or self._skipped >= _MOST_SKIPPED
        return not ends and self._take(timeout_s)

    def _take(self, timeout_s: float) -> bool:
        """Take a shard, and queue its rows that have no label; return whether there was a shard.

        Errors are kept and raised in the caller's thread: raised within `data.load`, they would look like errors in
        loading a sample.
        """
        try:
            shard = self._source.take(timeout_s)
            if shard is None:
                return False
            self._in_hand = shard
            index = self._unknown(shard)
        except Exception as exc:  # noqa: BLE001 - raised again in the caller's thread
            self._failure = exc
            return False
        self._in_hand = None
        self._known += len(shard) - len(index)
        if 0 < len(index) <= min(_FEW_ROWS, len(shard) - 1):
            self._suspects.append((shard, ""))
        else:
            self._add(shard, index)
        return True

    def _add(self, shard: RowShard, index: Array) -> None:
        parts = self._parts_of(index)
        if parts:
            self._left[shard] = len(parts)
            self._waiting.extend((shard, part) for part in parts)
        else:
            self._skipped += 1
            self._answered.append(shard)

    def _parts_of(self, index: Array) -> list[Array]:
        rows = self._plan.batch_rows
        return [index[start : start + rows] for start in range(0, len(index), rows)]

    def _unknown(self, shard: RowShard) -> Array:
        return self._data.unknown(self._is_known, shard.start, shard.stop)

    def _is_known(self, ids: Sequence[SampleId], inputs: Mapping[str, Any] | None) -> Array:
        return self._view.contains(lookup_of(self._data, ids, inputs))

    # The loading thread

    def _batches(self) -> Iterator[Batch]:
        while self._has_more(_LOOK_S):
            yield from _loaded(self._data, self._hand_out())

    def _hand_out(self) -> Iterator[Array]:
        """Yield rows to load for as long as some are available without waiting.

        Loaders read ahead. If a loader waited here, rows already loaded would not be labelled and their shards would
        not be completed. Other workers may be waiting for these shards in the same way.
        """
        while self._has_more(0.0):
            if self._waiting:
                part = self._waiting.popleft()
                self._asked.append(part)
                self._skipped = 0
                yield part[1]


def _loaded(data: IndexedData, parts: Iterable[Array]) -> Iterator[Batch]:
    """Yield a batch for each part; raise `SourceError` for an error in the data set's code, or a missing batch."""
    taken = loaded = 0

    def counted() -> Iterator[Array]:
        nonlocal taken
        for part in parts:
            taken += 1
            yield part

    try:
        for batch in data.load(counted()):
            loaded += 1
            yield batch
        if loaded < taken:
            raise SourceError(f"{loaded} batches for {taken} parts: did the data raise StopIteration?")
    except EDLError:
        raise
    except Exception as exc:
        words = str(exc).strip().rpartition("\n")[2]  # without the traceback of a worker process
        raise SourceError(f"a sample cannot be loaded: {type(exc).__name__}: {words}") from exc


def _cut(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 1]}…"
