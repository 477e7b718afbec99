"""Places the rows of sequences in batches that are padded to one length."""

from __future__ import annotations

import numpy as np

from edl.distill.compress import TopK
from edl.errors import SourceError
from edl.protocol.tensors import Array


def as_token_mask(mask: Array, what: str) -> Array:
    """Return a batch's token mask (1 for tokens, else 0, of any dtype) as bool [sequences, length]."""
    if mask.ndim != 2:
        raise SourceError(f"{what}: its mask has shape {list(mask.shape)}: must be [sequences, length]")
    other = mask[(mask != 0) & (mask != 1)]
    if other.size:  # numbers of the texts packed into a row, or values added to attention scores
        raise SourceError(
            f"{what}: its mask contains {other.flat[0]}: must be 1 for tokens and 0 elsewhere. If rows "
            "hold several texts, which would be read as one, add an input with positions that restart at 0 for each "
            "text, or yield the texts one by one (set_sequence_list_generator)"
        )
    found: Array = mask != 0
    return found


def padded(output: Array | TopK, mask: Array) -> Array | TopK:
    """Return new arrays [sequences, length, ...] with the rows placed where `mask` is 1, and 0 elsewhere."""
    if isinstance(output, TopK):
        return output.map(lambda array: _scattered(array, mask))
    return _scattered(np.asarray(output), mask)


def _scattered(rows: Array, mask: Array) -> Array:
    whole: Array = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    whole[mask] = rows
    return whole
