"""A data set's specification, and which units are next: returned units, and the rest of an epoch, in its order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from edl.errors import SettingsError
from edl.permutation import Permutation
from edl.protocol import master
from edl.quoting import quote, shown

ShardKey: TypeAlias = tuple[int, int]
"""An epoch, and a shard in that epoch."""
Bounds: TypeAlias = tuple[int, int]
"""The first unit, and the unit after the last."""

_MOST_NAME: Final = 200  # names become part of a store's keys, which have at most 512 characters
MOST_UNITS: Final = 2**62  # the sum of two such numbers still fits into 64 bits
_MOST_SHARDS: Final = 2**40  # per epoch: permutations of this size are tested
_MOST_SECONDS: Final = 30 * 86_400.0  # a month without a heartbeat is forever
_MOST_PASSES: Final = 20
"""While there are other holders, a failed shard is withheld up to this many times from the holder where it failed. This
takes about ten seconds of turns if the holder gets nothing else. Without a limit, a live holder that requests nothing
would stop everything."""
_MOST_LOOKS: Final = 64
"""Maximum number of failed shards that are searched for a shard that the holder may have. Without a limit, the cost of
a turn would grow with the number of failed shards."""
_CHUNK: Final = 1024  # positions computed together, to spread numpy's cost per call; the first waits 0.2 ms


# --- Specifications. ---


def check_name(what: str, name: str) -> None:
    """Raise SettingsError unless a name can be shown and stored; `what` says in the error what the name is for."""
    if not name or len(name) > _MOST_NAME or not name.isprintable():
        raise SettingsError(f"{what} {quote(name)}: must be 1 to {_MOST_NAME} printable characters")


def check_spec(name: str, spec: master.DatasetSpec) -> master.DatasetSpec:
    """Return a copy with defaults (3 failures, leases of 60 s, sessions of 30 s); SettingsError if it is invalid."""
    check_name("data set", name)
    checked = master.DatasetSpec()
    checked.CopyFrom(spec)
    checked.max_failures = spec.max_failures or 3
    checked.lease_s = spec.lease_s or 60.0
    checked.session_s = spec.session_s or 30.0
    bounded = spec.HasField("units")
    shards = spec.units // max(spec.shard_size, 1)
    problems = {
        f"kind {quote(spec.kind)}: must be 1 to {_MOST_NAME} printable characters": not spec.kind
        or len(spec.kind) > _MOST_NAME
        or not spec.kind.isprintable(),
        f"units={spec.units}: must be 0 to 2**62": not 0 <= spec.units <= MOST_UNITS,
        f"shard_size={spec.shard_size}: must be 1 to 2**62": not 1 <= spec.shard_size <= MOST_UNITS,
        f"{spec.units:,} units make {shards:,} shards of {spec.shard_size}; the maximum is {_MOST_SHARDS:,}": (
            shards >= _MOST_SHARDS
        ),
        f"epochs={spec.epochs}: must be 0 or more": spec.epochs < 0,
        f"max_failures={spec.max_failures}: must be 1 or more": spec.max_failures < 0,
        f"commit={spec.commit}: unknown": spec.commit not in (master.COMMIT_REPORT, master.COMMIT_CHECKPOINT),
        "an endless source can be neither shuffled nor read several times": not bounded
        and (spec.shuffle or spec.epochs > 1),
        f"flush_s={spec.flush_s}: needs an endless source, and 0 or more seconds": not (
            0 <= spec.flush_s < math.inf and (spec.flush_s == 0 or not bounded)
        ),
    }
    for name_s in ("lease_s", "session_s"):
        value = getattr(checked, name_s)
        problems[f"{name_s}={value}: must be 0.1 to {_MOST_SECONDS:.0f}"] = not 0.1 <= value <= _MOST_SECONDS
    for problem, found in problems.items():
        if found:
            raise SettingsError(f"data set {shown(name)}: {problem}")
    return checked


def is_same_spec(first: master.DatasetSpec, second: master.DatasetSpec) -> bool:
    """Return whether two specifications are equal, with their defaults filled in."""
    return first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def describe_difference(present: master.DatasetSpec, other: master.DatasetSpec) -> str:
    """Describe how two specifications differ, with the values of `present` first, but without the index."""
    if present.kind != other.kind or present.location != other.location:
        places = [shown(f"{spec.kind}:{spec.location}", 200) for spec in (present, other)]
        return f"location is {places[0]} and not {places[1]}"
    fields = [
        f"{field.name} is {getattr(present, field.name)!r} and not {getattr(other, field.name)!r}"
        for field in master.DatasetSpec.DESCRIPTOR.fields
        if field.name != "index"
        and (getattr(present, field.name), field.has_presence and present.HasField(field.name))
        != (getattr(other, field.name), field.has_presence and other.HasField(field.name))
    ]
    return ", ".join(fields) or "its files or their contents have changed since it was created"


# --- Returned units. ---


class UnitRange(NamedTuple):
    """Units [start, stop) of a data set: all of a shard, or a part of it."""

    epoch: int
    shard: int
    start: int
    stop: int


def join_bounds(parts: list[Bounds], start: int, stop: int) -> None:
    """Add a range to sorted ranges that do not touch; merge it with ranges that it touches, and keep them sorted."""
    kept: list[Bounds] = []
    for part in parts:
        if part[1] < start or part[0] > stop:
            kept.append(part)
        else:
            start, stop = min(start, part[0]), max(stop, part[1])
    kept.append((start, stop))
    parts[:] = sorted(kept)


@dataclass
class _Returned:
    """A shard's waiting ranges, sorted. If `late`, all other shards come first. `_MOST_PASSES` limits `passed`."""

    late: bool = False
    passed: int = 0
    parts: list[Bounds] = field(default_factory=list)


