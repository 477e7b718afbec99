"""Keeps records in memory, and decides which of them stay when it is full. Not thread-safe: the cache's lock guards it.

The least recently used record goes first, but a training loop is the worst case of that rule: an epoch uses every row
once, so that with less memory than rows every row is gone just before it is wanted again. Therefore new rows are let
into a full memory rarely: the rows that are there stay and are found again, and yet a working set that changes is
followed. (Qureshi et al., "Adaptive Insertion Policies for High Performance Caching", ISCA 2007: bimodal insertion.)
Rows of a key that is no longer used, such as those of an older teacher, make room at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edl.distill.cache.key import SampleId

__all__ = ["MemoryTier", "RecordsInMemory"]

ROW_OVERHEAD = 256
"""Bytes that a row takes besides its record: the objects around it and its place in the dictionary."""
ADMIT_ONE_IN = 32
"""How rarely a row is let into a full memory; the paper's 1/32. With 1 the oldest row would go each time."""
IDLE_AFTER_CALLS = 1024
"""Calls after which a key's rows make room: several epochs of other keys, so that an ensemble's are kept."""


@dataclass(eq=False)
class RecordsInMemory:
    """Records of a key, the least recently used first."""

    records: OrderedDict[SampleId, bytes] = field(default_factory=OrderedDict)
    nbytes: int = 0
    used_at: int = 0


class MemoryTier:
    """Records of all keys, in `limit_bytes` together, bookkeeping included. Counts the rows `evicted` to make room."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = self.evicted = 0
        self._calls = self._turned_away = 0
        self._all: list[RecordsInMemory] = []

    def rows(self) -> RecordsInMemory:
        """Return room for another key."""
        rows = RecordsInMemory(used_at=self._calls)
        self._all.append(rows)
        return rows

    def __len__(self) -> int:
        return sum(len(rows.records) for rows in self._all)

    def get(self, rows: RecordsInMemory, ids: Sequence[SampleId]) -> list[bytes | None]:
        """Return the records of `ids`, None where there is none; rows found become the most recently used."""
        self._use(rows)
        found = list(map(rows.records.get, ids))
        for sample, record in zip(ids, found, strict=True):
            if record is not None:
                rows.records.move_to_end(sample)
        return found

    def put(self, rows: RecordsInMemory, ids: Iterable[SampleId], records: Iterable[bytes]) -> None:
        """Keep what there is room for, and what takes the place of an older record of the same id."""
        self._use(rows)
        for sample, record in zip(ids, records, strict=True):
            known = sample in rows.records
            if known:
                self._discard(rows, sample)
            size = _size(sample, record)
            if self._make_room(rows, size, sure=known):
                rows.records[sample] = record
                rows.nbytes += size
                self.nbytes += size

    def clear(self) -> None:
        """Forget all rows."""
        for rows in self._all:
            rows.records.clear()
            rows.nbytes = 0
        self.nbytes = 0

    def _use(self, rows: RecordsInMemory) -> None:
        self._calls += 1
        rows.used_at = self._calls

    def _discard(self, rows: RecordsInMemory, sample: SampleId) -> None:
        size = _size(sample, rows.records.pop(sample))
        rows.nbytes -= size
        self.nbytes -= size

    def _make_room(self, rows: RecordsInMemory, size: int, *, sure: bool) -> bool:
        """Evict until a record of this size fits; return whether it may stay."""
        if self.nbytes + size <= self.limit_bytes:
            return True
        if size > self.limit_bytes:
            return False
        idle = [other for other in self._all if self._calls - other.used_at > IDLE_AFTER_CALLS]
        self._evict(idle, size)
        if self.nbytes + size > self.limit_bytes:
            self._turned_away += not sure
            if not sure and self._turned_away % ADMIT_ONE_IN:
                return False
            self._evict([rows, *sorted(self._all, key=lambda other: -other.nbytes)], size)
        return True

    def _evict(self, victims: Iterable[RecordsInMemory], size: int) -> None:
        for rows in victims:
            while rows.records and self.nbytes + size > self.limit_bytes:
                self._discard(rows, next(iter(rows.records)))
                self.evicted += 1


def _size(sample: SampleId, record: bytes) -> int:
    return len(record) + ROW_OVERHEAD + (len(sample) if isinstance(sample, str) else 0)
