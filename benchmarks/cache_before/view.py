"""`CacheView`: looks up and keeps the rows, or the sequences, of a key, many at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from benchmarks.cache_before.folder import SegmentFolder
from benchmarks.cache_before.layout import Outputs, RowLayout, flatten
from benchmarks.cache_before.memory import MemoryTier, SampleId
from benchmarks.cache_before.namespace import Namespace, RowRange
from benchmarks.cache_before.segment import BadSegmentError, FileHandles
from benchmarks.cache_before.writer import SegmentWriter
from edl.distill.cache import CacheKey, SequenceIds
from edl.distill.compress import TopK, to_float16
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["CacheParts", "CacheView", "Found", "Ids", "as_ids"]

logger = logging.getLogger("edl.distill")

Ids: TypeAlias = Sequence[SampleId] | Array


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
            rest: outputs of the rows that were not there, in their order.

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


@dataclass(frozen=True, eq=False)
class CacheParts:
    """Parts of a cache that its views share.

    Attributes:
        check_open: raises `ClosedError` if the cache is closed; a method of the cache's, which its views keep alive.
        lock: guards everything but reading files.
        memory: rows in memory.
        folder: files on disk, None without.
        handles: open files.
        writer: writes rows to disk, None without.
        store_dtype: see `SoftLabelCache`.
    """

    check_open: Callable[[], None]
    lock: threading.Condition
    memory: MemoryTier
    folder: SegmentFolder | None
    handles: FileHandles
    writer: SegmentWriter | None
    store_dtype: Literal["float16"] | None


class CacheView:
    """The rows of a key, or its sequences. Made by `SoftLabelCache.view`. Thread-safe.

    Ids are integers of 64 bits or strings; 1 and "1" are two ids. Under a key there are either rows, by plain ids, or
    sequences, by `SequenceIds`, each of which has rows of its own number. A sequence is found where its id, its length
    and the fingerprint of its inputs are those under which it was kept: a text that was edited has no label.

    Args:
        key: what the rows depend on.
        parts: of the cache.

    Attributes:
        key: what the rows depend on.
        hits: rows, or sequences, looked up that were there.
        misses: looked up that were not there.
        disk: the part on disk; None without.
    """

    def __init__(self, key: CacheKey, parts: CacheParts) -> None:
        self.key = key
        self.hits = self.misses = 0
        self._check_open = parts.check_open
        self._lock = parts.lock
        self._memory = parts.memory
        self._writer = parts.writer
        self._store_dtype = parts.store_dtype
        self._rows = parts.memory.rows()
        self._layout: RowLayout | None = None
        folder = parts.folder
        self._other_text_warned = False
        self.disk: Namespace | None = None
        if folder is not None:
            self.disk = Namespace(folder.path, key, parts.handles)
            self.disk.scan(force=True)

    @property
    def layout(self) -> RowLayout | None:
        """Columns of the records; None before there are any."""
        return self.disk.layout if self.disk is not None else self._layout

    def get(self, ids: Ids | SequenceIds) -> Found:
        """Look rows or sequences up.

        Args:
            ids: [rows], a sequence or an integer array; or those of sequences.

        Returns:
            Which of them are there, and their outputs.

        Raises:
            SettingsError: rows are looked up, and the labels of the key are of sequences; or the other way round.
        """
        self._check_open()
        sequences = ids if isinstance(ids, SequenceIds) else None
        samples = as_ids(ids.ids if isinstance(ids, SequenceIds) else ids)
        self._check_kind(sequences)
        records = self._records(samples, None if sequences is None else sequences.heads)
        mask = np.fromiter((record is not None for record in records), np.bool_, len(records))
        there = [record for record in records if record is not None]
        lengths = self._lengths(sequences, records) if sequences is not None else None
        if not there:
            return Found(mask, {}, lengths)
        layout = self.layout
        assert layout is not None
        self._check_kind(sequences)  # of files that were found just now
        if sequences is None:
            return Found(mask, layout.restore(layout.unpack(b"".join(there), len(there))))
        return Found(mask, layout.restore(layout.unpack_sequences(there)[0]), lengths)

    def put(self, ids: Ids | SequenceIds, outputs: Outputs) -> None:
        """Keep rows or sequences. Of several of the same id the last counts.

        May wait for the disk when labels come faster than it writes.

        Args:
            ids: [rows]; or those of sequences, with lengths of at least 1, and fingerprints.
            outputs: arrays [rows, ...] of numbers, or `TopK`, by the names in the key; of sequences the rows of all,
                behind one another.

        Raises:
            SettingsError: outputs that cannot be kept, or of other dtypes or shapes than outputs kept before.
        """
        self._check_open()
        sequences = ids if isinstance(ids, SequenceIds) else None
        samples = as_ids(ids.ids if isinstance(ids, SequenceIds) else ids)
        _check_ids(samples)
        if sequences is not None and (sequences.heads is None or not all(rows for rows, _ in sequences.heads)):
            raise SettingsError("sequences are kept with their lengths, of at least one token, and fingerprints")
        if sorted(outputs) != sorted(self.key.outputs):
            raise SettingsError(f"outputs {sorted(outputs)}: the cache's key names {sorted(self.key.outputs)}")
        half = self._store_dtype == "float16"
        rows = len(samples) if sequences is None else sum(rows for rows, _ in sequences.heads or ())
        arrays, layout = flatten(outputs, rows, half=half)
        if sequences is None:
            records = layout.pack(arrays)
        else:
            layout = replace(layout, sequence_inputs=sequences.inputs)
            records = layout.pack_sequences(arrays, sequences)
        with self._lock:
            self._agree(layout)
            self._memory.put(self._rows, samples, records)
        if self._writer is not None and self.disk is not None:
            self._writer.put(self.disk, samples, records)

    def contains(self, ids: Ids | SequenceIds) -> Array:
        """Return which ids there are rows for, bool [ids]; without reading them.

        Args:
            ids: [rows], a sequence or an integer array; or those of sequences, which count if they are the same texts.
        """
        self._check_open()
        heads = ids.heads if isinstance(ids, SequenceIds) else None
        samples = as_ids(ids.ids if isinstance(ids, SequenceIds) else ids)
        with self._lock:
            disk = self._scanned()
            layout = self.layout
            if heads is None or layout is None or layout.sequence_inputs is None:
                known, there = self._rows.records, disk or ()
                return np.fromiter((sample in known or sample in there for sample in samples), np.bool_, len(samples))
            same = (self._head(sample, disk, layout) == head for sample, head in zip(samples, heads, strict=True))
            return np.fromiter(same, np.bool_, len(samples))

    def _head(self, sample: SampleId, disk: Namespace | None, layout: RowLayout) -> tuple[int, bytes] | None:
        record = self._rows.records.get(sample)
        if record is not None:
            return layout.head_of(record)
        return disk.head(sample) if disk is not None else None

    def verify(self) -> None:
        """Read all rows on disk and forget damaged rows, so that `contains` and `ids` can be relied on."""
        self._check_open()
        with self._lock:
            disk = self._scanned()
            if disk is not None:
                disk.verify()

    def ids(self) -> list[SampleId]:
        """Return all ids that there are rows for."""
        self._check_open()
        with self._lock:
            disk = self._scanned()
            return list(dict.fromkeys([*(disk.ids() if disk is not None else ()), *self._rows.records]))

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

    def _lengths(self, sequences: SequenceIds, records: list[bytes | None]) -> Array:
        layout = self.layout
        if sequences.lengths is not None:
            return sequences.lengths
        rows = (0 if record is None or layout is None else layout.rows_of(record) for record in records)
        return np.fromiter(rows, np.int64, len(records))

    def _scanned(self) -> Namespace | None:
        if self.disk is not None:
            self.disk.scan()
        return self.disk

    def _agree(self, layout: RowLayout) -> None:
        if self.disk is not None:
            try:
                self.disk.agree(layout)
            except BadSegmentError as exc:
                remedy = f"use another `dataset` tag, or delete {self.disk.path}"
                raise SettingsError(f"soft labels do not fit the cache: {exc}: {remedy}") from exc
            return
        merged = layout if self._layout is None else self._layout.merged(layout)
        if merged is None:
            raise SettingsError(
                f"soft labels do not fit the cache: rows are {layout}, before them {self._layout}: "
                "use another `dataset` tag"
            )
        self._layout = merged

    # Looking up

    def _records(self, samples: list[SampleId], heads: list[tuple[int, bytes]] | None = None) -> list[bytes | None]:
        places: list[tuple[list[int], RowRange]] = []
        with self._lock:
            records = self._memory.get(self._rows, samples)
            if self.disk is not None and None in records:
                places = self._on_disk(self.disk, samples, records)
        # Rows are read without the lock, which whoever puts labels waits for.
        found = [self.disk.read(place) for _, place in places] if self.disk is not None else []
        with self._lock:
            for (rows, place), read in zip(places, found, strict=True):
                self._take(samples, records, rows, place, read)
            if heads is not None:
                self._leave_out_other_texts(samples, records, heads)
            missing = records.count(None)
            self.hits += len(records) - missing
            self.misses += missing
        return records

    def _leave_out_other_texts(
        self, samples: list[SampleId], records: list[bytes | None], heads: list[tuple[int, bytes]]
    ) -> None:
        layout = self.layout
        if layout is None or layout.sequence_inputs is None:
            return
        for at, (record, head) in enumerate(zip(records, heads, strict=True)):
            if record is None or layout.head_of(record) == head:
                continue
            records[at] = None
            if not self._other_text_warned:
                self._other_text_warned = True
                logger.warning(
                    "soft-label cache: sample %r has %d tokens, and the text whose label is kept under this id had %d, "
                    "or other ones: this label, and those of other samples like it, are not used",
                    samples[at],
                    head[0],
                    layout.rows_of(record),
                )

    @staticmethod
    def _on_disk(
        disk: Namespace, samples: list[SampleId], records: list[bytes | None]
    ) -> list[tuple[list[int], RowRange]]:
        """Fill in rows that wait to be written; return, for the others, which rows to read where."""
        for row, record in enumerate(records):
            if record is None:
                records[row] = disk.pending.get(samples[row])
        missing = [row for row, record in enumerate(records) if record is None]
        places = disk.places([samples[row] for row in missing])
        if None in places:
            disk.scan()
            places = disk.places([samples[row] for row in missing])
        found, at = [], 0
        for place in places:
            if place is not None:
                found.append((missing[at : at + place.rows], place))
            at += place.rows if place is not None else 1
        return found

    def _take(
        self,
        samples: list[SampleId],
        records: list[bytes | None],
        rows: list[int],
        place: RowRange,
        read: list[bytes | None] | BadSegmentError,
    ) -> None:
        """Put rows from disk into the answer, and into memory unless newer rows were put meanwhile."""
        assert self.disk is not None
        if isinstance(read, BadSegmentError):
            self.disk.lost(place, read)
            return
        for at, (row, record) in enumerate(zip(rows, read, strict=True)):
            records[row] = record
            sample = samples[row]
            if record is None:
                self.disk.damaged(place, at, sample)
            elif sample not in self._rows.records and self.disk.is_newest(place, at, sample):
                self._memory.put(self._rows, [sample], [record])


def as_ids(ids: Ids) -> list[SampleId]:
    """Return sample ids as plain Python integers and strings.

    Args:
        ids: [rows], a sequence or an array.

    Raises:
        SettingsError: something else is among them.
    """
    samples = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(samples, list):
        raise SettingsError(f"sample ids {samples!r}: expected a sequence of integers or strings")
    if not {*map(type, samples)} <= {int, str}:
        # Scalars of numpy, and tensors without a dimension.
        samples = [sample.item() if getattr(sample, "shape", None) == () else sample for sample in samples]
        strange = [sample for sample in samples if type(sample) not in (int, str)]
        if strange:
            raise SettingsError(f"sample id {strange[0]!r}: must be an integer or a string")
    return samples


def _check_ids(samples: list[SampleId]) -> None:
    """Check that the ids can be written."""
    numbers = [sample for sample in samples if isinstance(sample, int)]
    if numbers and not -(2**63) <= min(numbers) <= max(numbers) < 2**63:
        raise SettingsError(f"sample ids from {min(numbers)} to {max(numbers)}: integers must fit 64 bits")
    try:
        "".join(sample for sample in samples if isinstance(sample, str)).encode()
    except UnicodeEncodeError as exc:
        raise SettingsError(f"a sample id is no text that can be written: {exc}") from exc
