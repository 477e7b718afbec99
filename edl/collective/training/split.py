"""How an epoch is cut into global batches, a global batch into ranks' shares, a share into micro-batches.

Where a global batch begins and ends does not depend on how many ranks there are, so a world of any size trains the same
batches in the same order.

A batch is what a training loop has: tensors, arrays, lists, and nests of these. Tuples, named tuples and mappings are
structures of parts; so is a list that holds a tensor, an array or a structure, as `DataLoader` makes of a tuple.
Everything else with a length that can be sliced has rows: tensors, arrays, lists of strings, top-k soft labels. Parts
without a length (a number, None) go to every micro-batch as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from edl.errors import SettingsError

__all__ = ["Tail", "batch_size_at", "batches_left", "count_rows", "cut_rows", "micro_batch_sizes", "rank_share"]

B = TypeVar("B")

Tail: TypeAlias = Literal["keep", "drop", "pad"]
"""What happens to the samples at the end of an epoch that do not fill a global batch: they make a smaller one, they are
left out, or they are filled up with samples from the beginning of the epoch's order."""


def batch_size_at(position: int, length: int, batch: int, tail: Tail) -> int:
    """Return the samples of the global batch that begins at a position; 0 if there is none.

    Args:
        position: in samples of the epoch.
        length: samples of the epoch.
        batch: samples of a full global batch.
        tail: what happens to the end of the epoch.
    """
    left = length - position
    if left <= 0:
        return 0
    if tail == "keep":
        return min(batch, left)
    return batch if tail == "pad" or left >= batch else 0


def batches_left(position: int, length: int, batch: int, tail: Tail) -> int:
    """Return how many global batches begin at a position or after it, all full but for the tail.

    Args:
        position: in samples of the epoch.
        length: samples of the epoch.
        batch: samples of a full global batch.
        tail: what happens to the end of the epoch.
    """
    left = max(length - position, 0)
    return left // batch if tail == "drop" else -(-left // batch)


def rank_share(samples: int, world: int, rank: int, least: int = 1) -> range:
    """Return the places in a global batch that a rank trains.

    Shares are neighbours in the order of ranks and differ by a sample at most; the first ranks have the larger shares.
    With fewer samples than `least` for every rank the last ranks' shares are empty.

    Args:
        samples: of the global batch.
        world: the number of ranks.
        rank: whose share it is.
        least: samples that a share has, unless it is empty or the batch has fewer.

    Raises:
        SettingsError: there is no such rank.
    """
    if not 0 <= rank < world:
        raise SettingsError(f"rank={rank} of world={world}: must be from 0 to {world - 1}")
    sharing = min(world, max(samples // least, 1))
    if rank >= sharing:
        return range(samples, samples)
    quotient, more = divmod(samples, sharing)
    begin = rank * quotient + min(rank, more)
    return range(begin, begin + quotient + (rank < more))


def micro_batch_sizes(samples: int, most: int | None = None, parts: int = 1, least: int = 1) -> list[int]:
    """Cut a share into as few micro-batches as possible; if not empty, they differ by a sample at most.

    Args:
        samples: of the share.
        most: that fit into the memory at once; None for no limit.
        parts: make at least so many micro-batches. If these are more than the samples allow, some are of 0 samples.
        least: samples of a micro-batch that is not empty, where `most` allows it.

    Returns:
        The sizes, the largest first; empty without a sample, unless `parts` is above 1.

    Raises:
        SettingsError: `most` is below 1.
    """
    if most is not None and most < 1:
        raise SettingsError(f"max_micro_batch={most}: must be at least 1, or None for no limit")
    needed = -(-samples // most) if most is not None else min(samples, 1)
    count = max(needed, parts if parts > 1 else 0)
    filled = max(needed, min(count, samples // least))
    quotient, more = divmod(samples, filled) if filled else (0, 0)
    return [quotient + (place < more) for place in range(filled)] + [0] * (count - filled)


def count_rows(batch: object) -> int:
    """Return how many rows every part of a batch has.

    Args:
        batch: tensors, or a nest of them.

    Raises:
        SettingsError: the parts differ, or none has rows.
    """
    counts: list[int] = []
    _map(batch, lambda part: counts.append(len(part)))
    if not counts:
        raise SettingsError(f"a batch of type {type(batch).__name__} has no part with rows, such as a tensor")
    if len(set(counts)) > 1:
        raise SettingsError(f"the parts of a batch have {sorted(set(counts))} rows: each needs one for each sample")
    return counts[0]


def cut_rows(batch: B, begin: int, end: int) -> B:
    """Return some rows of every part of a batch, as views where the parts allow it.

    Args:
        batch: tensors, or a nest of them.
        begin: the first row.
        end: behind the last row.
    """
    cut: B = _map(batch, lambda part: part[begin:end])
    return cut


def _map(part: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(part, Mapping):
        return {key: _map(value, change) for key, value in part.items()}
    if isinstance(part, tuple):
        mapped = [_map(value, change) for value in part]
        return type(part)(*mapped) if hasattr(part, "_fields") else tuple(mapped)
    if isinstance(part, list) and any(_is_part(value) for value in part):
        return [_map(value, change) for value in part]
    has_rows = part.ndim > 0 if isinstance(part, (torch.Tensor, np.ndarray)) else _can_be_cut(part)
    return change(part) if has_rows else part


def _is_part(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, Mapping, tuple, list))


def _can_be_cut(part: object) -> bool:
    return hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, (str, bytes))
