"""Parts of shards: ranges of units, and those that wait to be given again."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

__all__ = ["Bounds", "ReturnedRanges", "ShardKey", "UnitRange", "cut_bounds", "join_bounds"]

ShardKey: TypeAlias = tuple[int, int]
"""An epoch and a shard of it."""
Bounds: TypeAlias = tuple[int, int]
"""The first unit, and the unit behind the last."""

_MOST_PASSES: Final = 20
"""How often a failed shard is kept from the holder that failed it while others are there: about ten seconds of turns
of a holder that finds nothing else. Without an end to it, a holder that lives and asks for nothing would stop all."""
_MOST_LOOKS: Final = 64
"""Failed shards that are looked at for one that this holder may have; more would let a turn's cost grow with them."""


class UnitRange(NamedTuple):
    """Units [start, stop) of a data set, all of a shard or a part of it.

    Attributes:
        epoch: from 0.
        shard: its number; the same units in every epoch.
        start: the first unit.
        stop: the unit behind the last.
    """

    epoch: int
    shard: int
    start: int
    stop: int


def join_bounds(parts: list[Bounds], start: int, stop: int) -> None:
    """Add a range to sorted ranges that do not touch, and keep them so."""
    kept: list[Bounds] = []
    for part in parts:
        if part[1] < start or part[0] > stop:
            kept.append(part)
        else:
            start, stop = min(start, part[0]), max(stop, part[1])
    kept.append((start, stop))
    parts[:] = sorted(kept)


def cut_bounds(parts: list[Bounds], start: int, stop: int) -> list[Bounds]:
    """Take what lies in [start, stop) out of sorted ranges, and return it."""
    found: list[Bounds] = []
    kept: list[Bounds] = []
    for part in parts:
        low, high = max(part[0], start), min(part[1], stop)
        if low >= high:
            kept.append(part)
            continue
        found.append((low, high))
        kept += [rest for rest in ((part[0], low), (high, part[1])) if rest[0] < rest[1]]
    parts[:] = kept
    return found


@dataclass
class _Returned:
    """A shard's ranges that wait, sorted; `late` if all others come first, `passed` as `_MOST_PASSES` says."""

    late: bool = False
    passed: int = 0
    parts: list[Bounds] = field(default_factory=list)


class ReturnedRanges:
    """Ranges that were given and came back: the oldest epoch's first, in it by number, and failed ones at the end.

    What it answers depends on what is in it, never on the order in which that came: a book that was restored from a
    snapshot goes on as the book that was not.
    """

    def __init__(self) -> None:
        self._shards: dict[ShardKey, _Returned] = {}
        # Beside `_shards`, which alone counts: a heap may name shards that are gone, or are in the other heap now.
        self._early: list[ShardKey] = []
        self._late: list[ShardKey] = []

    def __len__(self) -> int:
        """Return how many shards have ranges that wait."""
        return len(self._shards)

    def __contains__(self, key: object) -> bool:
        return key in self._shards

    def __iter__(self) -> Iterator[tuple[ShardKey, list[Bounds], bool, int]]:
        """Yield every shard with its ranges, whether it is late, and how often it was passed over; sorted."""
        for key in sorted(self._shards):
            entry = self._shards[key]
            yield key, entry.parts, entry.late, entry.passed

    def add(self, key: ShardKey, start: int, stop: int, *, late: bool = False, passed: int = 0) -> None:
        """Have a range wait.

        Args:
            key: its shard.
            start: its first unit.
            stop: the unit behind its last, which is larger.
            late: give it when nothing else is left, since it has failed.
            passed: how often it was kept from a holder.
        """
        entry = self._shards.setdefault(key, _Returned())
        entry.late = entry.late or late
        entry.passed = max(entry.passed, passed)
        join_bounds(entry.parts, start, stop)
        heapq.heappush(self._late if entry.late else self._early, key)

    def take(self, most: int, may_take: Callable[[ShardKey], bool]) -> list[UnitRange]:
        """Take out ranges that are not late.

        Args:
            most: how many at most.
            may_take: whether a shard may go to the holder that asks now; what it says yes to is taken.
        """
        taken: list[UnitRange] = []
        kept: set[ShardKey] = set()
        while self._early and len(taken) < most and len(kept) < _MOST_LOOKS:
            key = self._early[0]
            entry = self._shards.get(key)
            if entry is None or entry.late or key in kept:
                heapq.heappop(self._early)
            elif may_take(key):
                taken.append(self._pop(key, entry))
            else:
                heapq.heappop(self._early)
                kept.add(key)
        for key in kept:
            heapq.heappush(self._early, key)
        return taken

    def take_late(self, most: int, may_take: Callable[[ShardKey], bool]) -> list[UnitRange]:
        """Take out ranges that are late.

        Args:
            most: how many at most.
            may_take: as for `take`; a shard that was refused in some turns is taken nevertheless.
        """
        taken: list[UnitRange] = []
        kept: set[ShardKey] = set()
        while self._late and len(taken) < most and len(kept) < _MOST_LOOKS:
            key = self._late[0]
            entry = self._shards.get(key)
            if entry is None or not entry.late or key in kept:
                heapq.heappop(self._late)
            elif entry.passed >= _MOST_PASSES or may_take(key):
                taken.append(self._pop(key, entry))
            else:
                heapq.heappop(self._late)
                entry.passed += 1
                kept.add(key)
        for key in kept:
            heapq.heappush(self._late, key)
        return taken

    def cut(self, key: ShardKey, start: int, stop: int) -> list[Bounds]:
        """Take out what waits of [start, stop) of a shard, and return it."""
        entry = self._shards.get(key)
        if entry is None:
            return []
        found = cut_bounds(entry.parts, start, stop)
        if not entry.parts:
            del self._shards[key]
        return found

    def _pop(self, key: ShardKey, entry: _Returned) -> UnitRange:
        start, stop = entry.parts.pop(0)
        if not entry.parts:
            del self._shards[key]
        return UnitRange(*key, start, stop)
