"""Cuts a text into segments while it streams by: their lengths and checksums, and no more of the text."""

from __future__ import annotations

import zlib
from array import array

import numpy as np

from edl.master.datasets.index import Numbers

__all__ = ["ShardCutter"]


class ShardCutter:
    """Units, lengths in bytes and CRC-32 of segments. A segment is a shard, or a part of it where a text grows slowly.

    Segments follow one another without a gap: the lengths say where they begin.

    Args:
        shard_size: units of a shard.
        units: that were there before.

    Attributes:
        units: units so far.
    """

    def __init__(self, shard_size: int, units: int = 0) -> None:
        self.units = units
        self._cut_units = units
        self._shard_size = shard_size
        self._length = 0
        self._crc = 0
        self._columns = _empty_columns()

    def feed(self, data: bytes, ends: Numbers) -> None:
        """Go on by some bytes.

        Args:
            data: the next bytes.
            ends: where units end in `data`, rising; an end of 0 is that of a unit whose bytes came before.
        """
        view = memoryview(data)
        begin = 0
        missing = self._shard_size - self.units % self._shard_size
        for number, end in enumerate(ends[missing - 1 :: self._shard_size].tolist()):
            self._add(view[begin:end])
            self._cut(self.units + missing + number * self._shard_size)
            begin = end
        self._add(view[begin:])
        self.units += len(ends)

    def pop_segments(self, *, rest: bool) -> dict[str, Numbers]:
        """Return the segments so far, and forget them.

        Args:
            rest: what fills no shard is a segment as well, if there is a unit in it.

        Returns:
            `counts` of units, `lengths` and `crcs`, as columns of an index.
        """
        if rest and self.units > self._cut_units:
            self._cut(self.units)
        found = {name: np.array(numbers, np.int64) for name, numbers in self._columns.items()}
        self._columns = _empty_columns()
        return found

    @property
    def segments(self) -> int:
        """How many segments there are that were not taken yet."""
        return len(self._columns["counts"])

    def _add(self, data: memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)

    def _cut(self, units: int) -> None:
        for name, number in (("counts", units - self._cut_units), ("lengths", self._length), ("crcs", self._crc)):
            self._columns[name].append(number)
        self._cut_units = units
        self._length = 0
        self._crc = 0


def _empty_columns() -> dict[str, array[int]]:
    """Return columns of 8 bytes a number: a list would take five times as much, of millions of shards."""
    return {name: array("q") for name in ("counts", "lengths", "crcs")}
