"""The order of an epoch's shards: a permutation that is computed where it is asked for, and never stored.

A Feistel network over the smallest power of two that holds the count, with cycle walking for what lies beyond it
(J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Its round function is the finalizer of
SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), its keys come
from BLAKE2b. All of it is arithmetic of 64-bit integers, so every machine and version has the same order; generators of
numpy or Python promise no such thing.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy
from numpy.typing import NDArray

__all__ = ["ShardOrder"]

_CHUNK: Final = 1024
"""Positions that are computed together: numpy's cost of a call is spread over them, and the first waits 0.2 ms."""
_ROUNDS: Final = 8
"""Of the network, half of them over either side: fewer leave neighbours recognizable in small domains."""
_SHIFTS: Final = (numpy.uint64(30), numpy.uint64(27), numpy.uint64(31))  # SplitMix64's
_FACTORS: Final = (numpy.uint64(0xBF58476D1CE4E5B9), numpy.uint64(0x94D049BB133111EB))  # SplitMix64's


class ShardOrder:
    """Shard at each position of an epoch.

    Args:
        count: of shards.
        seed: of the data set, 0 to 2**64 - 1.
        epoch: from 0; each has another order.
        shuffle: False for the shards as they are numbered.
    """

    def __init__(self, count: int, seed: int, epoch: int, shuffle: bool) -> None:
        self.count = count
        self._shuffle = shuffle
        digest = hashlib.blake2b(b"%d/%d" % (seed, epoch), digest_size=8 * _ROUNDS, person=b"edl.shards").digest()
        self._keys = [numpy.uint64(key) for key in numpy.frombuffer(digest, "<u8")]
        bits = max(count - 1, 1).bit_length()
        self._low_bits = numpy.uint64(bits // 2)
        self._low = numpy.uint64((1 << bits // 2) - 1)
        self._high = numpy.uint64((1 << bits - bits // 2) - 1)
        self._chunk = -1
        self._shards: list[int] = []

    def shards(self, position: int, most: int) -> list[int]:
        """Return the shards at `position` and behind it.

        Args:
            position: the first, 0 to `count`.
            most: how many, at least 1. There may be fewer, but not none, before the end.
        """
        if not self._shuffle:
            return list(range(position, min(position + most, self.count)))
        chunk, offset = divmod(position, _CHUNK)
        if chunk != self._chunk:
            positions = numpy.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, self.count), dtype=numpy.uint64)
            self._shards = self._permute(positions).tolist()
            self._chunk = chunk
        return self._shards[offset : offset + most]

    def _permute(self, values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        values = self._encipher(values)
        while len(beyond := numpy.flatnonzero(values >= self.count)):
            values[beyond] = self._encipher(values[beyond])
        return values

    def _encipher(self, values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        high, low = values >> self._low_bits, values & self._low
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_mix(high + key) & self._low)
            else:
                high = high ^ (_mix(low + key) & self._high)
        return (high << self._low_bits) | low


def _mix(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    return values ^ (values >> _SHIFTS[2])
