"""Cutting epochs, batches and shares: nothing is lost or repeated, and ranks differ by one sample at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.training.split import Tail, batch_size_at, batches_left, micro_batch_sizes, rank_share
from edl.errors import SettingsError

TAILS = st.sampled_from(["keep", "drop", "pad"])


@given(samples=st.integers(0, 500), world=st.integers(1, 40))
def test_shares_cover_the_batch_evenly(samples: int, world: int) -> None:
    """Shares cover the batch in order and are even."""
    shares = [rank_share(samples, world, rank) for rank in range(world)]
    assert [place for one in shares for place in one] == list(range(samples))
    sizes = [len(one) for one in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(samples=st.integers(0, 500), most=st.none() | st.integers(1, 60), parts=st.integers(1, 12))
def test_micro_batches_are_few_and_even(samples: int, most: int | None, parts: int) -> None:
    """Micro batches are as few as fit and even."""
    sizes = micro_batch_sizes(samples, most, parts)
    assert sum(sizes) == samples
    assert all(size <= (most or samples) for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    fewest = -(-samples // most) if most else min(samples, 1)
    assert len(sizes) == max(fewest, parts if parts > 1 else 0)


@given(samples=st.integers(2, 500), world=st.integers(1, 40), most=st.none() | st.integers(3, 60))
def test_nobody_has_one_sample_alone(samples: int, world: int, most: int | None) -> None:
    shares = [rank_share(samples, world, rank, least=2) for rank in range(world)]
    assert [place for one in shares for place in one] == list(range(samples))
    sizes = [len(one) for one in shares if one]
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    for size in sizes:
        for parts in (1, 2, 5):
            micro = micro_batch_sizes(size, most, parts, least=2)
            assert sum(micro) == size
            assert 1 not in micro
            assert len(micro) >= (parts if parts > 1 else 1)


@given(length=st.integers(1, 300), batch=st.integers(1, 80), tail=TAILS)
def test_epoch_has_the_announced_batches(length: int, batch: int, tail: Tail) -> None:
    """An epoch has as many batches as it says."""
    position, sizes = 0, []
    while size := batch_size_at(position, length, batch, tail):
        sizes.append(size)
        position += size
    assert len(sizes) == batches_left(0, length, batch, tail)
    if tail == "keep":
        assert sum(sizes) == length
    else:
        assert set(sizes) <= {batch}
        assert abs(sum(sizes) - length) < batch
        assert (sum(sizes) <= length) if tail == "drop" else (sum(sizes) >= length)


@pytest.mark.parametrize(("world", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_rank_outside_the_world_is_refused(world: int, rank: int) -> None:
    """A rank that is not in the world is refused."""
    with pytest.raises(SettingsError, match=f"rank={rank} of world={world}"):
        rank_share(10, world, rank)


def test_memory_for_no_sample_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_micro_batch=0"):
        micro_batch_sizes(10, 0)