class ReturnedRanges:
    """Returned ranges: the oldest epoch first, by shard number within an epoch, and failed ranges at the end.

    Results depend on which ranges are present, never on the order in which they were added: a book restored from a
    snapshot behaves like the original.
    """

    def __init__(self) -> None:
        self._shards: dict[ShardKey, _Returned] = {}
        # Only `_shards` is authoritative: a heap may name shards that are gone, or now in the other heap.
        self._early: list[ShardKey] = []
        self._late: list[ShardKey] = []

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, key: object) -> bool:
        return key in self._shards

    def __iter__(self) -> Iterator[tuple[ShardKey, list[Bounds], bool, int]]:
        """Yield every shard, sorted, with its ranges, whether it is late, and how often it was passed over."""
        for key in sorted(self._shards):
            entry = self._shards[key]
            yield key, entry.parts, entry.late, entry.passed

    def add(self, key: ShardKey, start: int, stop: int, *, late: bool = False, passed: int = 0) -> None:
        """Add a range; a `late` range has failed, and waits until no other range is left."""
        entry = self._shards.setdefault(key, _Returned())
        entry.late = entry.late or late
        entry.passed = max(entry.passed, passed)
        join_bounds(entry.parts, start, stop)
        heapq.heappush(self._late if entry.late else self._early, key)

    def take(self, most: int, may_take: Callable[[ShardKey], bool], *, late: bool = False) -> list[UnitRange]:
        """Remove and return ranges that `may_take` allows, or has refused often, from shards that match `late`."""
        heap = self._late if late else self._early
        taken: list[UnitRange] = []
        kept: set[ShardKey] = set()
        while heap and len(taken) < most and len(kept) < _MOST_LOOKS:
            key = heap[0]
            entry = self._shards.get(key)
            if entry is None or entry.late is not late or key in kept:
                heapq.heappop(heap)
            elif entry.passed >= _MOST_PASSES or may_take(key):
                taken.append(UnitRange(*key, *entry.parts.pop(0)))
                if not entry.parts:
                    del self._shards[key]
            else:
                heapq.heappop(heap)
                entry.passed += late
                kept.add(key)
        for key in kept:
            heapq.heappush(heap, key)
        return taken

    def cut(self, key: ShardKey, start: int, stop: int) -> list[Bounds]:
        """Remove and return the waiting parts of [start, stop) of a shard."""
        entry = self._shards.get(key)
        if entry is None:
            return []
        found: list[Bounds] = []
        kept: list[Bounds] = []
        for part in entry.parts:
            low, high = max(part[0], start), min(part[1], stop)
            if low >= high:
                kept.append(part)
                continue
            found.append((low, high))
            kept += [rest for rest in ((part[0], low), (high, part[1])) if rest[0] < rest[1]]
        entry.parts = kept
        if not kept:
            del self._shards[key]
        return found


