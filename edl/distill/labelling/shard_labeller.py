"""`ShardLabeller`: labels the ranges of rows that a source hands out, and says when their labels are on disk."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from typing_extensions import Self

from edl.background import BackgroundLoop
from edl.datasets.rows import Batch, IndexedData, SampleId
from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.labelling.bad_rows import OF_THE_ROWS, label_singly, loaded
from edl.distill.labelling.data_set import batch_cutter, check_data_set, check_sequences, lookup_of
from edl.distill.labelling.fingerprint import DataFingerprint
from edl.distill.labelling.plan import LabelPlan, LabelProgress, LabelReport
from edl.distill.labelling.shard_tracker import RowShard, ShardTracker
from edl.distill.pipeline.epoch import Epoch
from edl.distill.pipeline.label_cache import CacheConfig
from edl.distill.pipeline.request import LabelRequest
from edl.distill.pipeline.session import LabelSession
from edl.errors import ClosedError, EDLError, PermanentError, TemporaryError
from edl.protocol.tensors import Array

__all__ = ["RowShard", "ShardLabeller", "ShardSource"]

logger = logging.getLogger("edl.distill")

_SETTLE_EVERY = 32
"""Batches after which to wait until their labels are kept, as in `label`."""
_PASSES = 3
"""Tries before an error: labels that were not kept twice will not be the third time without a change."""
_LOOK_S = 0.2
"""How long to wait for a shard before looking whether to end: what a person does not notice."""
_FIRST_COMMIT_S, _LAST_COMMIT_S, _COMMIT_SHARE = 0.5, 10.0, 0.02
"""Between two commits, a file each: a fiftieth of the time so far, so that a crash costs little of it and a long run
leaves some hundred files an hour; no less than a disk takes for a file, no more than a person waits for figures."""
_LOOKED_UP_AT_ONCE = 1024
"""Rows read from disk at a time to see whether their labels are whole: memory stays bounded for wide rows."""
_SEQUENCES_AT_ONCE = 64
"""Likewise of sequences, each of which has the labels of hundreds of tokens."""
_FEW_ROWS = 8
"""Rows without label of a shard whose other rows have one that are tried singly at once: mostly they failed before."""
_LONGEST_PAUSE_S = 2.0
"""For how long a teacher that fails is left alone, at most. With more, a few bad rows, where they are all that is left,
take minutes each: a teacher that fails for them has no good answer between to show that it is sound."""
_MOST_FAILED = 3
"""Shards that may fail one after the other, with no row labelled, before this worker ends: then it is not the rows."""
_LONGEST_REASON = 1000
"""Characters of a reason: it is kept for every failure, and errors of data sets hold whole tracebacks."""


class ShardSource(abc.ABC):
    """Hands out ranges of rows, and is told what became of them. Its methods are called from several threads."""

    @abc.abstractmethod
    def take(self, timeout_s: float) -> RowShard | None:
        """Return a shard to be labelled.

        Args:
            timeout_s: how long to wait for it; 0 to return at once.

        Returns:
            The shard; None if there is none at the moment.

        Raises:
            EDLError: there will be none any more for a reason that ends the worker.
        """

    @property
    @abc.abstractmethod
    def finished(self) -> bool:
        """Whether there is no shard left, here or at other workers, nor will be."""

    @abc.abstractmethod
    def report_done(self, shard: RowShard) -> None:
        """Note that the labels of all rows of a shard are on disk."""

    @abc.abstractmethod
    def report_failed(self, shard: RowShard, reason: str) -> None:
        """Note that some rows of a shard have no label, and why."""


class ShardLabeller:
    """Connections to teachers, and a folder of labels, for the shards of a source.

    ::

        with ShardLabeller(data, plan, cache) as labeller:
            labeller.run(source)

    A shard is reported done when the labels of all its rows are on disk, under `key`; several at a time, so that files
    do not become too many. Where a row is refused, the other rows of its shard are labelled, and the shard is reported
    failed with the rows' ids and the teachers' words.

    Args:
        data: the data set.
        plan: what to ask for. The version of the model should be named in its `output_spec`, where several processes
            share a data set: labels of another version are kept apart.
        cache: where to keep the labels.

    Raises:
        SettingsError: wrong credentials or discovery.
    """

    def __init__(self, data: IndexedData, plan: LabelPlan, cache: SoftLabelCache) -> None:
        self._data = data
        self._plan = plan
        self._cache = cache
        policy = replace(plan.options.policy, open_max_s=min(plan.options.policy.open_max_s, _LONGEST_PAUSE_S))
        options = replace(plan.options, policy=policy)
        cache_config = CacheConfig(cache, plan.dataset)
        self._session = LabelSession(LabelRequest(plan.output_spec, [plan.teachers], options, cache_config))

    def key(self, fingerprint: DataFingerprint | None = None) -> CacheKey:
        """Return what the labels are kept under; waits for the first teacher.

        Args:
            fingerprint: Of the data, to check that labels which are there are of these. Default: no check.

        Raises:
            NoTeacherError: no teacher was live for `teacher_timeout_s`, or none of the version that is asked for.
            SettingsError: teachers do not say which version of the model they have, and `plan` names none.
            ConflictError: labels that are there are of other data.
        """
        check_sequences(self._data, self._session)
        view = self._session.labeller.view(self._cache, self._data.inputs)
        if fingerprint is not None:
            check_data_set(view, self._data, fingerprint)
        return view.key

    def run(self, source: ShardSource, progress: Callable[[LabelProgress], None] = lambda _: None) -> LabelReport:
        """Label what the source hands out, until it has finished.

        However this ends, shards whose labels are on disk are reported.

        Args:
            source: of the shards.
            progress: called after every batch with what this process has done, mostly in this thread.

        Returns:
            The key of the labels, and counts of this process.

        Raises:
            NoTeacherError: no teacher was live for `teacher_timeout_s`.
            TemporaryError: labels could not be written.
            PermanentError: several shards failed one after the other, and no row of them was labelled.
            EDLError: what the source raised.
        """
        return _ShardRun(self._data, self._plan, self._cache, self._session, source, progress).run()

    def close(self) -> None:
        """End connections. May be called twice."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _ShardRun:
    """A call of `ShardLabeller.run`.

    Three threads: the epoch's own loads rows (`_batches`), the caller's takes answers, and a third writes labels to
    disk and reports (`_commit`). The first waits for shards that other workers may give back, and the caller's for the
    first; what they have answered until then is written all the same.
    """

    def __init__(
        self,
        data: IndexedData,
        plan: LabelPlan,
        cache: SoftLabelCache,
        session: LabelSession,
        source: ShardSource,
        tell: Callable[[LabelProgress], None],
    ) -> None:
        self._data = data
        self._plan = plan
        self._cache = cache
        self._session = session
        self._source = source
        self._tell = tell
        self._view = session.labeller.view(cache, data.inputs)
        self._tracker = ShardTracker()
        self._commit_lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._started = self._committed_at = time.monotonic()
        self._known = self._labelled = 0
        self._passes: dict[RowShard, int] = {}  # of shards whose labels were not kept
        self._open: set[RowShard] = set()  # shards that the source is to hear of
        self._retries: deque[tuple[RowShard, str]] = deque()  # shards whose rows are to be tried singly, and why
        self._bad: dict[tuple[int, int], str] = {}  # rows of shards that have failed here, and why
        self._failed_in_a_row: set[tuple[int, int]] = set()  # rows of shards that have failed since a row was labelled
        self._looked_at: RowShard | None = None  # by the thread that loads, outside the tracker
        self._epoch: Epoch | None = None
        self._stopping = False  # whether the thread that loads is to end
        self._source_failure: Exception | None = None
        self._commit_failure: Exception | None = None

    def run(self) -> LabelReport:
        committer = BackgroundLoop("edl-label-commit", self._commit_step)
        try:
            while not self._label_until_failure(committer):
                pass
        except BaseException as exc:
            if self._commit_failure is None:
                self._commit_what_is_answered()
            if isinstance(exc, Exception) and not isinstance(exc, EDLError) and exc is not self._commit_failure:
                self._report_cause(exc)
            raise
        finally:
            committer.close()
        return LabelReport(self._view.key, self._progress())

    # The caller's thread

    def _label_until_failure(self, committer: BackgroundLoop) -> bool:
        """Label shards until the source has finished, or a shard has failed; return whether it has finished."""
        epoch = self._epoch = self._start(self._batches())
        if self._commit_failure is not None:  # which may have come when the epoch before had ended
            epoch.close()
        try:
            for number, item in enumerate(epoch, 1):
                epoch.taken(item)
                self._tracker.take()
                self._note_labelled(len(item.value[0]))
                if self._tracker.idle:
                    committer.wake()
                if number % _SETTLE_EVERY == 0:
                    self._session.labeller.prepare_epoch()
        except OF_THE_ROWS as exc:
            if exc is self._source_failure:
                raise
            failure = exc
        except ClosedError:
            if self._commit_failure is not None:  # which has closed the epoch
                raise self._commit_failure from None
            raise
        else:
            return True
        finally:
            self._end(epoch)
        self._fail(failure)
        return False

    def _start(self, batches: Iterator[Batch]) -> Epoch:
        self._stopping = False
        return self._session.start(batches, batch_cutter(self._data, self._session.labeller.services))

    def _end(self, epoch: Epoch) -> None:
        """End an epoch, and wait until its thread uses the data set and the tracker no more."""
        self._stopping = True
        epoch.close()
        timeout_s = self._plan.options.source_timeout_s
        if not epoch.join(min(timeout_s, threading.TIMEOUT_MAX)):
            raise TemporaryError(f"the data set is still loading a sample {timeout_s:g} s after it was to stop")

    def _fail(self, failure: PermanentError) -> None:
        """Have the rows of the shard that has failed labelled singly."""
        shard = self._tracker.fail()
        if shard is None:
            raise failure
        logger.warning("rows %d to %d: some cannot be labelled: %s", shard.start, shard.stop - 1, failure)
        self._retries.append((shard, str(failure)))

    def _report_cause(self, exc: Exception) -> None:
        """Report the shard in work as failed where code that is not EDL's has raised: it may be its rows."""
        shard = self._looked_at or self._tracker.fail(waiting=True)
        if shard is not None:
            self._source.report_failed(shard, _cut(f"{type(exc).__name__}: {exc}"))
            self._open.discard(shard)

    def _note_labelled(self, rows: int) -> None:
        with self._count_lock:  # rows labelled singly come from the thread that loads
            self._labelled += rows
        self._failed_in_a_row.clear()
        self._tell(self._progress())

    def _progress(self) -> LabelProgress:
        seconds = time.monotonic() - self._started
        return LabelProgress(None, self._known, self._labelled, seconds, self._session.stats().teachers_live)

    # The thread that loads

    def _batches(self) -> Iterator[Batch]:
        """Yield batches as long as the source has shards, or may get some."""
        while not self._stopping:
            if self._retries:
                self._looked_at = self._retries[0][0]
                if self._label_singly(*self._retries[0]):
                    self._retries.popleft()
                self._looked_at = None
            elif self._tracker.has_waiting or self._take_shard(_LOOK_S):
                yield from loaded(self._data, self._parts())
            elif self._source_failure is None:
                self._check_open()
            if self._source_failure is not None:
                raise self._source_failure
            if not self._tracker.has_waiting and not self._retries and self._source.finished:
                return

    def _label_singly(self, shard: RowShard, why: str) -> bool:
        """Label the other rows of a shard of which some cannot be labelled, and report it.

        Returns:
            Whether that is done; it is not where the epoch has ended meanwhile, for another shard's failure.
        """
        rows = (shard.start, shard.stop)
        self._session.labeller.prepare_epoch()
        index = self._unknown(shard)
        found = label_singly(self._data, self._plan, self._cache, self._parts_of(index), lambda: self._stopping)
        if found.labelled:
            self._note_labelled(found.labelled)
        if not found.why and not found.untried:  # it has passed
            self._tracker.begin(shard, ())
            return True
        if self._stopping:
            return False
        reason = self._bad[rows] = _cut(found.words(self._data) or why or "not all rows were tried in time")
        if len(index) == shard.stop - shard.start and not found.labelled:
            self._failed_in_a_row.add(rows)
        self._source.report_failed(shard, reason)
        self._open.discard(shard)
        if len(self._failed_in_a_row) >= _MOST_FAILED:
            raise PermanentError(
                f"{_MOST_FAILED} shards failed here one after the other, and no row of them was labelled, so that this "
                f"is no matter of single rows; the last: {reason}"
            )
        return True

    def _check_open(self) -> None:
        """Check that each open shard is still to be labelled or reported, where this thread has nothing to do.

        The last resort: the lease of a shard that was forgotten is renewed for ever, and the whole job waits for it.

        Raises:
            PermanentError: a shard was forgotten. The end of this worker gives it back.
        """
        if not self._commit_lock.acquire(blocking=False):
            return  # the shards that are being committed are not in the tracker
        try:
            forgotten = self._open - self._tracker.shards - {shard for shard, _ in self._retries}
        finally:
            self._commit_lock.release()
        if forgotten:
            rows = ", ".join(f"{shard.start} to {shard.stop - 1}" for shard in forgotten)
            raise PermanentError(
                f"rows {rows} were taken, and are neither being labelled nor reported. This is a fault of EDL: please "
                "report it. The rows are given back, and the same command goes on"
            )

    def _parts(self) -> Iterator[Array]:
        """Yield parts as long as there are some without a wait.

        Loaders take parts in ahead. One that waited here would keep what it has loaded from being labelled, and its
        shards from being done, for which other workers may wait in the same way.
        """
        while True:
            part = self._tracker.hand_out()
            if part is not None:
                yield part
            elif self._retries or not self._take_shard(0.0):
                return

    def _take_shard(self, timeout_s: float) -> bool:
        """Take in a shard; return whether there was one."""
        try:
            shard = self._source.take(timeout_s)
            if shard is not None:
                self._open.add(shard)
                self._looked_at = shard
                self._begin(shard)
                self._looked_at = None
        except Exception as exc:  # noqa: BLE001 - raised when what was loaded is handed over: here it would be a row's
            self._source_failure = exc
            return False
        return shard is not None

    def _begin(self, shard: RowShard) -> None:
        why = self._bad.get((shard.start, shard.stop))
        index = self._unknown(shard)
        self._known += shard.stop - shard.start - len(index)
        if why is not None or 0 < len(index) <= min(_FEW_ROWS, shard.stop - shard.start - 1):
            self._retries.append((shard, why or ""))
        else:
            self._tracker.begin(shard, self._parts_of(index))

    def _parts_of(self, index: Array) -> list[Array]:
        rows = self._plan.batch_rows
        return [index[start : start + rows] for start in range(0, len(index), rows)]

    def _unknown(self, shard: RowShard) -> Array:
        """Return the positions of the shard's rows that have no label, or a damaged one."""
        return self._data.unknown(self._is_whole, shard.start, shard.stop)

    def _is_whole(self, ids: Sequence[SampleId], inputs: Mapping[str, Any] | None) -> Array:
        wanted = lookup_of(self._data, ids, inputs)
        step = _SEQUENCES_AT_ONCE if self._data.sequences else _LOOKED_UP_AT_ONCE
        parts = (wanted[start : start + step] for start in range(0, len(ids), step))
        return np.concatenate([self._view.get(part).mask for part in parts])

    def _is_kept(self, ids: Sequence[SampleId], inputs: Mapping[str, Any] | None) -> Array:
        return self._view.contains(lookup_of(self._data, ids, inputs))

    # The thread that commits

    def _commit_step(self) -> float | None:
        now = time.monotonic()
        interval_s = min(max(_COMMIT_SHARE * (now - self._started), _FIRST_COMMIT_S), _LAST_COMMIT_S)
        if self._tracker.has_answered and (self._tracker.idle or now - self._committed_at >= interval_s):
            try:
                self._commit()
            except Exception as exc:  # noqa: BLE001 - raised again in the caller's thread; with no commit, no shard ends
                self._commit_failure = exc
                if self._epoch is not None:
                    self._epoch.close()
                return None
        return _LOOK_S

    def _commit_what_is_answered(self) -> None:
        """Report what is on disk before an error ends the run. What cannot be is asked for again by another worker."""
        try:
            self._commit()
        except EDLError as exc:
            logger.warning("labels of the last moments may be lost, and will be asked for again: %s", exc)

    def _commit(self) -> None:
        """Wait until the labels of answered shards are on disk, and report these shards done."""
        with self._commit_lock:
            shards = self._tracker.pop_answered()[::-1]
            if not shards:
                return
            try:
                self._report(shards)
            except BaseException:
                for shard in shards:  # popped and not reported they would be nowhere
                    self._tracker.begin(shard, ())
                raise

    def _report(self, shards: list[RowShard]) -> None:
        """Report shards as `_commit` does, and remove those from the list of which it is known what becomes of them."""
        self._session.labeller.prepare_epoch()
        self._cache.flush()
        self._committed_at = time.monotonic()
        unkept = 0
        while shards:
            shard = shards[-1]
            lost = self._data.unknown(self._is_kept, shard.start, shard.stop)
            if len(lost):
                self._passes[shard] = self._passes.get(shard, 0) + 1
                unkept += len(lost) if self._passes[shard] >= _PASSES else 0
                self._tracker.begin(shard, self._parts_of(lost))
            else:
                self._passes.pop(shard, None)
                self._source.report_done(shard)
                self._open.discard(shard)
            shards.pop()
        if unkept:  # the others are reported before
            raise TemporaryError(
                f"{unkept} rows were labelled {_PASSES} times, but their labels were not kept: either the disk cannot "
                "follow, or the teachers serve different versions of the model"
            )


def _cut(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 1]}…"
