"""Tells whether an array still has the bytes that it had, at a small part of the cost of a copy.

Small arrays are copied. Of larger arrays a `Checksum` has the sums of 509 columns, into which all of the array goes,
and words from random places. Above 64 KiB it has the words alone where there is no time for more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from edl.protocol.tensors import Array

__all__ = ["SMALL_NBYTES", "Checksum", "TimeBudget"]

SMALL_NBYTES = 32 << 10
"""So much is copied in a microsecond or two, less than any sum would take."""
_COLUMNS = 509  # prime, so that rows which change places change columns too; enough for SIMD, and fits the L1 cache
_WHOLE_NBYTES = 64 << 10  # summed up in the time that some words at random take, which are not in any cache
_WORDS_SHARE, _LEAST_WORDS, _MOST_WORDS = 512, 64, 384
"""One word of so many, within limits: each is a miss of all caches. 1,024 of them cost a tenth of the rate at which
requests of 4.8 MB go through shared memory; 384 are still twelve in each of 32 images."""
_MOST_SIZES = 64  # as many as padded texts may have; beyond, places are drawn more often
_GRACE_S = 0.02
"""So long the first arrays of an epoch are looked at whole: some fifty of 4.8 MB, and a source that fills a buffer
again does so from its second item on."""

_WORDS_AT_ONCE = 500
"""Words, for which numpy keeps the GIL. To get it back behind other threads takes ten times as long as to read them."""
_ARRAYS_PER_DRAW = 16
"""So many arrays are looked at in the same places, which take as long to draw as to look at."""

_random = np.random.default_rng()  # another seed in each process, so that no data can be as the places want it


class TimeBudget:
    """Tells whether there is time to look at whole arrays, and where to look if not.

    The time is a share of all that has passed since this was made. `positions` is for a single thread at a time.

    Args:
        share: of the time, from 0 to 1.
        always: look at whole arrays, however long it takes.
    """

    def __init__(self, share: float, *, always: bool = False) -> None:
        self.always = always
        self._share = share
        self._left_s = _GRACE_S
        self._left_at = time.perf_counter()
        self._positions: dict[int, tuple[int, Array]] = {}  # by number of words; for how many arrays more

    @property
    def available(self) -> bool:
        """Whether there is time left. What an epoch that waits does not use is not saved up for when it goes on."""
        now = time.perf_counter()
        self._left_s = min(_GRACE_S, self._left_s + self._share * (now - self._left_at))
        self._left_at = now
        return self.always or self._left_s > 0.0

    def spend(self, seconds: float) -> None:
        """Count seconds that were spent."""
        self._left_s -= seconds

    def positions(self, words: int) -> Array:
        """Return where to look at an array of so many words: a random position in each of as many equal pieces."""
        left, positions = self._positions.get(words, (0, None))
        if not left or positions is None:
            left, positions = _ARRAYS_PER_DRAW, _draw_positions(words)
            if len(self._positions) >= _MOST_SIZES:
                self._positions.clear()
        self._positions[words] = left - 1, positions
        return positions


@dataclass(frozen=True, eq=False)
class Checksum:
    """What an array was like.

    Attributes:
        nbytes: in all.
        content: all bytes of a small array, the last few of a larger array.
        positions: of the words that were looked at, random, at least one in every of as many equal pieces.
        words: 8 bytes from each of these positions.
        columns: sums of words, modulo 2**64; empty where only some words were looked at.
    """

    nbytes: int
    content: bytes
    positions: Array | None = None
    words: bytes = b""
    columns: bytes = b""

    @classmethod
    def of(cls, array: Array, time_budget: TimeBudget) -> Checksum:
        """Return the checksum of an array of numbers."""
        data = _memory(array)
        if data.nbytes <= SMALL_NBYTES:
            return cls(data.nbytes, data.tobytes())
        words = _words(data)
        positions = time_budget.positions(len(words))
        columns = b""
        if data.nbytes <= _WHOLE_NBYTES:
            columns = _columns(words)
        elif time_budget.available:
            begin = time.perf_counter()
            columns = _columns(words)
            time_budget.spend(time.perf_counter() - begin)
        return cls(data.nbytes, _rest(data), positions, _words_at(words, positions), columns)

    def matches(self, array: Array, time_budget: TimeBudget) -> bool:
        """Return whether an array has the same bytes, as far as they were looked at."""
        data = _memory(array)
        if data.nbytes != self.nbytes:
            return False
        if self.positions is None:
            return data.tobytes() == self.content
        words = _words(data)
        if _words_at(words, self.positions) != self.words or _rest(data) != self.content:
            return False
        if not self.columns:
            return True
        begin = time.perf_counter()
        same = _columns(words) == self.columns
        if self.nbytes > _WHOLE_NBYTES:
            time_budget.spend(time.perf_counter() - begin)
        return same


def _draw_positions(words: int) -> Array:
    count = min(max(words // _WORDS_SHARE, _LEAST_WORDS), _MOST_WORDS)
    piece = words // count
    positions: Array = np.arange(0, count * piece, piece) + _random.integers(0, piece, count)
    return positions


def _memory(array: Array) -> Array:
    """Return the array's bytes, without repeats; a view where they lie without gaps in memory, in any order of axes."""
    array = np.asarray(array)  # a matrix stays two-dimensional whatever is done, and a masked array keeps its mask
    if not array.flags.c_contiguous:
        array = array[tuple([slice(1) if stride == 0 else slice(None) for stride in array.strides])]
        array = array[tuple([slice(None, None, -1 if stride < 0 else 1) for stride in array.strides])]
        array = np.ascontiguousarray(array.transpose(np.argsort([-stride for stride in array.strides], kind="stable")))
    return array.reshape(-1).view(np.uint8)


def _words(data: Array) -> Array:
    found: Array = data[: len(data) & ~7].view(np.uint64)
    return found


def _words_at(words: Array, positions: Array) -> bytes:
    pieces = range(0, len(positions), _WORDS_AT_ONCE)
    return b"".join([words[positions[at : at + _WORDS_AT_ONCE]].tobytes() for at in pieces])


def _rest(data: Array) -> bytes:
    """Return the bytes behind the last whole row of columns and the last word."""
    return data[len(data) // (8 * _COLUMNS) * (8 * _COLUMNS) :].tobytes()


def _columns(words: Array) -> bytes:
    rows = len(words) // _COLUMNS
    sums: Array = np.add.reduce(words[: rows * _COLUMNS].reshape(rows, _COLUMNS), axis=0)
    return sums.tobytes()