# --- Units not handed out yet. ---


class UnitCursor:
    """A position in an epoch's order; everything before it was handed out. Each shuffled epoch has its own order.

    The position counts shards, or units if the source grows. A growing source has one epoch, whose shards are in order.
    All of its units are handed out: its follower holds back units that fill no shard while more may follow soon.
    """

    def __init__(
        self,
        spec: master.DatasetSpec,
        units: int,
        *,
        ended: bool = False,
        epoch: int = 0,
        position: int = 0,
    ) -> None:
        self.is_stream = not spec.HasField("units")
        self.units = units
        self.ended = ended or not self.is_stream
        self.epoch = epoch
        self.position = position
        self._spec = spec
        self._size = spec.shard_size
        self._epochs = 1 if self.is_stream else spec.epochs
        self._begin_order()

    def _begin_order(self) -> None:
        spec, key = self._spec, b"%d/%d" % (self._spec.seed, self.epoch)
        self._order = Permutation(-(-self.units // self._size), key) if spec.shuffle else None
        self._chunk = -1
        self._chunk_shards: list[int] = []

    def _end(self) -> int:
        """Return the position at which nothing is left to hand out for now."""
        return self.units if self.is_stream else -(-self.units // self._size)

    def take(self, most: int) -> list[UnitRange]:
        """Advance by up to `most` shards of this epoch, or parts of shards if the source grows; return them."""
        taken: list[UnitRange] = []
        epoch, size, units, end = self.epoch, self._size, self.units, self._end()
        while (missing := most - len(taken)) > 0 and self.position < end:
            if self.is_stream:
                shard = self.position // size
                stop = min((shard + 1) * size, end)
                taken.append(UnitRange(epoch, shard, self.position, stop))
                self.position = stop
            else:
                shards = self._next_shards(missing, end)
                self.position += len(shards)
                taken += [UnitRange(epoch, shard, shard * size, min(shard * size + size, units)) for shard in shards]
        return taken

    def _next_shards(self, most: int, end: int) -> list[int]:
        """Return up to `most` shards from the position on: at least one if the position is before `end`."""
        if self._order is None:
            return list(range(self.position, min(self.position + most, end)))
        chunk, offset = divmod(self.position, _CHUNK)
        if chunk != self._chunk:
            self._chunk_shards = self._order.values(chunk * _CHUNK, min((chunk + 1) * _CHUNK, end))
            self._chunk = chunk
        return self._chunk_shards[offset : offset + most]

    def begin_epoch(self) -> bool:
        """Begin the next epoch, if there is one and this epoch is handed out; return whether it has begun."""
        if self.is_stream or self.position < self._end() or self.at_end:
            return False
        self.epoch += 1
        self.position = 0
        self._begin_order()
        return True

    @property
    def at_end(self) -> bool:
        """Whether nothing more will follow. An empty data set has one epoch."""
        is_last = not self.units or 0 < self._epochs <= self.epoch + 1
        return self.ended and is_last and self.position >= self._end()

    @property
    def is_possible(self) -> bool:
        """Whether this position can be reached; a position that was read from a file may be impossible."""
        return 0 <= self.position <= self._end() and 0 <= self.epoch < (self._epochs or self.epoch + 1)

    def shards(self) -> tuple[int, int, int | None]:
        """Return how many shards of this epoch were handed out or begun, how many could follow, and the begun shard.

        A shard of which a part was handed out counts as begun if it has grown since.
        """
        end = self._end()
        if not self.is_stream:
            return self.position, end - self.position, None
        begun = self.position // self._size if self.position % self._size and self.position < end else None
        given = -(-self.position // self._size)
        return given, max(0, -(-end // self._size) - given), begun
