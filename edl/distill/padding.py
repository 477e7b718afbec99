"""Rows of sequences in batches that are padded to one length."""

from __future__ import annotations

import numpy as np

from edl.distill.compress import TopK
from edl.errors import SourceError
from edl.protocol.tensors import Array


def as_token_mask(mask: Array, what: str) -> Array:
    """Return which elements of a batch are tokens, bool [sequences, length].

    `mask`: 1 where a token is and 0 elsewhere, of any type.
    """
    if mask.ndim != 2:
        raise SourceError(f"{what}: its mask has shape {list(mask.shape)}, and must be [sequences, length]")
    other = mask[(mask != 0) & (mask != 1)]
    if other.size:  # the numbers of texts that are packed into a row, or what is added to attention's scores
        raise SourceError(
            f"{what}: its mask has {other.flat[0]} in it, and must be 1 where a token is and 0 elsewhere. Where rows "
            "hold several texts, which would be taken for one, name positions that begin at 0 with each of them as an "
            "input, or yield the texts one by one (set_sequence_list_generator)"
        )
    found: Array = mask != 0
    return found


def padded(output: Array | TopK, mask: Array) -> Array | TopK:
    """Return the rows of a batch of padded sequences in their places, and 0 everywhere else, as arrays of their own."""
    if isinstance(output, TopK):
        return output.map(lambda array: _scattered(array, mask))
    return _scattered(np.asarray(output), mask)


def _scattered(rows: Array, mask: Array) -> Array:
    whole: Array = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    whole[mask] = rows
    return whole
