"""Puts teachers' answers into the soft-label cache, in a thread of its own: training never waits for a disk.

What waits is bounded in bytes. What is left out is counted, and asked for again in the next epoch.

No lock is taken: a signal handler may close the reader in the middle of `drain`, in the thread that is in it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.distill.cache import CacheKey, CacheView, RowIds, SequenceIds, SoftLabelCache
from edl.distill.pipeline.answer_size import outputs_nbytes
from edl.distill.transport.schema import Outputs
from edl.errors import EDLError
from edl.notifier import Notifier
from edl.protocol.tensors import Array

__all__ = ["CacheQueue", "select_ids"]

logger = logging.getLogger("edl.distill")

_SETTLE_S = 60.0
"""The longest that an epoch's begin, or `close`, waits for a disk. With more, training stands still unseen."""

_ENTRY_NBYTES = 512
"""What an answer takes in memory besides its arrays: the objects around it. Without it, tiny answers had no bound."""


@dataclass(frozen=True, eq=False)
class _Entry:
    """Rows to put into a view.

    Attributes:
        of: cache and key of another view to put them in, as far as it does not have them.
    """

    view: CacheView
    ids: Sequence[Any] | SequenceIds
    outputs: Outputs
    nbytes: int
    of: tuple[SoftLabelCache, CacheKey] | None

    @property
    def rows(self) -> int:
        return _rows(self.ids)


