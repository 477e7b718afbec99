"""Gathers rows into segments and writes them in a background thread, which starts with the first row."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.cache_before.folder import SegmentFolder
from benchmarks.cache_before.memory import ROW_OVERHEAD, SampleId
from benchmarks.cache_before.namespace import Namespace
from benchmarks.cache_before.segment import encode

__all__ = ["SegmentWriter"]

logger = logging.getLogger("edl.distill")

_MOST_WAITING = 2
"""Files' worth of rows that may wait to be written: while one is written the next is there. More is memory only."""
_STALLED_S = 60.0
"""How long a disk may stand still before rows are dropped, and `close` gives up: longer than a busy one does."""


@dataclass(eq=False)
class _Batch:
    """Rows on their way into a file. `since` is when the first came."""

    namespace: Namespace
    since: float
    ids: list[SampleId] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)
    nbytes: int = 0


class SegmentWriter:
    """Gathers rows into segments, and writes them in a background thread.

    Holds no reference to the cache, so that a cache which is no longer used can go.

    Args:
        folder: to write to.
        lock: the cache's; guards everything here and in the namespaces.
        segment_bytes: a file is written when so many bytes of rows have come,
        interval_s: or the first of them so long ago. What came since the last file is lost when the process is killed.

    Attributes:
        failures: files that could not be written.
        lost_rows: rows of them, since the last flush.
        failure: why the last write failed.
    """

    def __init__(self, folder: SegmentFolder, lock: threading.Condition, segment_bytes: int, interval_s: float) -> None:
        self._folder = folder
        self._lock = lock
        self._segment_bytes = segment_bytes
        self._interval_s = interval_s
        self._gathering: dict[tuple[int, type], _Batch] = {}
        self._waiting: deque[_Batch] = deque()
        self._writing: _Batch | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._pid = os.getpid()
        self.failures = self.lost_rows = 0
        self.failure = ""  # why the last one failed
        self._failing = False
        self._dead = ""  # why the thread has ended; then nothing is written any more

    def put(self, namespace: Namespace, ids: Sequence[SampleId], records: Sequence[bytes]) -> None:
        """Take in rows. Waits while two files' worth of rows wait to be written, so that memory stays bounded."""
        with self._lock:
            if self._dead:
                self._count_lost(len(ids), self._dead)
                return
            for sample, record in zip(ids, records, strict=True):
                namespace.pending[sample] = record
                kind = (id(namespace), type(sample))  # a file has ids of one type
                batch = self._gathering.get(kind)
                if batch is None:
                    batch = self._gathering[kind] = _Batch(namespace, time.monotonic())
                    self._lock.notify_all()  # the thread has a new due time
                batch.ids.append(sample)
                batch.records.append(record)
                batch.nbytes += len(record) + 8
                if batch.nbytes + ROW_OVERHEAD >= self._segment_bytes:
                    self._waiting.append(self._gathering.pop(kind))
            if self._thread is None:
                _RUNNING.add(self)
                # Not a `BackgroundLoop`, which ends without a last step: this thread writes all that waits as it ends.
                self._thread = threading.Thread(target=self._run, name="edl-cache", daemon=True)
                self._thread.start()
            if self._waiting:
                self._lock.notify_all()
            if not self._lock.wait_for(lambda: self._dead or len(self._waiting) <= _MOST_WAITING, _STALLED_S):
                while len(self._waiting) > _MOST_WAITING:
                    self._failed(self._waiting.popleft(), f"nothing has been written for {_STALLED_S:g} s")

    def flush(self, timeout_s: float) -> bool:
        """Write all rows that came until now; return False if `timeout_s` passed first."""
        with self._lock:
            self._waiting.extend(self._gathering.values())
            self._gathering.clear()
            mine = [*self._waiting, self._writing]
            self._lock.notify_all()
            return self._lock.wait_for(
                lambda: not any(batch is self._writing or batch in self._waiting for batch in mine if batch), timeout_s
            )

    def let_go(self) -> None:
        """Close from a finalizer, which may run in any thread and in the middle of any function. Waits for no disk."""
        if self._thread is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._closing = True
            self._lock.notify_all()

    def close(self, timeout_s: float = _STALLED_S) -> None:
        """Write what there is, and end the thread. May be called twice. Does nothing in a forked child.

        Called by a signal handler in the middle of a function of this cache it does not wait: the thread writes when
        that function has ended.
        """
        if self._thread is None or os.getpid() != self._pid:
            return
        interrupts = self._lock._is_owned()  # type: ignore[attr-defined]
        self.let_go()
        if interrupts or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("soft-label cache %s: still writing %g s after it was closed", self._folder.path, timeout_s)

    # The thread

    def _run(self) -> None:
        why = "the thread that writes has ended"
        try:
            self._write_all()
            why = ""
        except BaseException as exc:
            why = f"{type(exc).__name__}: {exc}, which was not foreseen"
            if not isinstance(exc, Exception):
                raise
        finally:
            if why:
                self._end(why)
            _RUNNING.discard(self)

    def _end(self, why: str) -> None:
        """Let go of all that wait: there is no thread any more to write."""
        with self._lock:
            self._dead = why
            lost = [batch for batch in (self._writing, *self._waiting, *self._gathering.values()) if batch is not None]
            self._writing = None
            self._waiting.clear()
            self._gathering.clear()
            for batch in lost:
                batch.namespace.written(batch.ids, batch.records)
            rows = sum(len(batch.ids) for batch in lost)
            self._count_lost(rows, why)
            self._lock.notify_all()
        logger.error(
            "soft-label cache %s: nothing more is written until it is opened anew, and %d rows were not: %s",
            self._folder.path,
            rows,
            why,
        )

    def _count_lost(self, rows: int, why: str) -> None:
        self.failures += 1
        self.lost_rows += rows
        self.failure = why

    def _write_all(self) -> None:
        while True:
            with self._lock:
                self._collect_due()
                while not self._waiting:
                    if self._closing:
                        return
                    self._lock.wait(self._until_due())
                    self._collect_due()
                batch = self._writing = self._waiting.popleft()
            self._write(batch)
            with self._lock:
                self._writing = None
                self._lock.notify_all()

    def _until_due(self) -> float | None:
        if not self._gathering:
            return None
        oldest = min(batch.since for batch in self._gathering.values())
        return max(0.0, oldest + self._interval_s - time.monotonic())

    def _collect_due(self) -> None:
        now = time.monotonic()
        for kind, batch in list(self._gathering.items()):
            if self._closing or now - batch.since >= self._interval_s:
                self._waiting.append(self._gathering.pop(kind))

    def _write(self, batch: _Batch) -> None:
        try:
            self._write_whole(batch)
        except OSError as exc:
            why = exc.strerror or str(exc)
        except Exception as exc:
            # Whatever it was, those who wait for this thread must not wait for ever, and the next file may be fine.
            logger.exception("soft-label cache %s: a file was not written in a way not foreseen", self._folder.path)
            why = f"{type(exc).__name__}: {exc}"
        else:
            return
        with self._lock:
            self._failed(batch, why)

    def _write_whole(self, batch: _Batch) -> None:
        namespace = batch.namespace
        assert namespace.layout is not None
        data = encode(namespace.path.name, namespace.layout, batch.ids, batch.records)
        self._folder.write(namespace.key, data)
        with self._lock:
            self._failing = False
            namespace.scan(force=True)
            namespace.written(batch.ids, batch.records)

    def _failed(self, batch: _Batch, why: str) -> None:
        if not self._failing or why != self.failure:
            logger.warning(
                "soft-label cache %s: %d rows were not written, and will be asked for again: %s",
                self._folder.path,
                len(batch.ids),
                why,
            )
        self._count_lost(len(batch.ids), why)
        self._failing = True
        batch.namespace.written(batch.ids, batch.records)


_RUNNING: set[SegmentWriter] = set()
"""Those whose threads are to write what they have when the program ends."""


@atexit.register
def _close_running() -> None:
    for writer in _RUNNING.copy():
        writer.close()
