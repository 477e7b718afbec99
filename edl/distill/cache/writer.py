"""Gathers labels and writes them in a background thread, which starts with the first label."""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Mapping

from edl.background import BackgroundLoop
from edl.distill.cache.folder import LabelFolder, Namespace, why
from edl.distill.cache.ids import SampleId
from edl.errors import SettingsError

__all__ = ["LabelWriter"]

logger = logging.getLogger("edl.distill")

_MOST_WAITING = 3
"""Batches' worth of labels that may wait to be written, or be on their way: while one is written the next gathers."""
_STALLED_S = 60.0
"""How long a disk may stand still before labels are dropped, and `close` gives up: longer than a busy one does."""
_ROW_NBYTES = 64
"""Bytes that a label counts for besides its own, so that tiny labels are bounded too."""


class LabelWriter:
    """Gathers labels by key, and writes them in batches.

    Holds no reference to the cache, so that a cache which is no longer used can go.

    Args:
        folder: The folder that labels go to.
        lock: the cache's, reentrant; guards everything here, and the records of namespaces that wait.
        batch_bytes: bytes of labels that are written together as soon as they have come.
        interval_s: seconds after which fewer are written. What came since is lost when the process is killed.

    Attributes:
        failures: batches that could not be written.
        lost_rows: labels in them, since the last flush.
        failure: why the last write failed.
    """

    def __init__(self, folder: LabelFolder, lock: threading.Condition, batch_bytes: int, interval_s: float) -> None:
        self._folder = folder
        self._lock = lock
        self._batch_bytes = batch_bytes
        self._interval_s = interval_s
        self._waiting: dict[Namespace, int] = {}  # how many bytes
        self._writing: tuple[Namespace, int] | None = None
        self._loop: BackgroundLoop | None = None
        self._closing = self._failing = False
        self._pid = os.getpid()
        self.failures = self.lost_rows = 0
        self.failure = ""

    def put(self, space: Namespace, records: Mapping[SampleId, bytes]) -> None:
        """Take in labels. Waits while too many wait to be written, so that memory stays bounded."""
        with self._lock:
            before = self._waiting.get(space, 0)
            if not before:
                space.since = time.monotonic()
            space.waiting.update(records)
            self._waiting[space] = before + sum(map(len, records.values())) + _ROW_NBYTES * len(records)
            if self._loop is None:
                _RUNNING.add(self)
                self._loop = BackgroundLoop("edl-cache", self._step)
            elif not before or self._waiting[space] >= self._batch_bytes or self._closing:
                self._loop.wake()
            if not self._lock.wait_for(self._has_room, _STALLED_S):
                for stalled in list(self._waiting):
                    self._fail(len(stalled.waiting), f"nothing has been written for {_STALLED_S:g} s")
                    stalled.waiting = {}
                self._waiting.clear()

    def flush(self, timeout_s: float) -> bool:
        """Write all labels that came until now; return False if `timeout_s` passed first."""
        with self._lock:
            mine = [self._writing[0].writing] if self._writing is not None else []
            for space in self._waiting:
                space.urgent = True
                mine.append(space.waiting)
            if self._loop is not None:
                self._loop.wake()
            return self._lock.wait_for(lambda: not any(map(self._holds, mine)), timeout_s)

    def let_go(self) -> None:
        """Close from a finalizer, which may run in any thread and in the middle of any function. Waits for no disk."""
        if self._loop is not None and os.getpid() == self._pid:
            self._closing = True
            self._loop.wake()

    def close(self) -> None:
        """Write what there is, and end the thread. May be called twice. Does nothing in a forked child.

        Called by a signal handler in the middle of a function of this cache it does not wait: the thread writes when
        that function has ended.
        """
        self.let_go()
        if self._loop is None or os.getpid() != self._pid or self._lock._is_owned():  # type: ignore[attr-defined]
            return
        if not self._loop.wait_ended(_STALLED_S):
            logger.warning("soft-label cache %s: still writing %g s after it was closed", self._folder.path, _STALLED_S)

    def _has_room(self) -> bool:
        writing = self._writing[1] if self._writing is not None else 0
        return sum(self._waiting.values()) + writing <= _MOST_WAITING * self._batch_bytes

    def _holds(self, records: Mapping[SampleId, bytes]) -> bool:
        """Return whether these records are still to be written."""
        if self._writing is not None and self._writing[0].writing is records:
            return True
        return any(space.waiting is records for space in self._waiting)

    # The thread

    def _step(self) -> float | None:
        """Write a batch that is due; return the seconds until the next is, None at the end."""
        with self._lock:
            now = time.monotonic()
            ages = {space: now - space.since for space in self._waiting}
            due = [
                space
                for space, nbytes in self._waiting.items()
                if nbytes >= self._batch_bytes or ages[space] >= self._interval_s or space.urgent or self._closing
            ]
            if not due and self._closing:
                _RUNNING.discard(self)
                return None
            if not due:
                return self._interval_s - max(ages.values(), default=0.0)
            space = due[0]
            space.writing, space.waiting, space.urgent = space.waiting, {}, False
            self._writing = (space, self._waiting.pop(space))
        failure = self._write(space)
        with self._lock:
            if failure:
                self._fail(len(space.writing), failure)
            else:
                self._failing = False
            space.writing, self._writing = {}, None
            self._lock.notify_all()
        return 0.0

    def _write(self, space: Namespace) -> str:
        """Write the records of a namespace; return why that failed, empty if it did not."""
        assert space.layout is not None
        try:
            self._folder.write(space, space.layout, space.writing)
        except (OSError, sqlite3.Error, SettingsError) as exc:
            return why(exc)
        except Exception as exc:
            # Whatever it was, those who wait for this thread must not wait for ever, and the next batch may be fine.
            logger.exception("soft-label cache %s: labels were not written in a way not foreseen", self._folder.path)
            return f"{type(exc).__name__}: {exc}"
        return ""

    def _fail(self, rows: int, failure: str) -> None:
        if not self._failing or failure != self.failure:
            logger.warning(
                "soft-label cache %s: %d rows were not written, and will be asked for again: %s",
                self._folder.path,
                rows,
                failure,
            )
        self.failures += 1
        self.lost_rows += rows
        self.failure = failure
        self._failing = True


_RUNNING: set[LabelWriter] = set()
"""Those whose threads are to write what they have when the program ends."""


@atexit.register
def _close_running() -> None:
    for writer in _RUNNING.copy():
        writer.close()
