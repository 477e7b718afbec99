"""`SoftLabelCache`: soft labels by key and sample id, in memory and on disk. `CacheView`: those of a key.

`put` packs outputs into records, keeps them in memory as far as there is room, and hands them to the folder's writer.
`get` looks into memory, then among the records on their way to the disk, then into the folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Literal

import numpy as np

from edl.distill.cache.folder import LabelFolder, LabelWriter, Namespace
from edl.distill.cache.key import UNKNOWN, CacheKey, Head, Ids, RowIds, SampleId, SequenceIds, as_ids
from edl.distill.cache.memory import MemoryTier
from edl.distill.cache.records import Found, Outputs, RowLayout, flatten
from edl.distill.compress import ClampWarnings, TopK
from edl.errors import ClosedError, SettingsError, TemporaryError
from edl.protocol.tensors import Array

__all__ = ["CacheStats", "CacheView", "SoftLabelCache"]

logger = logging.getLogger("edl.distill")

_LEAST_DISK_BYTES = 1 << 20
"""The smallest bound on disk: the tables alone take tens of KB, and a quarter is kept free for the journal."""


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was made, and gauges of this moment.

    Attributes:
        hits: Rows looked up that were there.
        misses: Rows looked up that were not there.
        memory_rows: Rows in memory.
        memory_bytes: Bytes of these rows, bookkeeping included.
        disk_rows: Rows on disk under the keys of this cache's views, rows not written yet included.
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
        memory_bytes: Bytes of the rows in memory, bookkeeping included; 0 for none. Rows on their way to disk come on
            top, 48 MiB at most.
        path: The folder, made if it is missing; None to keep rows in memory only. It must not lie on a file system that
            several machines share, unless `EDL_SHARED_FILE` is set because one of them uses it.
        disk_bytes: Bytes of the folder's database and its journal together, at least 1 MiB; the oldest labels make
            room. A single label takes a sixteenth at most. None for no bound.
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
        numbers = {"memory_bytes": memory_bytes, "flush_interval_s": flush_interval_s}
        if disk_bytes is not None:
            numbers["disk_bytes"] = disk_bytes
        for name, value in numbers.items():
            if not isinstance(value, Real):
                raise SettingsError(f"{name}={value!r}: must be a number")
        if memory_bytes < 0:
            raise SettingsError(f"memory_bytes={memory_bytes}: must be 0 or more")
        if path is not None:
            check_path(path)
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
        self.writer = LabelWriter(self.folder, self.lock, flush_interval_s) if self.folder is not None else None
        if self.writer is not None:
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
        return self._view(key if self.store_dtype is None else replace(key, dtype=self.store_dtype))

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
        with contextlib.closing(LabelFolder(Path(path), read_only=True)) as other:
            for key in other.keys():  # noqa: SIM118 - not a mapping
                space = Namespace(key)
                for ids, records in other.read_all(space):
                    there = {sample: record for sample, record in zip(ids, records, strict=True) if record is not None}
                    if there and space.layout is not None:
                        self._view(key).keep(space.layout, [*there], [*there.values()])

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
            evicted_disk_rows=folder.evicted if folder is not None else 0,
            failed_writes=writer.failures if writer is not None else 0,
            damaged_rows=len(folder.damaged) if folder is not None else 0,
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
            raise TemporaryError(f"{lost} rows could not be written: {self.writer.failure}")

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
        self._space = Namespace(key)
        if cache.folder is not None:
            cache.folder.refresh(self._space)
        where = f"soft-label cache {cache.path or 'in memory'}, model {key.model!r}"
        self._clamped = ClampWarnings(where, "leave store_dtype='float16' out of SoftLabelCache, under another path")
        self._warned = False

    @property
    def layout(self) -> RowLayout | None:
        """Columns of the records; None before there are any."""
        return self._space.layout

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
        self._check_kind(sequences)
        records = self._records(samples, sequences.heads if sequences is not None else None)
        if isinstance(ids, RowIds):
            self._compare_inputs(ids, records)
        self._check_kind(sequences)  # of labels that were found just now
        mask = np.fromiter((record is not None for record in records), np.bool_, len(records))
        with self._cache.lock:
            self.hits += int(mask.sum())
            self.misses += int((~mask).sum())
        layout = self.layout
        lengths = sequences.lengths if sequences is not None else None
        if sequences is not None and lengths is None:
            rows = [0 if record is None or layout is None else layout.rows_of(record) for record in records]
            lengths = np.array(rows, np.int64)
        there = [record for record in records if record is not None]
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
        self._cache.check()
        sequences, samples = _split(ids)
        if sequences is not None:
            if sequences.heads is None or not all(rows for rows, _ in sequences.heads):
                raise SettingsError("sequences are kept with their lengths, of at least one token, and fingerprints")
            heads = sequences.heads
        else:
            prints = ids.fingerprints if isinstance(ids, RowIds) else {}
            heads = [(1, prints.get(sample, UNKNOWN)) for sample in samples]
        if sorted(outputs) != sorted(self.key.outputs):
            raise SettingsError(f"outputs {sorted(outputs)}: the cache's key names {sorted(self.key.outputs)}")
        half = self._cache.store_dtype == "float16"
        for name, output in outputs.items() if half else ():
            self._clamped.before(name, output.values if isinstance(output, TopK) else np.asarray(output))
        arrays, layout = flatten(outputs, sum(rows for rows, _ in heads), half=half)
        if sequences is not None:
            layout = replace(layout, sequence_inputs=sequences.inputs)
        self.keep(layout, samples, layout.pack(arrays, heads))

    def keep(self, layout: RowLayout, samples: Sequence[SampleId], records: Sequence[bytes]) -> None:
        """Keep records that are packed already, such as those of another folder.

        Args:
            layout: Columns of the records.
            samples: The ids.
            records: A record for each id.

        Raises:
            SettingsError: they have another layout than records kept before.
        """
        cache, space = self._cache, self._space
        if cache.folder is not None and space.layout is None:
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
            cache.writer.put(space, samples, records)

    def contains(self, ids: Ids | SequenceIds) -> Array:
        """Return which ids there are rows for, bool [ids]; without reading them.

        Args:
            ids: Ids of rows, a sequence or an integer array; or those of sequences, which count if they are the same
                texts.
        """
        self._cache.check()
        sequences, samples = _split(ids)
        known = self._cache.folder.known(self._space, samples) if self._cache.folder is not None else {}
        layout = self.layout
        with self._cache.lock:
            held = self._held(samples)
        if layout is not None:
            known.update({sample: layout.head_of(held[sample]) for sample in samples if sample in held})
        if sequences is None or sequences.heads is None or layout is None or layout.sequence_inputs is None:
            return np.fromiter((sample in known for sample in samples), np.bool_, len(samples))
        same = (known.get(sample) == head for sample, head in zip(samples, sequences.heads, strict=True))
        return np.fromiter(same, np.bool_, len(samples))

    @property
    def data_set(self) -> str:
        """What `note_data_set` wrote down; empty if nothing is known, and without a folder.

        From now on the view writes labels only until another process notes other data with `relabel`.
        """
        self._cache.check()
        return self._cache.folder.data_set(self._space) if self._cache.folder is not None else ""

    def note_data_set(self, text: str, *, relabel: bool = False) -> None:
        """Write down which data the labels are of, for a later process to compare.

        Args:
            text: Tells one data set from another, such as a checksum.
            relabel: Also forget the labels on disk, which are of other data. Call it before the first `get`.

        Raises:
            ConflictError: another process noted other data since `data_set` was read.
            TemporaryError: it could not be written.
        """
        self._cache.check()
        if self._cache.folder is not None:
            self._cache.folder.note_data_set(self._space, text, relabel=relabel)

    def check_data_set(self) -> None:
        """Check that the labels are still those of the data that `data_set` or `note_data_set` told.

        Raises:
            ConflictError: another process noted other data with `relabel`.
        """
        self._cache.check()
        if self._cache.folder is not None:
            self._cache.folder.check_data_set(self._space)

    def verify(self) -> None:
        """Read all rows on disk and forget damaged rows, so that `contains` and `ids` can be relied on.

        Raises:
            TemporaryError: the folder cannot be written.
        """
        self._cache.check()
        if self._cache.folder is not None:
            self._cache.folder.verify(self._space)

    def ids(self) -> list[SampleId]:
        """Return all ids that there are rows for."""
        self._cache.check()
        found = self.disk_ids()
        with self._cache.lock:
            return list(found | dict.fromkeys(self._memory.records))

    def disk_ids(self) -> dict[SampleId, None]:
        """Return the ids of rows on disk, and of those on their way there."""
        folder, writer = self._cache.folder, self._cache.writer
        if folder is None or writer is None:
            return {}
        with self._cache.lock:
            held = writer.held(self._space)  # first, since a row goes from there to the disk
        return dict.fromkeys([*folder.ids(self._space), *held])

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

    def _held(self, samples: Sequence[SampleId]) -> dict[SampleId, bytes]:
        """Return the records that are in memory, be it on their way to disk."""
        writer, records = self._cache.writer, self._memory.records
        found = writer.held(self._space, samples) if writer is not None else {}
        return found | {sample: records[sample] for sample in samples if sample in records}

    def _records(self, samples: list[SampleId], heads: list[Head] | None) -> list[bytes | None]:
        """Return the records, None where there is none, or that of another text."""
        cache = self._cache
        with cache.lock:
            records = cache.memory.get(self._memory, samples)
            if cache.writer is not None and (held := cache.writer.held(self._space, samples)):
                records = [record or held.get(sample) for sample, record in zip(samples, records, strict=True)]

        def is_right(at: int, record: bytes) -> bool:
            layout = self.layout
            if heads is None or layout is None or layout.sequence_inputs is None:
                return True
            return layout.head_of(record) == heads[at]

        # One of another text in memory is looked up too: another process may have labelled the text as it is now.
        wrong = [at for at, record in enumerate(records) if record is None or not is_right(at, record)]
        if wrong and cache.folder is not None:
            # Without the lock, so that `put` does not wait for the disk.
            read = cache.folder.read(self._space, [samples[at] for at in wrong])
            with cache.lock:
                for at, record in zip(wrong, read, strict=True):
                    if record is None:
                        continue
                    sample = samples[at]
                    if cache.memory.limit_bytes and self._held([sample]).get(sample) is records[at]:  # none is newer
                        cache.memory.put(self._memory, [sample], [record])
                    records[at] = record
        for at in wrong:
            if heads is not None and (record := records[at]) is not None and not is_right(at, record):
                self._warn_of_other_text(samples[at], heads[at][0], record)
                records[at] = None
        return records

    def _compare_inputs(self, ids: RowIds, records: Sequence[bytes | None]) -> None:
        """Warn of a row whose inputs are not those that its label was kept for.

        The label is used all the same: decoders of images differ by a bit from machine to machine.
        """
        for sample, record in zip(ids, records, strict=True):
            head = record[: len(UNKNOWN)] if record is not None else UNKNOWN
            if not self._warned and head != UNKNOWN and ids.fingerprints.get(sample, head) != head:
                self._warned = True
                logger.warning(
                    "soft-label cache %s: the inputs of sample %r are not those that its label was kept for. If the "
                    "data set has changed, or is augmented at random, labels of other inputs are used: name another "
                    "`dataset` tag, or have ids say which augmentation it is",
                    self._cache.path or "in memory",
                    sample,
                )

    def _warn_of_other_text(self, sample: SampleId, rows: int, record: bytes) -> None:
        if self._warned or self.layout is None:
            return
        self._warned = True
        logger.warning(
            "soft-label cache: sample %r has %d tokens, and the text whose label is kept under this id had %d, "
            "or other ones: this label, and those of other samples like it, are not used",
            sample,
            rows,
            self.layout.rows_of(record),
        )


def check_path(path: object) -> None:
    """Check that a folder is named.

    Raises:
        SettingsError: It is something else, or empty, which would be the current folder.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise SettingsError(f"{path!r} names no folder of labels: pass its path, such as 'labels'")


def _split(ids: Ids | SequenceIds) -> tuple[SequenceIds | None, list[SampleId]]:
    """Return the sequences, if these are any, and plain ids."""
    return (ids, as_ids(ids.ids)) if isinstance(ids, SequenceIds) else (None, as_ids(ids))
