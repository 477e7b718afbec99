"""The order of the units within a shard: a permutation that is the same on every machine and in every version."""

from __future__ import annotations

import hashlib
import struct

__all__ = ["permute_shard"]


def permute_shard(seed: int, epoch: int, shard: int, count: int) -> list[int]:
    """Return the order in which the units of a shard are read.

    The units are sorted by a keyed BLAKE2b hash of their number (RFC 7693), which depends on nothing but the arguments:
    generators of Python's or NumPy's may change with a version.

    Args:
        seed: of the data set.
        epoch: from 0 on.
        shard: its number in the data set.
        count: units of the shard.

    Returns:
        A permutation of `range(count)`.
    """
    key = struct.pack("<QQQ", seed, epoch, shard)
    hashes = [hashlib.blake2b(struct.pack("<Q", unit), digest_size=16, key=key).digest() for unit in range(count)]
    return sorted(range(count), key=hashes.__getitem__)
