"""The order of shards: a permutation, the same everywhere, another in each epoch."""

from __future__ import annotations

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


def test_unshuffled_order_is_the_numbers() -> None:
    assert whole(ShardOrder(2500, 7, 3, False)) == list(range(2500))
