"""`SoftLabelCache`: soft labels by key and sample id, in a folder or in memory. `CacheView`: the labels under one key.

Records in a folder are not also kept in memory: the operating system caches the file, and unpacking a record takes as
long as reading it.

A training loop is the worst case for LRU eviction: an epoch uses every row once, so each row would be evicted just
before it is needed again. A full `MemoryTier` therefore stores no new rows, unless it can evict rows of a key that is
no longer used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from edl.distill.cache.folder import READ_AT_ONCE, LabelFolder, Namespace
from edl.distill.cache.records import (
    UNKNOWN,
    CacheKey,
    Found,
    Head,
    Ids,
    Outputs,
    RowIds,
    RowLayout,
    SampleId,
    SequenceIds,
    as_ids,
    flatten,
)
from edl.errors import ClosedError, SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero

logger = logging.getLogger("edl.distill")

_LEAST_BYTES = 1 << 20  # the smallest bound on disk: the tables alone take tens of KB
ROW_OVERHEAD = 256  # bytes of a row in memory in addition to its record: Python objects and the dictionary entry
IDLE_AFTER_CALLS = 1024  # after which an unused key's rows are evicted: several epochs, to keep an ensemble's rows


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was created, and current values. A sequence counts as one row.

    Attributes:
        hits: Rows looked up and found.
        misses: Rows looked up and not found.
        memory_bytes: Bytes of the rows in memory, including bookkeeping.
        disk_bytes: Bytes of the database in the folder, including its journal.
        evicted_disk_rows: Rows that this cache deleted from the disk to make room.
        failed_writes: Batches that could not be written; the rows in them will be requested again.
        damaged_rows: Damaged rows found on disk; they count as misses.
    """

    hits: int = 0
    misses: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    evicted_disk_rows: int = 0
    failed_writes: int = 0
    damaged_rows: int = 0


