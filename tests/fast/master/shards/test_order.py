"""The order of shards: a permutation, the same everywhere, another in each epoch."""

from __future__ import annotations

import collections
import hashlib
import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.master.shards.order import ShardOrder


def whole(order: ShardOrder, most: int = 100) -> list[int]:
    """All shards of an epoch, in its order."""
    shards: list[int] = []
    while len(shards) < order.count:
        taken = order.shards(len(shards), most)
        assert 0 < len(taken) <= most
        shards += taken
    assert order.shards(order.count, most) == []
    return shards


@settings(max_examples=40)
@given(st.integers(1, 600), st.integers(0, 2**64 - 1), st.integers(0, 10**9), st.integers(1, 2000))
def test_order_is_a_permutation(count: int, seed: int, epoch: int, most: int) -> None:
    order = ShardOrder(count, seed, epoch, True)
    shards = whole(order, most)
    assert sorted(shards) == list(range(count))
    assert whole(ShardOrder(count, seed, epoch, True), 7) == shards


def test_order_is_pinned() -> None:
    """A change would have a job that goes on after an update of EDL read samples twice, and others never."""
    assert whole(ShardOrder(10, 7, 3, True)) == PINNED_10
    assert ShardOrder(10**6, 2**64 - 1, 10**12, True).shards(999_000, 5) == PINNED_MILLION
    assert ShardOrder(2**40, 1, 0, True).shards(2**39, 3) == PINNED_LARGE


PINNED_10 = [0, 2, 3, 4, 5, 6, 8, 7, 1, 9]
PINNED_MILLION = [496094, 109637, 391251, 848905, 152969]
PINNED_LARGE = [250907736042, 1034174068119, 841590924608]


def position_to_shard(position: int, count: int, seed: int, epoch: int) -> int:
    """The same by Python's numbers, one at a time: what numpy makes of types and overflows plays no part."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=64, person=b"edl.shards").digest()
    keys = struct.unpack("<8Q", digest)
    bits = max(count - 1, 1).bit_length()
    low_bits, high_bits = bits // 2, bits - bits // 2
    most = 2**64 - 1

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & most
        value = (value ^ value >> 27) * 0x94D049BB133111EB & most
        return value ^ value >> 31

    value = position
    while True:
        high, low = value >> low_bits, value % 2**low_bits
        for number, key in enumerate(keys):
            if number % 2:
                low ^= mix(high + key & most) % 2**low_bits
            else:
                high ^= mix(low + key & most) % 2**high_bits
        value = high << low_bits | low
        if value < count:
            return value


@pytest.mark.parametrize("count", [1, 2, 7, 10**6, 2**40])
def test_order_agrees_with_plain_numbers(count: int) -> None:
    order = ShardOrder(count, 2**63 + 5, 9, True)
    for start in {0, count // 3, count - 1}:
        shards = order.shards(start, 20)
        assert shards == [position_to_shard(start + at, count, 2**63 + 5, 9) for at in range(len(shards))]


def test_unshuffled_order_is_the_numbers() -> None:
    assert whole(ShardOrder(2500, 7, 3, False)) == list(range(2500))


@pytest.mark.parametrize("count", [2, 5, 17])
def test_small_orders_are_even(count: int) -> None:
    """Each shard is at each position about equally often: 5 standard deviations off at most."""
    epochs = 400
    seen = collections.Counter(
        itertools.chain.from_iterable(enumerate(whole(ShardOrder(count, 5, epoch, True))) for epoch in range(epochs))
    )
    expected = epochs / count
    deviation = (epochs / count * (1 - 1 / count)) ** 0.5
    assert len(seen) == count**2
    assert max(abs(times - expected) for times in seen.values()) < 5 * deviation
