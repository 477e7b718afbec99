"""`SoftLabelCache`: soft labels by key and sample id, in a folder or in memory. `CacheView`: those of a key.

`put` packs outputs into records and hands them to the `LabelFolder`, or without a folder to `MemoryTier`. Records of a
folder are not kept in memory as well: the system does that, and unpacking takes as long as reading.

A training loop is the worst case for a memory that drops the least recently used row: an epoch uses every row once, so
each is gone just before it is wanted again. So `MemoryTier` lets new rows into a full memory rarely: those that are
there stay and are found again, and yet a working set that changes is followed. (Qureshi et al., "Adaptive Insertion
Policies for High Performance Caching", ISCA 2007: bimodal insertion.) Rows of a key that is no longer used, such as
those of an older teacher, make room at once.
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
from edl.distill.compress import ClampWarnings, TopK
from edl.errors import ClosedError, SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero

logger = logging.getLogger("edl.distill")

_LEAST_BYTES = 1 << 20
"""The smallest bound on disk: the tables alone take tens of KB."""
ROW_OVERHEAD = 256
"""Bytes that a row takes in memory besides its record: the objects around it and its place in the dictionary."""
ADMIT_ONE_IN = 32
"""How rarely a row is let into a full memory; the paper's 1/32. With 1 the oldest row would go each time."""
IDLE_AFTER_CALLS = 1024
"""Calls after which a key's rows make room: several epochs of other keys, so that an ensemble's are kept."""


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was made, and gauges of this moment.

    Attributes:
        hits: Rows looked up that were there.
        misses: Rows looked up that were not there.
        memory_rows: Rows in memory.
        memory_bytes: Bytes of these rows, bookkeeping included.
        disk_rows: Rows on disk under the keys of this cache's views.
        disk_bytes: Bytes of the database in the folder, its journal included.
        evicted_rows: Rows that made room in memory.
        evicted_disk_rows: Rows that this cache deleted from the disk to make room.
        failed_writes: Batches that could not be written; their rows will be asked for again.
        damaged_rows: Rows found on disk that are damaged; they count as misses.
    """

    hits: int = 0
    misses: int = 0
    memory_rows: int = 0
    memory_bytes: int = 0
    disk_rows: int = 0
    disk_bytes: int = 0
    evicted_rows: int = 0
    evicted_disk_rows: int = 0
    failed_writes: int = 0
    damaged_rows: int = 0


class SoftLabelCache:
    """Soft labels by sample id, so that an epoch over the same inputs asks teachers nothing.

    ::

        cache = SoftLabelCache(memory_bytes=4 << 30, path="labels", disk_bytes=100 << 30)
        view = cache.view(CacheKey("resnet", "3", ("logits",), dataset="imagenet-train, no augmentation"))
        found = view.get(ids)
        if not found.complete:
            ...

    Thread-safe. Several processes of a machine may use one folder at a time; each sees what the others have written. In
    a forked child it cannot be used: open another one there.

    Args:
        memory_bytes: Bytes of the rows in memory, bookkeeping included, where there is no `path`.
        path: The folder, made if it is missing; None to keep rows in memory. It must not lie on a file system that
            several machines share, unless `EDL_SHARED_FILE` is set because one of them uses it.
        disk_bytes: Bytes of the folder's database, at least 1 MiB; the oldest labels make room. Its journal needs up to
            100 MiB more. A label above a 32nd of it may not fit. None for no bound.
        store_dtype: "float16" keeps floating-point outputs so, whatever teachers give; finite values stay finite.

    Attributes:
        path: The folder on disk; None without.

    Raises:
        SettingsError: invalid argument, or a folder that cannot be used.
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
        """Return the rows of a key; the same object for equal keys.

        Args:
            key: What the rows depend on. With `store_dtype`, that is part of it.
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
            path: The other folder. It may lie anywhere, if no process of another machine has it open.

        Raises:
            SettingsError: the folder cannot be read, or its labels do not fit those that are here.
        """
        self.check()
        with contextlib.closing(LabelFolder(path, read_only=True)) as other:
            for key in other.keys():  # noqa: SIM118 - not a mapping
                space = Namespace(key)
                for records in other.read_all(space):
                    if space.layout is not None:
                        self._view(key)._keep(space.layout, records)

    def keys(self) -> list[CacheKey]:
        """Return the keys that there are rows for."""
        self.check()
        return self.records.keys()

    def stats(self) -> CacheStats:
        """Return what has been done so far; may be called from any thread."""
        folder = self.folder
        with self.lock:
            views = list(self._views.values())
        return CacheStats(
            hits=sum(view.hits for view in views),
            misses=sum(view.misses for view in views),
            memory_rows=len(self.memory.records),
            memory_bytes=self.memory.nbytes,
            disk_rows=sum(len(folder.ids(view.space)) for view in views) if folder is not None else 0,
            disk_bytes=folder.nbytes() if folder is not None else 0,
            evicted_rows=self.memory.evicted,
            evicted_disk_rows=folder.evicted if folder is not None else 0,
            failed_writes=folder.failures if folder is not None else 0,
            damaged_rows=len(folder.damaged) if folder is not None else 0,
        )

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the disk has every row that was put so far. Without it, a loss of power may cost some.

        Args:
            timeout_s: Seconds to wait for it.

        Raises:
            TemporaryError: rows could not be written since the last flush, or the disk takes longer than `timeout_s`.
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
            ClosedError: it is closed, or belongs to the process that forked this one.
        """
        if os.getpid() != self._pid:
            raise ClosedError("this soft-label cache belongs to the process that forked this one: open another")
        if self._closed:
            raise ClosedError("the soft-label cache is closed")


class CacheView:
    """The rows of a key, or its sequences. Made by `SoftLabelCache.view`. Thread-safe.

    Ids are integers of 64 bits or strings; 1 and "1" are two ids. Under a key there are either rows, by plain ids, or
    sequences, by `SequenceIds`, each of which has rows of its own number. A sequence is found where its id, its length
    and the fingerprint of its inputs are those under which it was kept: a text that was edited has no label.

    Args:
        key: What the rows depend on.
        cache: The cache that keeps them.

    Attributes:
        hits: Rows, or sequences, looked up that were there.
        misses: Rows, or sequences, looked up that were not there.
    """

    def __init__(self, key: CacheKey, cache: SoftLabelCache) -> None:
        self.key = key
        self.hits = self.misses = 0
        self.space = Namespace(key)
        self.folder = cache.folder
        self._cache = cache
        where = f"soft-label cache {cache.path or 'in memory'}, model {key.model!r}"
        self._clamped = ClampWarnings(where, "leave store_dtype='float16' out of SoftLabelCache, under another path")
        self._warned = False

    @property
    def layout(self) -> RowLayout | None:
        """Columns of the records; None before there are any."""
        self._cache.records.refresh(self.space)
        return self.space.layout

    def get(self, ids: Ids | SequenceIds) -> Found:
        """Look rows or sequences up.

        Args:
            ids: Ids of rows, a sequence or an integer array; or those of sequences.

        Returns:
            Which of them are there, and their outputs.

        Raises:
            SettingsError: rows are looked up, and the labels of the key are of sequences; or the other way round.
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
        """Keep rows or sequences. If an id comes again, the last one counts.

        Waits until the folder has them. Rows that cannot be written are logged, and missing later.

        Args:
            ids: Ids of rows; or those of sequences, with lengths of at least 1, and fingerprints.
            outputs: Arrays [rows, ...] of numbers, or `TopK`, by the names in the key; of sequences the rows of all,
                behind one another.

        Raises:
            SettingsError: outputs that cannot be kept, or of other dtypes or shapes than outputs kept before.
        """
        self._cache.check()
        sequences, samples = _split(ids)
        if sequences is None:
            prints = ids.fingerprints if isinstance(ids, RowIds) else {}
            heads = [(1, prints.get(sample, UNKNOWN)) for sample in samples]
        elif sequences.heads is not None and all(rows for rows, _ in sequences.heads):
            heads = sequences.heads
        else:
            raise SettingsError("sequences are kept with their lengths, of at least one token, and fingerprints")
        if sorted(outputs) != sorted(self.key.outputs):
            raise SettingsError(f"outputs {sorted(outputs)}: the cache's key names {sorted(self.key.outputs)}")
        half = self._cache.store_dtype == "float16"
        for name, output in outputs.items() if half else ():
            self._clamped.before(name, output.values if isinstance(output, TopK) else np.asarray(output))
        arrays, layout = flatten(outputs, sum(rows for rows, _ in heads), half=half)
        if sequences is not None:
            layout = replace(layout, sequence_inputs=sequences.inputs)
        self._keep(layout, dict(zip(samples, layout.pack(arrays, heads), strict=True)))

    def _keep(self, layout: RowLayout, records: Mapping[SampleId, bytes]) -> None:
        """Keep records that are packed already, such as those of another folder."""
        cache, space = self._cache, self.space
        cache.records.refresh(space)
        with cache.lock:
            merged = layout if space.layout is None else space.layout.merged(layout)
            if merged is None:
                remedy = "use another `dataset` tag" + (f", or delete {cache.path}" if cache.path is not None else "")
                raise SettingsError(
                    f"soft labels do not fit the cache: rows are {layout}, before them {space.layout}: {remedy}"
                )
            space.layout = merged
        if records:
            cache.records.put(space, records)

    def contains(self, ids: Ids | SequenceIds) -> Array:
        """Return which ids there are rows for, bool [ids].

        Args:
            ids: Ids of rows, a sequence or an integer array; or those of sequences, which count if they are the same
                texts.
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
        """Return all ids that there are rows for."""
        self._cache.check()
        return self._cache.records.ids(self.space)

    def _check_kind(self, sequences: SequenceIds | None) -> None:
        """Check that labels are of sequences if, and only if, those are looked up, and of the same inputs."""
        if self.layout is None:
            return
        kept, wanted = self.layout.sequence_inputs, None if sequences is None else sequences.inputs
        if kept == wanted or (kept is not None and sequences is not None and sequences.heads is None):
            return
        raise SettingsError(
            f"the cache's labels of model {self.key.model!r} are of {_kind(kept)}, and {_kind(wanted)} are looked up: "
            "read them as they were labelled (sequences with set_sequence_generator, or distill with tokens=, and by "
            "the same inputs), or use another `dataset` tag"
        )

    def _records(self, samples: list[SampleId], heads: list[Head] | None) -> list[bytes | None]:
        """Return the records, None where there is none, or that of another text."""
        found = self._cache.records.read(self.space, samples)
        records = [found.get(sample) for sample in samples]
        layout = self.layout
        if heads is None or layout is None or layout.sequence_inputs is None:
            return records
        for at, (record, head) in enumerate(zip(records, heads, strict=True)):
            if record is not None and layout.head_of(record) != head:
                self._warn(
                    f"sample {samples[at]!r} is another text than the one whose label is kept under this id: this "
                    "label, and those of other samples like it, are not used"
                )
                records[at] = None
        return records

    def _compare_inputs(self, ids: RowIds, records: Sequence[bytes | None]) -> None:
        """Warn of a row whose inputs are not those that its label was kept for.

        The label is used all the same: decoders of images differ by a bit from machine to machine.
        """
        for sample, record in zip(ids, records, strict=True):
            head = record[: len(UNKNOWN)] if record is not None else UNKNOWN
            if head != UNKNOWN and ids.fingerprints.get(sample, head) != head:
                self._warn(
                    f"the inputs of sample {sample!r} are not those that its label was kept for. If the data set has "
                    "changed, or is augmented at random, labels of other inputs are used: name another `dataset` tag, "
                    "or have ids say which augmentation it is"
                )

    def _warn(self, words: str) -> None:
        if not self._warned:  # once for each sample would fill the log
            self._warned = True
            logger.warning("soft-label cache %s: %s", self._cache.path or "in memory", words)


def _kind(inputs: Sequence[str] | None) -> str:
    return "rows" if inputs is None else f"sequences with the inputs {list(inputs)}"


def _split(ids: Ids | SequenceIds) -> tuple[SequenceIds | None, list[SampleId]]:
    """Return the sequences, if these are any, and plain ids."""
    return (ids, as_ids(ids.ids)) if isinstance(ids, SequenceIds) else (None, as_ids(ids))


class MemoryTier:
    """Records of all keys, in `limit_bytes` together, bookkeeping included. Counts the rows `evicted` to make room.

    Thread-safe. Used in place of a `LabelFolder`, by the same methods.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = self.evicted = 0
        self.records: dict[tuple[Namespace, SampleId], bytes] = {}  # the least recently used first
        self._calls = self._turned_away = 0
        self._used_at: dict[Namespace, int] = {}
        self._lock = threading.Lock()

    def keys(self) -> list[CacheKey]:
        """Return the keys of all records."""
        with self._lock:
            return [*dict.fromkeys(space.key for space, _ in self.records)]

    def refresh(self, space: Namespace) -> None:
        """Do nothing: `space` has the layout."""

    def ids(self, space: Namespace) -> list[SampleId]:
        """Return the ids of a key's records."""
        with self._lock:
            return [sample for owner, sample in self.records if owner is space]

    def read(self, space: Namespace, ids: Sequence[SampleId]) -> dict[SampleId, bytes]:
        """Return the records of those ids that have one; they become the most recently used."""
        with self._lock:
            self._use(space)
            found = {sample: self.records.pop((space, sample)) for sample in ids if (space, sample) in self.records}
            self.records.update(((space, sample), record) for sample, record in found.items())
            return found

    def put(self, space: Namespace, records: Mapping[SampleId, bytes]) -> None:
        """Keep what there is room for, and what takes the place of an older record of the same id."""
        with self._lock:
            self._use(space)
            for sample, record in records.items():
                is_known = (space, sample) in self.records
                if is_known:
                    self._discard(space, sample)
                size = _size(sample, record)
                if self._make_room(size, sure=is_known):
                    self.records[space, sample] = record
                    self.nbytes += size

    def _use(self, space: Namespace) -> None:
        self._calls += 1
        self._used_at[space] = self._calls

    def _discard(self, space: Namespace, sample: SampleId) -> None:
        self.nbytes -= _size(sample, self.records.pop((space, sample)))

    def _make_room(self, size: int, *, sure: bool) -> bool:
        """Evict until a record of this size fits; return whether it may stay."""
        if size > self.limit_bytes:
            return False
        while self.nbytes + size > self.limit_bytes:
            space, sample = next(iter(self.records))
            if not sure and self._calls - self._used_at[space] <= IDLE_AFTER_CALLS:
                self._turned_away += 1
                if self._turned_away % ADMIT_ONE_IN:
                    return False
                sure = True
            self._discard(space, sample)
            self.evicted += 1
        return True


def _size(sample: SampleId, record: bytes) -> int:
    return len(record) + ROW_OVERHEAD + (len(sample) if isinstance(sample, str) else 0)
