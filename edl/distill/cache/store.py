"""`SoftLabelCache`: rows of soft labels by key and sample id, in memory and on disk. `CacheView`: those of a key."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from edl.distill.cache.folder import LabelFolder, Namespace, why
from edl.distill.cache.ids import Ids, RowIds, SampleId, SequenceIds, as_ids
from edl.distill.cache.key import CacheKey
from edl.distill.cache.layout import FINGERPRINT_NBYTES, Outputs, RowLayout, flatten
from edl.distill.cache.memory import MemoryTier
from edl.distill.cache.writer import LabelWriter
from edl.distill.compress import ClampWarnings, TopK, to_float16
from edl.errors import ClosedError, SettingsError, TemporaryError
from edl.protocol.tensors import Array

__all__ = ["CacheStats", "CacheView", "Found", "SoftLabelCache"]

logger = logging.getLogger("edl.distill")

_BATCH_BYTES = 16 << 20
"""Bytes written at a time: large enough that the disk's syncs do not count, small enough to hold a few in memory."""
_UNKNOWN = bytes(FINGERPRINT_NBYTES)
_LEAST_DISK_BYTES = 1 << 20
"""The smallest bound on disk: the database alone, with its journal, takes 200 KB."""


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was made, and gauges of this moment.

    Attributes:
        hits: rows looked up that were there.
        misses: rows looked up that were not there.
        memory_rows: rows in memory.
        memory_bytes: bytes of these rows, bookkeeping included.
        disk_rows: on disk under the keys of this cache's views, rows not written yet included.
        disk_bytes: bytes of all files in the folder.
        evicted_rows: from memory.
        evicted_segments: files of labels deleted by this cache to make room.
        failed_writes: batches that could not be written; their rows will be asked for again.
        skipped_files: files of labels found that are missing, torn or foreign.
        damaged_rows: rows found on disk that are damaged or whose file is gone; they count as misses.
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

    Thread-safe. Several processes of a machine may use one folder at a time; each sees what the others have written. In
    a forked child it cannot be used: open another one there.

    Args:
        memory_bytes: Bytes of the rows in memory, bookkeeping included; 0 for none. On top come about 300 bytes for
            each row that was read from disk, and rows on their way to disk, 48 MiB at most.
        path: The folder, made if it is missing; None to keep rows in memory only. It must not lie on a file system that
            several machines share, unless `EDL_SHARED_FILE` is set because one of them uses it.
        disk_bytes: Bytes of all files in the folder, at least 1 MiB; the oldest labels make room. None for no bound.
        store_dtype: "float16" keeps floating-point outputs so, whatever teachers give; finite values stay finite.
        flush_interval_s: Seconds after which a row is on disk at the latest (as on `flush` and `close`).

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
        self.memory = MemoryTier(memory_bytes)
        self._views: dict[CacheKey, CacheView] = {}
        self.folder = LabelFolder(Path(path), disk_bytes) if path is not None else None
        self.writer: LabelWriter | None = None
        if self.folder is not None:
            batch_bytes = min(_BATCH_BYTES, disk_bytes // 8) if disk_bytes is not None else _BATCH_BYTES
            self.writer = LabelWriter(self.folder, self.lock, batch_bytes, flush_interval_s)
            weakref.finalize(self, self.writer.let_go).atexit = False  # the writer sees to that

    @property
    def path(self) -> Path | None:
        """Folder on disk, None without."""
        return self.folder.path if self.folder is not None else None

    def view(self, key: CacheKey) -> CacheView:
        """Return the rows of a key; the same object for equal keys.

        Args:
            key: What the rows depend on. With `store_dtype`, that is part of it.
        """
        self.check()
        if self.store_dtype is not None:
            key = replace(key, dtype=self.store_dtype)
        return self._view(key)

    def _view(self, key: CacheKey) -> CacheView:
        with self.lock:
            view = self._views.get(key)
            if view is None:
                view = self._views[key] = CacheView(key, self)
        return view

    def add_folder(self, path: str | os.PathLike[str]) -> None:
        """Copy the labels of another folder, such as another machine's, into this cache.

        Args:
            path: The other folder. It may lie anywhere, if no process of another machine has it open.

        Raises:
            SettingsError: the folder cannot be read, or its labels do not fit those that are here.
        """
        self.check()
        other = LabelFolder(Path(path), read_only=True)
        try:
            for key in other.keys():  # noqa: SIM118 - not a mapping
                space = other.namespace(key)
                for ids, records in other.read_all(space):
                    there = {sample: record for sample, record in zip(ids, records, strict=True) if record is not None}
                    if there and space.layout is not None:
                        self._view(key).keep(space.layout, [*there], [*there.values()])
        finally:
            other.close()

    def keys(self) -> list[CacheKey]:
        """Return the keys that there are rows for: in the folder, and in memory."""
        self.check()
        found = dict.fromkeys(self.folder.keys() if self.folder is not None else ())
        with self.lock:
            views = list(self._views.items())
        found.update(dict.fromkeys(key for key, view in views if key not in found and view.ids()))
        return list(found)

    def stats(self) -> CacheStats:
        """Return what has been done so far; may be called from any thread."""
        folder, writer = self.folder, self.writer
        with self.lock:
            views = list(self._views.values())
        return CacheStats(
            hits=sum(view.hits for view in views),
            misses=sum(view.misses for view in views),
            memory_rows=len(self.memory),
            memory_bytes=self.memory.nbytes,
            disk_rows=sum(len(view.disk_ids()) for view in views),
            disk_bytes=folder.nbytes() if folder is not None else 0,
            evicted_rows=self.memory.evicted,
            evicted_segments=folder.evicted if folder is not None else 0,
            failed_writes=writer.failures if writer is not None else 0,
            skipped_files=folder.unreadable if folder is not None else 0,
            damaged_rows=sum(len(view.space.bad) for view in views),
        )

    def flush(self, timeout_s: float = 60.0) -> None:
        """Write every row that was put so far.

        Args:
            timeout_s: Seconds to wait for it.

        Raises:
            TemporaryError: rows could not be written now or since the last flush, or not within `timeout_s`.
        """
        self.check()
        if self.writer is None:
            return
        if not self.writer.flush(timeout_s):
            raise TemporaryError(f"soft-label cache {self.path}: not written within {timeout_s:g} s")
        with self.lock:
            lost, self.writer.lost_rows = self.writer.lost_rows, 0
            if lost:
                raise TemporaryError(
                    f"soft-label cache {self.path}: {lost} rows could not be written: {self.writer.failure}"
                )

    def close(self) -> None:
        """Write what is left, and release everything. A row that cannot be written is logged. May be called twice."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self.writer is not None and self.folder is not None:
            self.writer.close()
            self.folder.close()
        with self.lock:
            self.memory.clear()

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


@dataclass(frozen=True, eq=False)
class Found:
    """Rows, or sequences, that a look-up found.

    Attributes:
        mask: bool [ids], which of the ids are there.
        outputs: arrays [rows found, ...] or `TopK`, in the order of the ids; empty if none is there. Arrays may be
            read-only.
        lengths: int64 [ids] of sequences, how many rows each has (0 where that is not known); None where an id is a
            row.
    """

    mask: Array
    outputs: dict[str, Array | TopK]
    lengths: Array | None = None

    @property
    def row_mask(self) -> Array:
        """Which rows are there, bool [rows]."""
        found: Array = self.mask if self.lengths is None else np.repeat(self.mask, self.lengths)
        return found

    @property
    def complete(self) -> bool:
        """Whether every id was there."""
        return bool(self.mask.all())

    def filled(self, rest: Outputs) -> dict[str, Array | TopK]:
        """Return outputs of all rows, in the cache's dtypes.

        Args:
            rest: Outputs of the rows that were not there, in their order.

        Raises:
            SettingsError: `rest` has other outputs or shapes than the rows of the cache.
        """
        if not self.outputs:
            return dict(rest)
        mask = self.row_mask
        have, layout = flatten(self.outputs, int(mask.sum()))
        new, other = flatten(rest, int((~mask).sum()))
        top_k = layout.merged_top_k(other)
        if top_k is None or layout.shapes != other.shapes:
            remedy = "rows of several shapes cannot be kept: pad them alike, or leave the cache out"
            raise SettingsError(f"rows of the cache are {layout}, the others {other}; {remedy}")
        arrays = {}
        for column in layout.columns:
            array: Array = np.empty((len(mask), *column.shape), column.dtype)
            added = new[column.name]
            array[mask] = have[column.name]
            array[~mask] = to_float16(added) if column.dtype == np.float16 and added.dtype.kind == "f" else added
            arrays[column.name] = array
        return replace(layout, top_k=top_k).restore(arrays)


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
        self._cache = cache
        self._memory = cache.memory.rows()
        self.space = cache.folder.namespace(key) if cache.folder is not None else Namespace(key)
        where = f"soft-label cache {cache.path or 'in memory'}, model {key.model!r}"
        self._clamped = ClampWarnings(where, "leave store_dtype='float16' out of SoftLabelCache, under another path")
        self._other_text_warned = False

    @property
    def layout(self) -> RowLayout | None:
        """Columns of the records; None before there are any."""
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
        sequences = ids if isinstance(ids, SequenceIds) else None
        samples = as_ids(ids.ids if isinstance(ids, SequenceIds) else ids)
        self._check_kind(sequences)
        records = self._records(samples, sequences)
        if isinstance(ids, RowIds) and not self._other_text_warned:
            self._compare_inputs(ids, records)
        self._check_kind(sequences)  # of labels that were found just now
        mask = np.fromiter((record is not None for record in records), np.bool_, len(records))
        with self._cache.lock:
            self.hits += int(mask.sum())
            self.misses += int((~mask).sum())
        layout = self.layout
        there = [record for record in records if record is not None]
        lengths = None
        if sequences is not None:
            lengths = sequences.lengths
            if lengths is None:
                rows = (0 if record is None or layout is None else layout.rows_of(record) for record in records)
                lengths = np.fromiter(rows, np.int64, len(records))
        if not there or layout is None:
            return Found(mask, {}, lengths)
        return Found(mask, layout.restore(layout.unpack(there)[0]), lengths)

    def put(self, ids: Ids | SequenceIds, outputs: Outputs) -> None:
        """Keep rows or sequences. If an id comes again, the last one counts.

        May wait for the disk when labels come faster than it writes.

        Args:
            ids: Ids of rows; or those of sequences, with lengths of at least 1, and fingerprints.
            outputs: Arrays [rows, ...] of numbers, or `TopK`, by the names in the key; of sequences the rows of all,
                behind one another.

        Raises:
            SettingsError: outputs that cannot be kept, or of other dtypes or shapes than outputs kept before.
        """
        cache = self._cache
        cache.check()
        sequences = ids if isinstance(ids, SequenceIds) else None
        samples = as_ids(ids.ids if isinstance(ids, SequenceIds) else ids)
        if sequences is not None and (sequences.heads is None or not all(rows for rows, _ in sequences.heads)):
            raise SettingsError("sequences are kept with their lengths, of at least one token, and fingerprints")
        if sorted(outputs) != sorted(self.key.outputs):
            raise SettingsError(f"outputs {sorted(outputs)}: the cache's key names {sorted(self.key.outputs)}")
        half = cache.store_dtype == "float16"
        if half:
            for name, output in outputs.items():
                self._clamped.before(name, output.values if isinstance(output, TopK) else np.asarray(output))
        rows = len(samples) if sequences is None else sequences.rows
        arrays, layout = flatten(outputs, rows, half=half)
        if sequences is not None:
            layout = replace(layout, sequence_inputs=sequences.inputs)
        heads = b""
        if isinstance(ids, RowIds) and ids.fingerprints:
            heads = b"".join(ids.fingerprints.get(sample, _UNKNOWN) for sample in samples)
        self.keep(layout, samples, layout.pack(arrays, rows, sequences, heads))

    def keep(self, layout: RowLayout, samples: list[SampleId], records: list[bytes]) -> None:
        """Keep records that are packed already, such as those of another folder.

        Args:
            layout: Columns of the records.
            samples: Ids.
            records: A record for each id.

        Raises:
            SettingsError: they have another layout than records kept before.
        """
        cache, space = self._cache, self.space
        if cache.folder is not None:
            cache.folder.refresh(space)
        with cache.lock:
            merged = layout if space.layout is None else space.layout.merged(layout)
            if merged is None:
                remedy = "use another `dataset` tag" + (f", or delete {cache.path}" if cache.path is not None else "")
                raise SettingsError(
                    f"soft labels do not fit the cache: rows are {layout}, before them {space.layout}: {remedy}"
                )
            space.layout = merged
            cache.memory.put(self._memory, samples, records)
        if cache.writer is not None and samples:
            cache.writer.put(space, dict(zip(samples, records, strict=True)))

    def contains(self, ids: Ids | SequenceIds) -> Array:
        """Return which ids there are rows for, bool [ids]; without reading them.

        Args:
            ids: Ids of rows, a sequence or an integer array; or those of sequences, which count if they are the same
                texts.
        """
        self._cache.check()
        heads = ids.heads if isinstance(ids, SequenceIds) else None
        samples = as_ids(ids.ids if isinstance(ids, SequenceIds) else ids)
        with self._cache.lock:
            records = {sample: record for sample in samples if (record := self._held(sample)) is not None}
        rest = [sample for sample in samples if sample not in records]
        known = self._cache.folder.known(self.space, rest) if self._cache.folder is not None and rest else {}
        layout = self.layout
        if heads is None or layout is None or layout.sequence_inputs is None:
            return np.fromiter((sample in records or sample in known for sample in samples), np.bool_, len(samples))
        found = {sample: layout.head_of(record) for sample, record in records.items()}
        for sample, (nbytes, mark) in known.items():
            rows = (nbytes - FINGERPRINT_NBYTES) // layout.row_nbytes
            found[sample] = rows, mark.to_bytes(FINGERPRINT_NBYTES, "little", signed=True)
        same = (found.get(sample) == head for sample, head in zip(samples, heads, strict=True))
        return np.fromiter(same, np.bool_, len(samples))

    @property
    def data_set(self) -> str:
        """What `note_data_set` wrote down; empty if nothing is known, and without a folder."""
        self._cache.check()
        return self._cache.folder.data_set(self.space) if self._cache.folder is not None else ""

    def note_data_set(self, text: str, *, relabel: bool = False) -> None:
        """Write down which data the labels are of, for a later process to compare.

        Args:
            text: Tells one data set from another, such as a checksum.
            relabel: Also forget the labels on disk, which are of other data. Call it before the first `get`.

        Raises:
            TemporaryError: it could not be written.
        """
        self._cache.check()
        if self._cache.folder is not None:
            with self._translated():
                self._cache.folder.note_data_set(self.space, text, relabel=relabel)

    def verify(self) -> None:
        """Read all rows on disk and forget damaged rows, so that `contains` and `ids` can be relied on.

        Raises:
            TemporaryError: the folder cannot be written.
        """
        self._cache.check()
        if self._cache.folder is not None:
            with self._translated():
                self._cache.folder.verify(self.space)

    def ids(self) -> list[SampleId]:
        """Return all ids that there are rows for."""
        self._cache.check()
        found = dict.fromkeys(self.disk_ids())
        with self._cache.lock:
            return list(found | dict.fromkeys(self._memory.records))

    def disk_ids(self) -> dict[SampleId, None]:
        """Return the ids of rows on disk, and of those on their way there."""
        found = dict.fromkeys(self._cache.folder.ids(self.space)) if self._cache.folder is not None else {}
        with self._cache.lock:
            return found | dict.fromkeys([*self.space.writing, *self.space.waiting])

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as exc:
            raise TemporaryError(f"soft-label cache {self._cache.path}: {why(exc)}") from exc

    def _check_kind(self, sequences: SequenceIds | None) -> None:
        """Check that labels are of sequences if, and only if, those are wanted."""
        layout = self.layout
        if layout is None:
            return
        if (sequences is None) == (layout.sequence_inputs is None):
            if sequences is None or sequences.heads is None or sequences.inputs == layout.sequence_inputs:
                return
            raise SettingsError(
                f"labels of sequences were kept for inputs {list(layout.sequence_inputs or ())}, and are looked up for "
                f"{list(sequences.inputs)}: name the same inputs, or use another `dataset` tag"
            )
        kept, wanted = ("rows", "sequences") if sequences is not None else ("sequences", "rows")
        raise SettingsError(
            f"the cache's labels of model {self.key.model!r} are of {kept}, and {wanted} are looked up: read them as "
            "they were labelled (sequences with set_sequence_generator, or distill with tokens=), or use another "
            "`dataset` tag"
        )

    def _held(self, sample: SampleId) -> bytes | None:
        """Return a record that is in memory, be it on its way to disk."""
        space = self.space
        return self._memory.records.get(sample) or space.waiting.get(sample) or space.writing.get(sample)

    def _records(self, samples: list[SampleId], sequences: SequenceIds | None) -> list[bytes | None]:
        cache = self._cache
        with cache.lock:
            records = cache.memory.get(self._memory, samples)
            missing = []
            for at, record in enumerate(records):
                if record is None and (held := self._held(samples[at])) is not None:
                    records[at] = held
                elif record is None:
                    missing.append(at)
        # Rows are read without the lock, so that `put` does not wait for the disk.
        if missing and cache.folder is not None:
            self._read(samples, records, missing, fresh=False)
        heads = sequences.heads if sequences is not None else None
        if heads is not None:
            others = self._others(records, heads)
            if others and cache.folder is not None:  # another process may have labelled the text as it is now
                self._read(samples, records, others, fresh=True)
                others = self._others(records, heads)
            for at in others:
                self._warn_of_other_text(samples[at], heads[at][0], records[at])
                records[at] = None
        return records

    def _read(self, samples: list[SampleId], records: list[bytes | None], places: list[int], *, fresh: bool) -> None:
        """Read records from disk, and keep them in memory unless newer ones are there."""
        cache = self._cache
        assert cache.folder is not None
        wanted = [samples[at] for at in places]
        read = cache.folder.read(self.space, wanted, fresh=fresh)
        with cache.lock:
            for at, sample, record in zip(places, wanted, read, strict=True):
                if record is None:
                    continue
                records[at] = record
                if cache.memory.limit_bytes and (fresh or self._held(sample) is None):
                    cache.memory.put(self._memory, [sample], [record])

    def _others(self, records: list[bytes | None], heads: list[tuple[int, bytes]]) -> list[int]:
        """Return at which places there are records of other texts than those looked up."""
        layout = self.layout
        if layout is None or layout.sequence_inputs is None:
            return []
        pairs = enumerate(zip(records, heads, strict=True))
        return [at for at, (record, head) in pairs if record is not None and layout.head_of(record) != head]

    def _compare_inputs(self, ids: RowIds, records: list[bytes | None]) -> None:
        """Warn of a row whose inputs are not those that its label was kept for.

        The label is used all the same: decoders of images differ by a bit from machine to machine.
        """
        for sample, record in zip(ids, records, strict=True):
            head = record[:FINGERPRINT_NBYTES] if record is not None else _UNKNOWN
            if head != _UNKNOWN and ids.fingerprints.get(sample, head) != head:
                self._other_text_warned = True
                logger.warning(
                    "soft-label cache %s: the inputs of sample %r are not those that its label was kept for. If the "
                    "data set has changed, or is augmented at random, labels of other inputs are used: name another "
                    "`dataset` tag, or have ids say which augmentation it is",
                    self._cache.path or "in memory",
                    sample,
                )
                return

    def _warn_of_other_text(self, sample: SampleId, rows: int, record: bytes | None) -> None:
        if self._other_text_warned or record is None or self.layout is None:
            return
        self._other_text_warned = True
        logger.warning(
            "soft-label cache: sample %r has %d tokens, and the text whose label is kept under this id had %d, "
            "or other ones: this label, and those of other samples like it, are not used",
            sample,
            rows,
            self.layout.rows_of(record),
        )
