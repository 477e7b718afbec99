"""Seeded shuffling: the order in which shards are handed out, and in which a reader reads the units of a shard.

An order is a permutation, which is computed for the requested positions and never stored. The permutation is a Feistel
network over the smallest power of two that is at least the count, with cycle walking for values beyond the count (J.
Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Its round function is the finalizer of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). This function uses 64-bit integer arithmetic, so the order is the same
on every machine and in every version; the generators of NumPy and Python do not guarantee this.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy
from numpy.typing import NDArray

_ROUNDS: Final = 8
"""Rounds of the network, half of them for each side. With fewer rounds, neighbours remain recognizable in small
domains."""
_SHIFTS: Final = (numpy.uint64(30), numpy.uint64(27), numpy.uint64(31))  # SplitMix64's
_FACTORS: Final = (numpy.uint64(0xBF58476D1CE4E5B9), numpy.uint64(0x94D049BB133111EB))  # SplitMix64's


class Permutation:
    """A permutation of `range(count)`, selected by a key such as b"SEED/EPOCH"; `count` is at most 2**62."""

    def __init__(self, count: int, key: bytes) -> None:
        digest = hashlib.blake2b(key, digest_size=8 * _ROUNDS, person=b"edl.shards").digest()
        self._count = count
        self._keys = [numpy.uint64(number) for number in numpy.frombuffer(digest, "<u8")]
        bits = max(count - 1, 1).bit_length()
        self._low_bits = numpy.uint64(bits // 2)
        self._low = numpy.uint64((1 << bits // 2) - 1)
        self._high = numpy.uint64((1 << bits - bits // 2) - 1)

    def values(self, start: int, stop: int) -> list[int]:
        """Return the numbers at the positions from `start` up to, but not including, `stop`."""
        values = self._encipher(numpy.arange(start, stop, dtype=numpy.uint64))
        while len(beyond := numpy.flatnonzero(values >= self._count)):
            values[beyond] = self._encipher(values[beyond])
        found: list[int] = values.tolist()
        return found

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
