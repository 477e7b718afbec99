"""`CacheView`: looks up and keeps the rows of a key, many at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from edl.distill.cache.folder import SegmentFolder
from edl.distill.cache.key import CacheKey
from edl.distill.cache.layout import Outputs, RowLayout, flatten
from edl.distill.cache.memory import MemoryTier, SampleId
from edl.distill.cache.namespace import Namespace, RowRange
from edl.distill.cache.segment import BadSegmentError, FileHandles
from edl.distill.cache.writer import SegmentWriter
from edl.distill.clamping import ClampWarnings
from edl.distill.compress import TopK, to_float16
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["CacheParts", "CacheView", "Found", "Ids", "as_ids"]

Ids: TypeAlias = Sequence[SampleId] | Array


@dataclass(frozen=True, eq=False)
class Found:
    """Rows that a look-up found.

    Attributes:
        mask: bool [rows], which of the ids are there.
        outputs: arrays [rows found, ...] or `TopK`, in the order of the ids; empty if none is there. Arrays may be
            read-only.
    """

    mask: Array
    outputs: dict[str, Array | TopK]

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
        have, layout = flatten(self.outputs, int(self.mask.sum()))
        new, other = flatten(rest, int((~self.mask).sum()))
        if layout.top_k != other.top_k or layout.shapes != other.shapes:
            remedy = "rows of several shapes cannot be kept: pad them alike, or leave the cache out"
            raise SettingsError(f"rows of the cache are {layout}, the others {other}; {remedy}")
        arrays = {}
        for column in layout.columns:
            array: Array = np.empty((len(self.mask), *column.shape), column.dtype)
            added = new[column.name]
            array[self.mask] = have[column.name]
            array[~self.mask] = to_float16(added) if column.dtype == np.float16 and added.dtype.kind == "f" else added
            arrays[column.name] = array
        return layout.restore(arrays)


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
    """The rows of a key. Made by `SoftLabelCache.view`. Thread-safe.

    Ids are integers of 64 bits or strings; 1 and "1" are two ids.

    Args:
        key: what the rows depend on.
        parts: of the cache.

    Attributes:
        key: what the rows depend on.
        hits: rows looked up that were there.
        misses: rows looked up that were not there.
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
        where = f"soft-label cache {folder.path if folder is not None else 'in memory'}, model {key.model!r}"
        self._clamped = ClampWarnings(where, "leave store_dtype='float16' out of SoftLabelCache, under another path")
        self.disk: Namespace | None = None
        if folder is not None:
            self.disk = Namespace(folder.path, key, parts.handles)
            self.disk.scan(force=True)

    def get(self, ids: Ids) -> Found:
        """Look rows up.

        Args:
            ids: [rows], a sequence or an integer array.

        Returns:
            Which rows are there, and their outputs.
        """
        self._check_open()
        samples = as_ids(ids)
        records = self._records(samples)
        mask = np.fromiter((record is not None for record in records), np.bool_, len(records))
        there = [record for record in records if record is not None]
        if not there:
            return Found(mask, {})
        layout = self.disk.layout if self.disk is not None else self._layout
        assert layout is not None
        return Found(mask, layout.restore(layout.unpack(b"".join(there), len(there))))

    def put(self, ids: Ids, outputs: Outputs) -> None:
        """Keep rows. Of several rows of the same id the last counts.

        May wait for the disk when labels come faster than it writes.

        Args:
            ids: [rows].
            outputs: arrays [rows, ...] of numbers, or `TopK`, by the names in the key.

        Raises:
            SettingsError: outputs that cannot be kept, or of other dtypes or shapes than outputs kept before.
        """
        self._check_open()
        samples = as_ids(ids)
        _check_ids(samples)
        if sorted(outputs) != sorted(self.key.outputs):
            raise SettingsError(f"outputs {sorted(outputs)}: the cache's key names {sorted(self.key.outputs)}")
        half = self._store_dtype == "float16"
        if half:
            for name, output in outputs.items():
                self._clamped.before(name, output.values if isinstance(output, TopK) else np.asarray(output))
        arrays, layout = flatten(outputs, len(samples), half=half)
        records = layout.pack(arrays)
        with self._lock:
            self._agree(layout)
            self._memory.put(self._rows, samples, records)
        if self._writer is not None and self.disk is not None:
            self._writer.put(self.disk, samples, records)

    def contains(self, ids: Ids) -> Array:
        """Return which ids there are rows for, bool [rows]; without reading them.

        Args:
            ids: [rows], a sequence or an integer array.
        """
        self._check_open()
        samples = as_ids(ids)
        with self._lock:
            known = self._rows.records
            disk = self._scanned() or ()
            return np.fromiter((sample in known or sample in disk for sample in samples), np.bool_, len(samples))

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
        elif self._layout is None:
            self._layout = layout
        elif self._layout != layout:
            raise SettingsError(
                f"soft labels do not fit the cache: rows are {layout}, before them {self._layout}: "
                "use another `dataset` tag"
            )

    # Looking up

    def _records(self, samples: list[SampleId]) -> list[bytes | None]:
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
            missing = records.count(None)
            self.hits += len(records) - missing
            self.misses += missing
        return records

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
