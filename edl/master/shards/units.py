"""Which units are given next: ranges that came back, and the rest of an epoch's order or of a source that grows."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from edl.permutation import Permutation
from edl.protocol import master

__all__ = [
    "Bounds",
    "ReturnedRanges",
    "ShardKey",
    "ShardOrder",
    "StreamCursor",
    "UnitCursor",
    "UnitRange",
    "make_cursor",
]

ShardKey: TypeAlias = tuple[int, int]
"""An epoch and a shard of it."""
Bounds: TypeAlias = tuple[int, int]
"""The first unit, and the unit after the last."""

_MOST_PASSES: Final = 20
"""How often a failed shard is kept from the holder that failed it while others are there: about ten seconds of turns of
a holder that finds nothing else. Without a limit, a live holder that asks for nothing would stop everything."""
_MOST_LOOKS: Final = 64
"""Failed shards that are looked at for one that this holder may have; more would let a turn's cost grow with them."""
_CHUNK: Final = 1024
"""Positions that are computed together: numpy's cost of a call is spread over them, and the first waits 0.2 ms."""


class UnitRange(NamedTuple):
    """Units [start, stop) of a data set: all of a shard, or a part of it."""

    epoch: int
    shard: int
    start: int
    stop: int


# --- What came back. ---


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

    Its answers depend on its contents, never on the order in which they came: a book that was restored from a snapshot
    behaves like the original.
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
        """Have a range wait; a `late` one until nothing else is left, since it has failed."""
        entry = self._shards.setdefault(key, _Returned())
        entry.late = entry.late or late
        entry.passed = max(entry.passed, passed)
        join_bounds(entry.parts, start, stop)
        heapq.heappush(self._late if entry.late else self._early, key)

    def take(self, most: int, may_take: Callable[[ShardKey], bool], *, late: bool = False) -> list[UnitRange]:
        """Take out ranges of either kind.

        A shard to which `may_take` says yes is taken. A late one is taken all the same after too many noes.
        """
        heap = self._late if late else self._early
        taken: list[UnitRange] = []
        kept: set[ShardKey] = set()
        while heap and len(taken) < most and len(kept) < _MOST_LOOKS:
            key = heap[0]
            entry = self._shards.get(key)
            if entry is None or entry.late is not late or key in kept:
                heapq.heappop(heap)
            elif entry.passed >= _MOST_PASSES or may_take(key):
                taken.append(self._pop(key, entry))
            else:
                heapq.heappop(heap)
                entry.passed += late
                kept.add(key)
        for key in kept:
            heapq.heappush(heap, key)
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


# --- What was never given. ---


class ShardOrder:
    """The shard at each position of an epoch; each epoch has another order. `seed` is 0 to 2**64 - 1."""

    def __init__(self, count: int, seed: int, epoch: int, shuffle: bool) -> None:
        self.count = count
        self._order = Permutation(count, b"%d/%d" % (seed, epoch)) if shuffle else None
        self._chunk = -1
        self._shards: list[int] = []

    def shards(self, position: int, most: int) -> list[int]:
        """Return up to `most` shards from `position` on; there may be fewer, but not none before the end."""
        if self._order is None:
            return list(range(position, min(position + most, self.count)))
        chunk, offset = divmod(position, _CHUNK)
        if chunk != self._chunk:
            self._shards = self._order.values(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.count))
            self._chunk = chunk
        return self._shards[offset : offset + most]


class EpochCursor:
    """A position in the order of an epoch, in shards, of a data set of a known size. All before it was given."""

    def __init__(self, units: int, spec: master.DatasetSpec, epoch: int, position: int) -> None:
        self.units = units
        self.epoch = epoch
        self.position = position
        self._size = spec.shard_size
        self._seed = spec.seed
        self._shuffle = spec.shuffle
        self._epochs = spec.epochs
        self._count = -(-units // spec.shard_size)
        self._order = self._make_order()

    def _make_order(self) -> ShardOrder:
        return ShardOrder(self._count, self._seed, self.epoch, self._shuffle)

    def take(self, most: int) -> list[UnitRange]:
        """Advance by up to `most` shards of this epoch; return them, or none if there is none now."""
        taken: list[UnitRange] = []
        epoch, size, units = self.epoch, self._size, self.units
        while (missing := most - len(taken)) > 0 and self.position < self._count:
            shards = self._order.shards(self.position, missing)
            self.position += len(shards)
            taken += [UnitRange(epoch, shard, shard * size, min(shard * size + size, units)) for shard in shards]
        return taken

    def begin_epoch(self) -> bool:
        """Begin the next epoch if all of this one was given and there is a next one; return whether it was begun."""
        if self.position < self._count or self.at_end:
            return False
        self.epoch += 1
        self.position = 0
        self._order = self._make_order()
        return True

    @property
    def at_end(self) -> bool:
        """Whether nothing will follow. An empty data set has one epoch."""
        last = not self._count or 0 < self._epochs <= self.epoch + 1
        return last and self.position >= self._count

    @property
    def is_possible(self) -> bool:
        """Whether the position can have been reached; it may come from a file."""
        return 0 <= self.position <= self._count and 0 <= self.epoch < (self._epochs or self.epoch + 1)

    @property
    def shards_given(self) -> int:
        """How many shards of this epoch were given, or begun."""
        return self.position

    @property
    def shards_left(self) -> int:
        """How many shards of this epoch could be given now, of which nothing was given yet."""
        return self._count - self.position


class StreamCursor:
    """A position in a source that grows, in units. Its shards are in order, and whole until it ends or is flushed.

    Has what `EpochCursor` has, and `begun_shard`.
    """

    def __init__(self, units: int, shard_size: int, position: int, flushed: int, ended: bool) -> None:
        self.epoch = 0
        self.units = units
        self.position = position
        self.flushed = flushed
        self.ended = ended
        self._size = shard_size

    def take(self, most: int) -> list[UnitRange]:
        """Advance by up to `most` shards, or parts of them after a flush."""
        taken: list[UnitRange] = []
        limit = self._limit()
        while len(taken) < most and self.position < limit:
            shard = self.position // self._size
            stop = min((shard + 1) * self._size, limit)
            taken.append(UnitRange(0, shard, self.position, stop))
            self.position = stop
        return taken

    def begin_epoch(self) -> bool:
        """Return False: such a source has one epoch."""
        return False

    @property
    def at_end(self) -> bool:
        """Whether the source has ended, and all of it was given."""
        return self.ended and self.position >= self.units

    @property
    def is_possible(self) -> bool:
        """Whether the position is within the source."""
        return 0 <= self.position <= self.units and self.epoch == 0

    @property
    def shards_given(self) -> int:
        """How many shards were given, or begun."""
        return -(-self.position // self._size)

    @property
    def shards_left(self) -> int:
        """How many shards could be given now, of which nothing was given yet."""
        return max(0, -(-self._limit() // self._size) - self.shards_given)

    @property
    def begun_shard(self) -> int | None:
        """The shard that a flush has cut, if it has grown since."""
        cut = self.position % self._size and self.position < self._limit()
        return self.position // self._size if cut else None

    def _limit(self) -> int:
        return self.units if self.ended else max(self.flushed, self.units // self._size * self._size)


UnitCursor: TypeAlias = EpochCursor | StreamCursor


def make_cursor(
    spec: master.DatasetSpec, units: int, ended: bool, flushed: int, epoch: int, position: int
) -> UnitCursor:
    """Return the cursor that a specification calls for, at a position."""
    if spec.HasField("units"):
        return EpochCursor(units, spec, epoch, position)
    return StreamCursor(units, spec.shard_size, position, flushed, ended)