class CacheQueue:
    """A thread that puts answers into the cache, and the queue before it.

    Args:
        limit_bytes: of answers that wait. A larger answer waits alone.

    Attributes:
        limit_bytes: as given.
        failed: whether the thread met an unforeseen error: no rows are put from then on.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.failed = False
        self._changed = Notifier()
        self._entries: deque[_Entry] = deque()
        # Each number has one thread that writes it, the one that gives or the one that puts: none needs a lock.
        self._given_bytes = self._put_bytes = 0
        self._not_taken_rows = self._not_put_rows = 0
        self._busy = self._closing = self._ended = self._reported_full = False
        self._reported: set[str] = set()
        # Not a `BackgroundLoop`, which goes on after errors and ends without a last step: this thread puts what waits.
        self._thread = threading.Thread(target=self._run, name="edl-cache", daemon=True)
        self._thread.start()

    def put(
        self,
        view: CacheView,
        ids: Sequence[Any] | SequenceIds,
        outputs: Outputs,
        of: tuple[SoftLabelCache, CacheKey] | None = None,
    ) -> None:
        """Put rows into the cache soon.

        Never waits: when the disk cannot follow, rows are dropped, and asked for again later.

        Args:
            view: where to put them.
            ids: [rows], or those of sequences.
            outputs: [rows, ...] by name.
            of: cache and key of the view to put them in, if it is not `view`: labels of another version of the model
                than was looked up. Rows that it has are left alone: they would be written in every epoch.
        """
        entry = _Entry(view, ids, outputs, _ENTRY_NBYTES + outputs_nbytes(outputs), of)
        if self._ended or self._closing:
            self._not_taken_rows += entry.rows
            return
        queued_bytes = self.queued_bytes
        if not queued_bytes or queued_bytes + entry.nbytes <= self.limit_bytes:
            self._given_bytes += entry.nbytes
            self._entries.append(entry)
            self._changed.notify()
            if self._ended:  # maybe before the entry was there to be left out as well
                self._not_taken_rows += self._drop_waiting()
            return
        self._not_taken_rows += entry.rows
        if self._reported_full:
            return
        self._reported_full = True
        logger.warning(
            "the soft-label cache cannot follow: some labels are not kept, and will be asked for again "
            "(stats().rows_not_cached counts them). A faster disk helps, or a larger cache_queue_bytes=%d",
            self.limit_bytes,
        )

    def count_dropped(self, rows: int) -> None:
        """Count rows that cannot be put."""
        self._not_taken_rows += rows

    def drain(self) -> bool:
        """Wait until all rows given before are in the cache, for a minute at most; return whether they are."""
        settled = self._changed.wait_for(self._is_idle, _SETTLE_S)
        if not settled:
            logger.warning(
                "%.1f MB of labels are still on their way into the soft-label cache after %g s: going on without them",
                self.queued_bytes / 1e6,
                _SETTLE_S,
            )
        return settled and not self.failed

    def close(self) -> None:
        """Put what waits, and end the thread. May be called twice."""
        self._closing = True
        self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(_SETTLE_S)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the answers that wait, including the answer that is being put."""
        return 0 if self._ended else self._given_bytes - self._put_bytes

    @property
    def dropped_rows(self) -> int:
        """Rows that were not put, for any reason."""
        return self._not_taken_rows + self._not_put_rows

    def _is_idle(self) -> bool:
        # In this order: the thread is busy before it takes an entry out.
        """Return whether no row waits or is being put."""
        return self._ended or not (self._entries or self._busy)

    def _drop_waiting(self) -> int:
        """Drop what waits; return how many rows that is."""
        rows = 0
        with contextlib.suppress(IndexError):
            while True:
                rows += self._entries.popleft().rows
        return rows

    # The thread

    def _run(self) -> None:
        why: BaseException | None = None
        entry: _Entry | None = None
        try:
            while (entry := self._next()) is not None:
                self._put(entry)
                self._put_bytes += entry.nbytes
                self._busy = False
                self._changed.notify()
        except BaseException as exc:
            why = exc
            if not isinstance(exc, Exception):
                raise
        finally:
            if why is not None:
                self._log_failure(why)
                self._not_put_rows += entry.rows if entry is not None else 0
                self.failed = True
            self._ended = True
            self._not_put_rows += self._drop_waiting()
            self._busy = False
            self._changed.notify()

    def _next(self) -> _Entry | None:
        while True:
            self._busy = True
            with contextlib.suppress(IndexError):
                return self._entries.popleft()
            self._busy = False
            self._changed.notify()
            if self._closing and not self._entries:
                return None
            self._changed.wait_for(lambda: self._entries or self._closing)

    def _put(self, entry: _Entry) -> None:
        view, ids, outputs = entry.view, entry.ids, entry.outputs
        try:
            if entry.of is not None:
                cache, key = entry.of
                view = cache.view(key)
                is_new = ~view.contains(ids)
                if not is_new.any():
                    return
                if not is_new.all():
                    rows = np.flatnonzero(ids.rows_of(is_new) if isinstance(ids, SequenceIds) else is_new)
                    ids = select_ids(ids, is_new)
                    outputs = {name: output[rows] for name, output in outputs.items()}
            view.put(ids, outputs)
        except (EDLError, OSError) as exc:
            self._not_put_rows += _rows(ids)
            words = str(exc)
            if words not in self._reported and len(self._reported) < 64:  # as many as a person reads
                self._reported.add(words)
                logger.warning("labels are not kept in the cache: %s", words)

    def _log_failure(self, why: BaseException) -> None:
        logger.error(
            "no more labels are kept in the soft-label cache until the reader is made anew, and they will be asked for "
            "again: %s: %s, which was not foreseen",
            type(why).__name__,
            why,
            exc_info=why,
        )


def select_ids(ids: Sequence[Any] | SequenceIds, mask: Array) -> Sequence[Any] | SequenceIds:
    """Return some of the ids.

    Args:
        ids: [rows], or those of sequences.
        mask: bool [ids], which of them.
    """
    if isinstance(ids, SequenceIds):
        return ids.select(mask)
    found = [sample for sample, wanted in zip(ids, mask, strict=True) if wanted]
    return RowIds(found, ids.fingerprints) if isinstance(ids, RowIds) else found


def _rows(ids: Sequence[Any] | SequenceIds) -> int:
    return ids.rows if isinstance(ids, SequenceIds) else len(ids)
