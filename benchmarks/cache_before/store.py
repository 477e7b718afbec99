"""`SoftLabelCache`: rows of soft labels by key and sample id, in memory and on disk."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.cache_before.folder import SegmentFolder
from benchmarks.cache_before.memory import MemoryTier
from benchmarks.cache_before.segment import FileHandles
from benchmarks.cache_before.view import CacheParts, CacheView
from benchmarks.cache_before.writer import SegmentWriter
from edl.distill.cache import CacheKey
from edl.errors import ClosedError, SettingsError, TemporaryError

__all__ = ["CacheStats", "SoftLabelCache"]

_SEGMENT_BYTES = 16 << 20
"""Bytes of a file: large enough that millions of rows are few files, small enough to evict singly."""
_LEAST_DISK_BYTES = 64 << 10
"""The smallest bound on disk: below it, an eighth, which a file may have, would hold no row of many classes."""


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was made, and gauges of this moment.

    Attributes:
        hits: rows looked up that were there.
        misses: rows looked up that were not there.
        memory_rows: rows in memory.
        memory_bytes: in memory, bookkeeping included.
        disk_rows: known to the views of this cache, rows not written yet included.
        disk_bytes: of all files in the folder.
        evicted_rows: from memory.
        evicted_segments: files deleted by this cache.
        failed_writes: files that could not be written; their rows will be asked for again.
        skipped_files: torn, damaged or foreign files found.
        damaged_rows: rows found on disk whose checksum is wrong; they count as misses.
    """

    hits: int = 0
    misses: int = 0
    memory_rows: int = 0
    memory_bytes: int = 0
    disk_rows: int = 0
    disk_bytes: int = 0
    evicted_rows: int = 0
    evicted_segments: int = 0
    failed_writes: int = 0
    skipped_files: int = 0
    damaged_rows: int = 0


