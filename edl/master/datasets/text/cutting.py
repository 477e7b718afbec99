"""Cuts a text into shards while it streams by: lengths and checksums of shards, and no more of the text."""

from __future__ import annotations

import zlib

import numpy as np

from edl.master.datasets.index import Numbers

__all__ = ["ShardCutter"]


class ShardCutter:
    """Lengths in bytes and CRC-32 of shards of `shard_size` units each.

    Shards follow one another without a gap: the lengths say where shards begin.

    Args:
        shard_size: units of a shard.

    Attributes:
        units: units so far.
    """

    def __init__(self, shard_size: int) -> None:
        self.units = 0
        self._shard_size = shard_size
        self._length = 0
        self._crc = 0
        self._lengths: list[int] = []
        self._crcs: list[int] = []

    def feed(self, data: bytes, ends: Numbers) -> None:
        """Go on by some bytes.

        Args:
            data: the next bytes.
            ends: where units end in `data`, rising; an end of 0 is that of a unit whose bytes came before.
        """
        view = memoryview(data)
        begin = 0
        missing = self._shard_size - self.units % self._shard_size
        for end in ends[missing - 1 :: self._shard_size].tolist():
            self._add(view[begin:end])
            self._cut()
            begin = end
        self._add(view[begin:])
        self.units += len(ends)

    def pop_shards(self, *, rest: bool) -> tuple[Numbers, Numbers]:
        """Return lengths and checksums of the shards that are complete, and forget them.

        Args:
            rest: the data have ended: what remains is the last shard, if there is a unit in it.
        """
        if rest and self.units % self._shard_size:
            self._cut()
        found = np.array(self._lengths, np.int64), np.array(self._crcs, np.int64)
        self._lengths = []
        self._crcs = []
        return found

    def _add(self, data: memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)

    def _cut(self) -> None:
        self._lengths.append(self._length)
        self._crcs.append(self._crc)
        self._length = 0
        self._crc = 0
