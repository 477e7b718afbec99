"""Keeps rows in memory, and decides which of them stay when it is full. Not thread-safe: the cache's lock guards it.

The least recently used row goes first, but a training loop is the worst case of that rule: an epoch uses every row
once, so that with less memory than rows every row is gone just before it is wanted again. Therefore new rows are let
into a full memory rarely: the rows that are there stay and are found again, and yet a working set that changes is
followed. (Qureshi et al., "Adaptive Insertion Policies for High Performance Caching", ISCA 2007: bimodal insertion.)
Rows of a namespace that is no longer used, such as those of an older teacher, make room at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["MemoryTier", "NamespaceRows", "SampleId"]

SampleId: TypeAlias = int | str

ROW_OVERHEAD = 256
"""Bytes that a row takes besides its record: the objects around it and its place in the dictionary."""

ADMIT_ONE_IN = 32
"""How rarely a row is let into a full memory; the paper's 1/32. With 1 the oldest row would go each time."""
IDLE_AFTER_CALLS = 1024
"""Calls after which a namespace's rows make room: several epochs of other keys, so that an ensemble's are kept."""


@dataclass(eq=False)
class NamespaceRows:
    """Records of a namespace, the least recently used first."""

    records: OrderedDict[SampleId, bytes] = field(default_factory=OrderedDict)
    nbytes: int = 0
    used_at: int = 0


class MemoryTier:
    """Records of all namespaces.

    Args:
        limit_bytes: of all records together, bookkeeping included.

    Attributes:
        limit_bytes: as given.
        nbytes: of the records now.
        evicted: rows that made room for others.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.evicted = 0
        self._calls = 0
        self._turned_away = 0
        self._all: list[NamespaceRows] = []

    def rows(self) -> NamespaceRows:
        """Return room for a new namespace."""
        rows = NamespaceRows(used_at=self._calls)
        self._all.append(rows)
        return rows

    def __len__(self) -> int:
        return sum(len(rows.records) for rows in self._all)

    def get(self, rows: NamespaceRows, ids: Sequence[SampleId]) -> list[bytes | None]:
        """Return the records of `ids`, None where there is none; rows found become the most recently used."""
        self._use(rows)
        records = rows.records
        found = list(map(records.get, ids))
        if None in found:
            for sample, record in zip(ids, found, strict=True):
                if record is not None:
                    records.move_to_end(sample)
        else:
            for sample in ids:
                records.move_to_end(sample)
        return found

    def put(self, rows: NamespaceRows, ids: Iterable[SampleId], records: Iterable[bytes]) -> None:
        """Keep what there is room for, and what takes the place of an older record of the same id."""
        self._use(rows)
        for sample, record in zip(ids, records, strict=True):
            self._put_one(rows, sample, record)

    def discard(self, rows: NamespaceRows, sample: SampleId) -> None:
        """Forget a row if it is there."""
        record = rows.records.pop(sample, None)
        if record is not None:
            size = _size(sample, record)
            rows.nbytes -= size
            self.nbytes -= size

    def clear(self) -> None:
        """Forget all rows."""
        for rows in self._all:
            rows.records.clear()
            rows.nbytes = 0
        self.nbytes = 0

    def _use(self, rows: NamespaceRows) -> None:
        self._calls += 1
        rows.used_at = self._calls

    def _put_one(self, rows: NamespaceRows, sample: SampleId, record: bytes) -> None:
        known = sample in rows.records
        self.discard(rows, sample)
        size = _size(sample, record)
        if not self._make_room(rows, size, sure=known):
            return
        rows.records[sample] = record
        rows.nbytes += size
        self.nbytes += size

    def _make_room(self, rows: NamespaceRows, size: int, *, sure: bool) -> bool:
        if self.nbytes + size <= self.limit_bytes:
            return True
        if size > self.limit_bytes:
            return False
        idle = [other for other in self._all if other.records and self._calls - other.used_at > IDLE_AFTER_CALLS]
        while self.nbytes + size > self.limit_bytes and idle:
            self._evict_from(idle[0])
            idle = [other for other in idle if other.records]
        if self.nbytes + size <= self.limit_bytes:
            return True
        self._turned_away += not sure
        if not sure and self._turned_away % ADMIT_ONE_IN:
            return False
        while self.nbytes + size > self.limit_bytes:
            self._evict_from(rows if rows.records else max(self._all, key=lambda other: other.nbytes))
        return True

    def _evict_from(self, rows: NamespaceRows) -> None:
        self.discard(rows, next(iter(rows.records)))
        self.evicted += 1


def _size(sample: SampleId, record: bytes) -> int:
    return len(record) + ROW_OVERHEAD + (len(sample) if isinstance(sample, str) else 0)