class SoftLabelCache:
    """Soft labels by sample id, so that an epoch over the same inputs asks teachers nothing.

    ::

        cache = SoftLabelCache(memory_bytes=4 << 30, path="labels", disk_bytes=100 << 30)
        view = cache.view(CacheKey("resnet", "3", ("logits",), dataset="imagenet-train, no augmentation"))
        found = view.get(ids)
        if not found.complete:
            ...

    Thread-safe. Several processes may use one folder at a time; each sees what the others have written. In a forked
    child it cannot be used: open another one there.

    Args:
        memory_bytes: of the rows in memory, bookkeeping included; 0 for none. On top come about 150 bytes for each row
            on disk that a view knows, and rows on their way to disk, of a few files at most.
        path: the folder, made if it is missing; None to keep rows in memory only.
        disk_bytes: of all files in the folder, at least 64 KiB; the oldest files make room. None for no bound.
        store_dtype: "float16" keeps floating-point outputs so, whatever teachers give; finite values stay finite.
        flush_interval_s: a row is on disk at most so long after it came (and on `flush` and `close`).

    Raises:
        SettingsError: a value that cannot be, or a folder that cannot be used.
    """

    def __init__(
        self,
        memory_bytes: int = 1 << 30,
        path: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        *,
        store_dtype: Literal["float16"] | None = None,
        flush_interval_s: float = 10.0,
    ) -> None:
        if memory_bytes < 0:
            raise SettingsError(f"memory_bytes={memory_bytes}: must be 0 or more")
        if disk_bytes is not None and (path is None or disk_bytes < _LEAST_DISK_BYTES):
            raise SettingsError(f"disk_bytes={disk_bytes}: must be at least {_LEAST_DISK_BYTES}, together with a path")
        if store_dtype not in (None, "float16"):
            raise SettingsError(f"store_dtype={store_dtype!r}: must be 'float16', or None to keep what teachers give")
        if not 0 < flush_interval_s < float("inf"):
            raise SettingsError(f"flush_interval_s={flush_interval_s}: must be a finite number above 0")
        self.store_dtype = store_dtype
        self._pid = os.getpid()
        self._closed = False
        self.lock = threading.Condition()
        self._memory = MemoryTier(memory_bytes)
        self._views: dict[CacheKey, CacheView] = {}
        self._folder = SegmentFolder(Path(path), disk_bytes) if path is not None else None
        self._handles = FileHandles()
        self._writer: SegmentWriter | None = None
        if self._folder is not None:
            segment_bytes = min(_SEGMENT_BYTES, disk_bytes // 8) if disk_bytes is not None else _SEGMENT_BYTES
            self._writer = SegmentWriter(self._folder, self.lock, segment_bytes, flush_interval_s)
            weakref.finalize(self, self._writer.let_go).atexit = False  # the writer sees to that

    @property
    def path(self) -> Path | None:
        """Folder on disk, None without."""
        return self._folder.path if self._folder is not None else None

    def view(self, key: CacheKey) -> CacheView:
        """Return the rows of a key; the same object for equal keys.

        Args:
            key: of the rows. With `store_dtype`, that is part of it.
        """
        self.check()
        if self.store_dtype is not None:
            key = replace(key, dtype=self.store_dtype)
        with self.lock:
            view = self._views.get(key)
            if view is None:
                parts = CacheParts(
                    self.check, self.lock, self._memory, self._folder, self._handles, self._writer, self.store_dtype
                )
                view = self._views[key] = CacheView(key, parts)
        return view

    def keys(self) -> list[CacheKey]:
        """Return the keys that there are rows for: in the folder, and in memory."""
        self.check()
        found = dict.fromkeys(self._folder.keys() if self._folder is not None else ())
        with self.lock:
            found.update(dict.fromkeys(key for key, view in self._views.items() if view.ids()))
        return list(found)

    def stats(self) -> CacheStats:
        """Return what has been done so far; may be called from any thread."""
        disk_bytes = self._folder.nbytes() if self._folder is not None else 0
        with self.lock:
            disk = [view.disk for view in self._views.values() if view.disk is not None]
            return CacheStats(
                hits=sum(view.hits for view in self._views.values()),
                misses=sum(view.misses for view in self._views.values()),
                memory_rows=len(self._memory),
                memory_bytes=self._memory.nbytes,
                disk_rows=sum(map(len, disk)),
                disk_bytes=disk_bytes,
                evicted_rows=self._memory.evicted,
                evicted_segments=self._folder.evicted if self._folder is not None else 0,
                failed_writes=self._writer.failures if self._writer is not None else 0,
                skipped_files=sum(namespace.skipped for namespace in disk),
                damaged_rows=sum(namespace.damaged_rows for namespace in disk),
            )

    def flush(self, timeout_s: float = 60.0) -> None:
        """Write every row that was put so far.

        Args:
            timeout_s: seconds to wait for it.

        Raises:
            TemporaryError: rows could not be written now or since the last flush, or not within `timeout_s`.
        """
        self.check()
        if self._writer is None or self._folder is None:
            return
        if not self._writer.flush(timeout_s):
            raise TemporaryError(f"soft-label cache {self._folder.path}: not written within {timeout_s:g} s")
        with self.lock:
            lost = self._writer.lost_rows
            self._writer.lost_rows = 0
            if lost:
                raise TemporaryError(
                    f"soft-label cache {self._folder.path}: {lost} rows could not be written: {self._writer.failure}"
                )

    def close(self) -> None:
        """Write what is left, and release everything. A row that cannot be written is logged. May be called twice."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._writer is not None:
            self._writer.close()
        self._handles.clear()
        with self.lock:
            self._memory.clear()

    def __enter__(self) -> SoftLabelCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Check that the cache can be used.

        Raises:
            ClosedError: it is closed, or belongs to the process that forked this.
        """
        if os.getpid() != self._pid:
            raise ClosedError("this soft-label cache belongs to the process that forked this one: open another")
        if self._closed:
            raise ClosedError("the soft-label cache is closed")