class SoftLabelCache:
    """Stores soft labels by sample id, so that a later epoch over the same inputs sends no requests to teachers.

    ::

        cache = SoftLabelCache(path="labels", disk_bytes=100 << 30)
        view = cache.view(CacheKey("resnet", "3", ("logits",), dataset="imagenet-train, no augmentation"))
        found = view.get(ids)
        if not found.complete:
            ...

    Thread-safe. Several processes on a machine may share one folder; each process sees what the others have written. A
    cache cannot be used in a forked child: open a new cache there.

    Args:
        memory_bytes: Largest size of the rows in memory, in bytes including bookkeeping, if there is no `path`. When
            this is reached, the rows in memory are kept and no new rows are stored.
        path: The folder, created if missing; None to keep rows in memory. It must not be on a file system that several
            machines share, unless only one of these machines uses the folder and `EDL_SHARED_FILE` is set.
        disk_bytes: Largest size of the folder's database in bytes, at least 1 MiB; the oldest labels are deleted to
            make room. The database's journal needs up to 100 MiB more. A label larger than 1/32 of `disk_bytes` may not
            fit. None for no limit.
        store_dtype: "float16" stores all floating-point outputs as float16; finite values beyond float16's range become
            +-65504.

    Attributes:
        path: The folder on disk; None if rows are kept in memory.

    Raises:
        SettingsError: An argument is invalid, or the folder cannot be used.
    """

    def __init__(
        self,
        memory_bytes: int = 1 << 30,
        path: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        *,
        store_dtype: Literal["float16"] | None = None,
    ) -> None:
        if not is_above_zero(memory_bytes) and memory_bytes != 0:
            raise SettingsError(f"memory_bytes={memory_bytes!r}: must be a number of at least 0")
        is_bound = disk_bytes is not None and is_above_zero(disk_bytes) and disk_bytes >= _LEAST_BYTES
        if disk_bytes is not None and (path is None or not is_bound):
            raise SettingsError(f"disk_bytes={disk_bytes!r}: must be at least {_LEAST_BYTES}, together with a path")
        if store_dtype not in (None, "float16"):
            raise SettingsError(f"store_dtype={store_dtype!r}: must be 'float16', or None to keep what teachers give")
        self.store_dtype = store_dtype
        self._pid = os.getpid()
        self._closed = False
        self.lock = threading.RLock()
        self._views: dict[CacheKey, CacheView] = {}
        self.memory = MemoryTier(memory_bytes)
        self.folder = LabelFolder(path, disk_bytes) if path is not None else None
        self.records: LabelFolder | MemoryTier = self.memory if self.folder is None else self.folder
        self.path = self.folder.path if self.folder is not None else None

    def view(self, key: CacheKey) -> CacheView:
        """Return the view of a key's rows; the same object for equal keys.

        Args:
            key: What the rows depend on; `store_dtype` is added to the key.
        """
        self.check()
        return self._view(key if self.store_dtype is None else replace(key, dtype=self.store_dtype))

    def _view(self, key: CacheKey) -> CacheView:
        with self.lock:
            if key not in self._views:
                self._views[key] = CacheView(key, self)
            return self._views[key]

    def add_folder(self, path: str | os.PathLike[str]) -> None:
        """Copy the labels of another folder, such as another machine's, into this cache.

        Args:
            path: The other folder. It may be on any file system, provided that no process on a different machine has it
                open.

        Raises:
            SettingsError: The folder cannot be read, or its labels do not match the existing ones.
        """
        self.check()
        with contextlib.closing(LabelFolder(path, read_only=True)) as other:
            for key in other.keys():  # noqa: SIM118 - not a mapping
                space = Namespace(key)
                for records in other.read_all(space):
                    if space.layout is not None:
                        self._view(key)._keep(space.layout, records)

    def keys(self) -> list[CacheKey]:
        """Return the keys that have rows."""
        self.check()
        return self.records.keys()

    def stats(self) -> CacheStats:
        """Return the counters so far; may be called from any thread."""
        folder = self.folder
        with self.lock:
            views = list(self._views.values())
        return CacheStats(
            hits=sum(view.hits for view in views),
            misses=sum(view.misses for view in views),
            memory_bytes=self.memory.nbytes,
            disk_bytes=folder.nbytes() if folder is not None else 0,
            evicted_disk_rows=folder.evicted if folder is not None else 0,
            failed_writes=folder.failures if folder is not None else 0,
            damaged_rows=len(folder.damaged) if folder is not None else 0,
        )

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until all rows put so far are on disk. Without a flush, some rows may be lost in a power failure.

        Args:
            timeout_s: Seconds to wait.

        Raises:
            TemporaryError: Some rows could not be written since the last flush, or the disk takes longer than
                `timeout_s`.
        """
        self.check()
        if self.folder is not None:
            self.folder.flush(timeout_s)

    def close(self) -> None:
        """Flush, and release everything. May be called twice."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self.folder is not None:
            self.folder.close()
        self.records = self.memory = MemoryTier(0)

    def __enter__(self) -> SoftLabelCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Check that the cache can be used.

        Raises:
            ClosedError: The cache is closed, or was opened by the process that forked this process.
        """
        if os.getpid() != self._pid:
            raise ClosedError("this soft-label cache belongs to the process that forked this one: open a new one")
        if self._closed:
            raise ClosedError("the soft-label cache is closed")


class CacheView:
    """The rows or sequences of a key. Created by `SoftLabelCache.view`. Thread-safe.

    Ids are 64-bit integers or strings; 1 and "1" are different ids. A key has either rows, looked up by plain ids, or
    sequences with varying numbers of rows, looked up by `SequenceIds`. A sequence is found if its id, its length and
    the fingerprint of its inputs match the stored values, so no label is found for an edited text.

    Args:
        key: What the rows depend on.
        cache: The cache that stores them.

    Attributes:
        hits: Rows, or sequences, looked up and found.
        misses: Rows, or sequences, looked up and not found.
    """

    def __init__(self, key: CacheKey, cache: SoftLabelCache) -> None:
        self.key = key
        self.hits = self.misses = 0
        self.space = Namespace(key)
        self.folder = cache.folder
        self._cache = cache
        self._warned = False

    @property
    def layout(self) -> RowLayout | None:
        """Columns of the records; None while there are no records."""
        self._cache.records.refresh(self.space)
        return self.space.layout

    def get(self, ids: Ids | SequenceIds) -> Found:
        """Look up rows or sequences.

        Args:
            ids: Ids of rows, a sequence or an integer array; or `SequenceIds`.

        Returns:
            Which ids were found, with their outputs.

        Raises:
            SettingsError: Rows are looked up, but the key's labels are for sequences, or vice versa.
        """
        self._cache.check()
        sequences, samples = _split(ids)
        records = self._records(samples, sequences.heads if sequences is not None else None)
        self._check_kind(sequences)
        if isinstance(ids, RowIds):
            self._compare_inputs(ids, records)
        there = [record for record in records if record is not None]
        mask = np.array([record is not None for record in records], np.bool_)
        with self._cache.lock:
            self.hits += len(there)
            self.misses += len(records) - len(there)
        layout = self.layout
        lengths = sequences.lengths if sequences is not None else None
        if sequences is not None and lengths is None:
            rows = [0 if record is None or layout is None else layout.rows_of(record) for record in records]
            lengths = np.array(rows, np.int64)
        outputs = layout.restore(layout.unpack(there)) if there and layout is not None else {}
        return Found(mask, outputs, lengths)

    def put(self, ids: Ids | SequenceIds, outputs: Outputs) -> None:
        """Store rows or sequences. If an id is repeated, its last value is stored.

        Waits until the rows are in the folder. Rows that cannot be written are logged, and will not be found later.

        Args:
            ids: Ids of rows; or `SequenceIds` with lengths of at least 1, and fingerprints.
            outputs: Arrays [rows, ...] of numbers, or `TopK`, under the output names in the key; for sequences, the
                concatenated rows of all sequences.

        Raises:
            SettingsError: Outputs cannot be stored, or differ in dtype or shape from the outputs stored earlier.
        """
        self._cache.check()
        sequences, samples = _split(ids)
        if sequences is None:
            prints = ids.fingerprints if isinstance(ids, RowIds) else {}
            heads = [(1, prints.get(sample, UNKNOWN)) for sample in samples]
        elif sequences.heads is not None and all(rows for rows, _ in sequences.heads):
            heads = sequences.heads
        else:
            raise SettingsError("to store sequences, pass their lengths (at least one token each) and fingerprints")
        if sorted(outputs) != sorted(self.key.outputs):
            raise SettingsError(
                f"outputs {sorted(outputs)}: expected those in the cache's key, {sorted(self.key.outputs)}"
            )
        rows = sum(rows for rows, _ in heads)
        arrays, layout = flatten(outputs, rows, half=self._cache.store_dtype == "float16")
        if sequences is not None:
            layout = replace(layout, sequence_inputs=sequences.inputs)
        self._keep(layout, dict(zip(samples, layout.pack(arrays, heads), strict=True)))

    def _keep(self, layout: RowLayout, records: Mapping[SampleId, bytes]) -> None:
        cache, space = self._cache, self.space
        cache.records.refresh(space)
        with cache.lock:
            merged = layout if space.layout is None else space.layout.merged(layout)
            if merged is None:
                remedy = "use a new `dataset` tag" + (f", or delete {cache.path}" if cache.path is not None else "")
                raise SettingsError(
                    f"soft labels do not match the cache: rows are {layout}, but earlier rows were {space.layout}: "
                    f"{remedy}"
                )
            space.layout = merged
        if records:
            cache.records.put(space, records)

    def contains(self, ids: Ids | SequenceIds) -> Array:
        """Return which ids have rows, bool [ids].

        Args:
            ids: Ids of rows, a sequence or an integer array; or `SequenceIds`, where a sequence counts only if its text
                matches the labelled text.
        """
        self._cache.check()
        sequences, samples = _split(ids)
        heads = sequences.heads if sequences is not None else None
        found: list[bool] = []
        for start in range(0, len(samples), READ_AT_ONCE):
            part = slice(start, start + READ_AT_ONCE)
            records = self._records(samples[part], heads[part] if heads is not None else None)
            found += [record is not None for record in records]
        return np.array(found, np.bool_)

    def ids(self) -> list[SampleId]:
        """Return all ids that have rows."""
        self._cache.check()
        return self._cache.records.ids(self.space)

    def _check_kind(self, sequences: SequenceIds | None) -> None:
        """Check that labels and look-up are both for rows, or both for sequences with the same inputs."""
        if self.layout is None:
            return
        kept, wanted = self.layout.sequence_inputs, None if sequences is None else sequences.inputs
        if kept == wanted or (kept is not None and sequences is not None and sequences.heads is None):
            return
        raise SettingsError(
            f"the cache's labels of model {self.key.model!r} are for {_kind(kept)}, but {_kind(wanted)} are looked up: "
            "read the data as for labelling (with the same inputs; for sequences, use set_sequence_generator, or pass "
            "tokens= to distill), or use a different `dataset` tag"
        )

    def _records(self, samples: list[SampleId], heads: list[Head] | None) -> list[bytes | None]:
        found = self._cache.records.read(self.space, samples)
        records = [found.get(sample) for sample in samples]
        layout = self.layout
        if heads is None or layout is None or layout.sequence_inputs is None:
            return records
        for at, (record, head) in enumerate(zip(records, heads, strict=True)):
            if record is not None and layout.head_of(record) != head:
                self._warn(
                    f"sample {samples[at]!r} differs from the text whose label is stored under this id: stored "
                    "labels of changed texts are not used"
                )
                records[at] = None
        return records

    def _compare_inputs(self, ids: RowIds, records: Sequence[bytes | None]) -> None:
        """Warn if a row's inputs differ from the labelled ones. The label is still used: image decoders differ."""
        for sample, record in zip(ids, records, strict=True):
            head = record[: len(UNKNOWN)] if record is not None else UNKNOWN
            if head != UNKNOWN and ids.fingerprints.get(sample, head) != head:
                self._warn(
                    f"the inputs of sample {sample!r} differ from those of its stored label. If the data set has "
                    "changed, or is augmented at random, labels are used with the wrong inputs: set a new `dataset` "
                    "tag, or include the augmentation in the ids"
                )

    def _warn(self, words: str) -> None:
        if not self._warned:  # a warning per sample would fill the log
            self._warned = True
            logger.warning("soft-label cache %s: %s", self._cache.path or "in memory", words)


