"""What of a data set was never given: the rest of an epoch's order, or of a source that grows."""

from __future__ import annotations

import abc

from edl.master.shards.order import ShardOrder
from edl.master.shards.ranges import UnitRange
from edl.protocol import master

__all__ = ["EpochCursor", "StreamCursor", "UnitCursor", "make_cursor"]


class UnitCursor(abc.ABC):
    """A position, before which everything was given at least once.

    Attributes:
        epoch: the epoch that is given now.
        position: in it; of shards or of units, as the class says.
        units: in an epoch, or until now.
    """

    epoch: int
    position: int
    units: int

    @abc.abstractmethod
    def take(self, most: int) -> list[UnitRange]:
        """Go on by `most` ranges at most, within the epoch; empty if there is none just now."""

    @abc.abstractmethod
    def begin_epoch(self) -> bool:
        """Begin the next epoch, if this one was given as a whole and there is a next one; whether it was begun."""

    @property
    @abc.abstractmethod
    def at_end(self) -> bool:
        """Whether nothing will follow."""

    @property
    @abc.abstractmethod
    def is_possible(self) -> bool:
        """Whether the position can have been reached; it may come from a file."""

    @property
    @abc.abstractmethod
    def shards_given(self) -> int:
        """How many shards of this epoch were given, or begun."""

    @property
    @abc.abstractmethod
    def shards_left(self) -> int:
        """How many shards of this epoch could be given now, of which nothing was given yet."""

    @property
    def begun_shard(self) -> int | None:
        """The shard of which a part was given and another could be given now; None if there is none."""
        return None


class EpochCursor(UnitCursor):
    """A position in the order of an epoch of a data set of a known size."""

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
        """Go on by `most` shards at most."""
        taken: list[UnitRange] = []
        epoch, size, units = self.epoch, self._size, self.units
        while (missing := most - len(taken)) > 0 and self.position < self._count:
            shards = self._order.shards(self.position, missing)
            self.position += len(shards)
            taken += [UnitRange(epoch, shard, shard * size, min(shard * size + size, units)) for shard in shards]
        return taken

    def begin_epoch(self) -> bool:
        """Begin the next epoch, if there is any and this one was given."""
        if self.position < self._count or self.at_end:
            return False
        self.epoch += 1
        self.position = 0
        self._order = self._make_order()
        return True

    @property
    def at_end(self) -> bool:
        """Whether the last epoch was given; an empty data set has no other."""
        last = not self._count or 0 < self._epochs <= self.epoch + 1
        return last and self.position >= self._count

    @property
    def is_possible(self) -> bool:
        """Whether there is such an epoch, with such a position."""
        return 0 <= self.position <= self._count and 0 <= self.epoch < (self._epochs or self.epoch + 1)

    @property
    def shards_given(self) -> int:
        """Shards of this epoch that were given."""
        return self.position

    @property
    def shards_left(self) -> int:
        """Shards of this epoch that were not."""
        return self._count - self.position


class StreamCursor(UnitCursor):
    """A position in a source that grows, in units; its shards are in order, and whole until it ends or is flushed."""

    def __init__(self, units: int, shard_size: int, position: int, flushed: int, ended: bool) -> None:
        self.epoch = 0
        self.units = units
        self.position = position
        self.flushed = flushed
        self.ended = ended
        self._size = shard_size

    def take(self, most: int) -> list[UnitRange]:
        """Go on by `most` shards, or parts of them after a flush."""
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
        """Whether it has ended, and all was given."""
        return self.ended and self.position >= self.units

    @property
    def is_possible(self) -> bool:
        """Whether there are so many units."""
        return 0 <= self.position <= self.units and self.epoch == 0

    @property
    def shards_given(self) -> int:
        """Shards of which anything was given."""
        return -(-self.position // self._size)

    @property
    def shards_left(self) -> int:
        """Shards that can be given now, of which nothing was given."""
        return max(0, -(-self._limit() // self._size) - self.shards_given)

    @property
    def begun_shard(self) -> int | None:
        """The shard that a flush has cut, where it has grown since."""
        cut = self.position % self._size and self.position < self._limit()
        return self.position // self._size if cut else None

    def _limit(self) -> int:
        return self.units if self.ended else max(self.flushed, self.units // self._size * self._size)


def make_cursor(
    spec: master.DatasetSpec, units: int, ended: bool, flushed: int, epoch: int, position: int
) -> UnitCursor:
    """Return the cursor that a specification calls for, at a position."""
    if spec.HasField("units"):
        return EpochCursor(units, spec, epoch, position)
    return StreamCursor(units, spec.shard_size, position, flushed, ended)
