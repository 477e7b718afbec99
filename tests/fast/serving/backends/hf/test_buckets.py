"""Which sequences of a batch are computed together."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edl_serving.backends.hf.buckets import make_buckets, sequence_starts


@settings(max_examples=30)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 2000), st.booleans())
def test_each_row_is_computed_once(lengths: list[int], max_tokens: int, padding: bool) -> None:
    position = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    buckets = make_buckets(sequence_starts(position), len(position), max_tokens, padding=padding)
    rows = np.concatenate([bucket.flat_rows for bucket in buckets])
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(position)))
    for bucket in buckets:
        sequences, length = bucket.valid.shape
        assert sequences == 1 or sequences * length <= max_tokens
        assert bucket.valid[:, 0].all()
        assert (position[bucket.rows[:, 0]] == 0).all()
        for line, valid in zip(bucket.rows, bucket.valid, strict=True):
            np.testing.assert_array_equal(position[line[valid]], np.arange(valid.sum()))
        assert padding or not bucket.padded


def test_similar_lengths_share_a_bucket() -> None:
    lengths = [500, 10, 480, 12, 490, 9, 11]
    buckets = make_buckets(np.cumsum([0, *lengths])[:-1], sum(lengths), 8192)
    assert [bucket.valid.shape for bucket in buckets] == [(3, 500), (4, 12)]