def _kind(inputs: Sequence[str] | None) -> str:
    return "rows" if inputs is None else f"sequences with the inputs {list(inputs)}"


def _split(ids: Ids | SequenceIds) -> tuple[SequenceIds | None, list[SampleId]]:
    return (ids, as_ids(ids.ids)) if isinstance(ids, SequenceIds) else (None, as_ids(ids))


class MemoryTier:
    """Keeps the records of all keys in memory, in at most `limit_bytes` including bookkeeping. Thread-safe.

    Provides the methods of `LabelFolder` that every cache needs.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.records: dict[tuple[Namespace, SampleId], bytes] = {}
        self._calls = 0
        self._used_at: dict[Namespace, int] = {}
        self._lock = threading.Lock()

    def keys(self) -> list[CacheKey]:
        """Return the keys of all records."""
        with self._lock:
            return [*dict.fromkeys(space.key for space, _ in self.records)]

    def refresh(self, space: Namespace) -> None:
        """Do nothing: `space` already has the layout."""

    def ids(self, space: Namespace) -> list[SampleId]:
        """Return the ids of a key's records."""
        with self._lock:
            return [sample for owner, sample in self.records if owner is space]

    def read(self, space: Namespace, ids: Sequence[SampleId]) -> dict[SampleId, bytes]:
        """Return the records of those ids that have one."""
        with self._lock:
            self._use(space)
            return {sample: self.records[space, sample] for sample in ids if (space, sample) in self.records}

    def put(self, space: Namespace, records: Mapping[SampleId, bytes]) -> None:
        """Store the records that fit; an older record of the same id is dropped."""
        with self._lock:
            self._use(space)
            for sample, record in records.items():
                if (space, sample) in self.records:
                    self._discard(space, sample)
                size = _size(sample, record)
                if self.nbytes + size > self.limit_bytes:
                    self._evict_unused()
                if self.nbytes + size <= self.limit_bytes:
                    self.records[space, sample] = record
                    self.nbytes += size

    def _use(self, space: Namespace) -> None:
        self._calls += 1
        self._used_at[space] = self._calls

    def _discard(self, space: Namespace, sample: SampleId) -> None:
        self.nbytes -= _size(sample, self.records.pop((space, sample)))

    def _evict_unused(self) -> None:
        for space in [space for space, at in self._used_at.items() if self._calls - at > IDLE_AFTER_CALLS]:
            del self._used_at[space]
            for sample in [sample for owner, sample in self.records if owner is space]:
                self._discard(space, sample)


def _size(sample: SampleId, record: bytes) -> int:
    return len(record) + ROW_OVERHEAD + (len(sample) if isinstance(sample, str) else 0)
