"""The plan of a batch of sequences: which are computed together, padded to a common length. Plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edl_serving.backends.backend import Array

_MAX_PADDING = 0.25
"""Padding of a bucket by its tokens: with more, sequences of 16 tokens are computed as if they had 512; with much less,
each length is a call of its own."""
_FREE_PADDING = 64
"""Tokens of padding that are cheaper than another call of the model."""


@dataclass(frozen=True)
class Bucket:
    """Sequences that are computed together.

    Attributes:
        rows: The row of each place, `[sequences, length]`; of a place that is padding, any row.
        valid: Which places are not padding, `[sequences, length]`.
    """

    rows: Array
    valid: Array

    @property
    def padded(self) -> bool:
        """Whether any place is padding."""
        return not bool(self.valid.all())

    @property
    def flat_rows(self) -> Array:
        """The rows of the places that are not padding, in the order of the places."""
        rows: Array = self.rows[self.valid]
        return rows


def sequence_starts(position: Array) -> Array:
    """Return the rows in which sequences begin, INT64 `[sequences]`."""
    starts: Array = np.flatnonzero(position == 0)
    return starts


def make_buckets(
    starts: Array, rows: int, max_tokens: int, *, padding: bool = True, borders: Sequence[int] = ()
) -> list[Bucket]:
    """Plan the computation of a batch: sequences of similar length together, or of equal ones without `padding`.

    A bucket has at most `max_tokens` places, padding included; a longer sequence is a bucket by itself. Sequences up to
    a length in `borders` and longer ones are in different buckets.
    """
    lengths = np.diff(starts, append=rows)
    sides = np.searchsorted(borders, lengths)
    order = np.argsort(-lengths, kind="stable")
    buckets: list[Bucket] = []
    at = 0
    while at < len(order):
        longest = int(lengths[order[at]])
        end, tokens = at + 1, longest
        while end < len(order) and sides[order[end]] == sides[order[at]] and (end + 1 - at) * longest <= max_tokens:
            tokens += int(lengths[order[end]])
            added = (end + 1 - at) * longest - tokens
            if added > (max(_FREE_PADDING, _MAX_PADDING * tokens) if padding else 0):
                break
            end += 1
        chosen = np.sort(order[at:end])
        places = np.arange(longest)
        valid = places < lengths[chosen, None]
        buckets.append(Bucket(np.minimum(starts[chosen, None] + places, rows - 1), valid))
        at = end
    return buckets


def make_packs(starts: Array, rows: int, borders: Sequence[int] = ()) -> list[Bucket]:
    """Plan the computation of a batch whose sequences stand one behind the other: buckets of one line, in order."""
    lengths = np.diff(starts, append=rows)
    sides = np.repeat(np.searchsorted(borders, lengths), lengths)
    packs = [np.flatnonzero(sides == side)[None] for side in range(len(borders) + 1)]
    return [Bucket(pack, np.ones(pack.shape, bool)) for pack in packs if pack.size]
