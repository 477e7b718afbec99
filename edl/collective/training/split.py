"""How an epoch is cut into global batches, a global batch into ranks' shares, a share into micro-batches: pure numbers.

Where a global batch begins and ends does not depend on how many ranks there are, so a world of any size trains the same
batches in the same order.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from edl.errors import SettingsError

__all__ = ["Tail", "batch_at", "batches_left", "micro_sizes", "share"]

Tail: TypeAlias = Literal["keep", "drop", "pad"]
"""What happens to the samples at the end of an epoch that do not fill a global batch: they make a smaller one, they are
left out, or they are filled up with samples from the beginning of the epoch's order."""


def batch_at(position: int, length: int, batch: int, tail: Tail) -> int:
    """Samples of the global batch that begins after `position` samples of an epoch of `length`; 0 if there is none."""
    left = length - position
    if left <= 0:
        return 0
    if tail == "keep":
        return min(batch, left)
    return batch if tail == "pad" or left >= batch else 0


def batches_left(position: int, length: int, batch: int, tail: Tail) -> int:
    """How many global batches begin at `position` or after it, all of `batch` samples but for the tail."""
    left = max(length - position, 0)
    return left // batch if tail == "drop" else -(-left // batch)


def share(samples: int, world: int, rank: int, least: int = 1) -> range:
    """Return the places of a global batch of `samples` that `rank` of `world` trains.

    Shares are neighbours in the order of ranks and differ by one sample at most; the first ranks have the larger ones.
    With fewer samples than `least` for each rank the last ranks' shares are empty.

    Args:
        least: samples that a share has, unless it is empty or the batch has fewer.
    """
    if not 0 <= rank < world:
        raise SettingsError(f"rank={rank} of world={world}: must be from 0 to {world - 1}")
    sharing = min(world, max(samples // least, 1))
    if rank >= sharing:
        return range(samples, samples)
    each, more = divmod(samples, sharing)
    begin = rank * each + min(rank, more)
    return range(begin, begin + each + (rank < more))


def micro_sizes(samples: int, most: int | None = None, parts: int = 1, least: int = 1) -> list[int]:
    """Cut a share into as few micro-batches as possible; those that are not empty differ by one sample at most.

    Args:
        samples: of the share.
        most: that fit into the memory at once; None for no limit.
        parts: make at least so many micro-batches. If these are more than the samples allow, some are of 0 samples.
        least: samples of a micro-batch that is not empty, where `most` allows it.

    Returns:
        The sizes, larger ones first; empty if there is neither a sample nor a wish for `parts` above 1.
    """
    if most is not None and most < 1:
        raise SettingsError(f"max_micro_batch={most}: must be at least 1, or None for no limit")
    needed = -(-samples // most) if most is not None else min(samples, 1)
    count = max(needed, parts if parts > 1 else 0)
    filled = max(needed, min(count, samples // least))
    each, more = divmod(samples, filled) if filled else (0, 0)
    return [each + (place < more) for place in range(filled)] + [0] * (count - filled)
