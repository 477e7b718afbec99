"""The largest logits of a row, found on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["TopLogits", "select_top_k", "rows_of_slice"]

_GPU_SLICE_BYTES = 64 << 20
"""Of float32 logits that are held at a time, beside as many for work: with 152k tokens 110 rows, enough to keep a GPU
busy with the head's matrix product."""
_CPU_SLICE_BYTES = 8 << 20
"""Likewise; more does not stay in a core's caches (64 MiB: 4,800 rows a second of 8k words, 8 MiB: 8,100)."""


class TopLogits(NamedTuple):
    """The largest log-probabilities of rows of logits.

    Attributes:
        ids: INT32 `[rows, k]`, by falling logit, equal logits by rising id.
        values: log-probabilities at temperature 1, float32 `[rows, k]`.
        tail: log of the sum of exp(log-probability / temperature) over the others, float32 `[rows]`.
        targets: log-probabilities of the targets, float32 `[rows, m]`; None without targets.
    """

    ids: torch.Tensor
    values: torch.Tensor
    tail: torch.Tensor
    targets: torch.Tensor | None


def rows_of_slice(vocabulary: int, device: torch.device) -> int:
    """Return how many rows of float32 logits are to be held at a time."""
    nbytes = _CPU_SLICE_BYTES if device.type == "cpu" else _GPU_SLICE_BYTES
    return max(1, nbytes // (4 * vocabulary))


def select_top_k(logits: torch.Tensor, k: int, temperature: float, targets: torch.Tensor | None) -> TopLogits:
    """Find the k largest logits of each row; which of equal logits is the same for every k and device.

    Args:
        logits: `[rows, vocabulary]`; changed if they are float32.
        k: from 1 to `vocabulary`.
        temperature: of the tail.
        targets: INT64 `[rows, m]`, or None.

    Returns:
        What there is to send.
    """
    logits = logits.float()
    lse = logits.logsumexp(-1, keepdim=True)
    target_values = logits.gather(1, targets).sub_(lse) if targets is not None else None
    values, ids = logits.topk(k, dim=-1, sorted=False)
    threshold = values.amin(-1, keepdim=True)
    ambiguous = ((logits >= threshold).sum(-1) > k).nonzero().flatten()
    if len(ambiguous):  # as is common with bfloat16: `topk` takes any of equal logits
        some, least = logits[ambiguous], threshold[ambiguous]
        larger, equal = some > least, some == least
        room = k - larger.sum(-1, keepdim=True)
        kept = larger | (equal & (equal.cumsum(-1) <= room))
        ids[ambiguous] = kept.nonzero()[:, 1].view(len(ambiguous), k)
    ids = ids.sort(-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    logits.scatter_(1, ids, -torch.inf)
    tail = logits.sub_(lse).div_(temperature).logsumexp(-1)
    return TopLogits(ids.int(), values - lse, tail, target_values)
