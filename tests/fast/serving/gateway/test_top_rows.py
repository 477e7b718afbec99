"""Rows of entries: sorted, cut to k, and the tail without cancellation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edl_serving.gateway.top_rows import EngineAnswerError, top_k_rows


def test_ids_fall_by_value_and_rise_by_id() -> None:
    ids, values, _ = top_k_rows(np.array([[7, 3, 5], [9, 4, 6]]), np.array([[-2.0, -1.0, -3.0], [-2.0] * 3]), 2)
    assert ids.tolist() == [[3, 7], [4, 6]]
    assert values.tolist() == [[-1.0, -2.0], [-2.0, -2.0]]
    assert (ids.dtype, values.dtype) == (np.int32, np.float32)


def test_own_token_beyond_k_is_cut() -> None:
    ids, values, tail = top_k_rows(np.array([[8, 1, 2], [1, 2, -1]]), np.log([[0.1, 0.6, 0.2], [0.6, 0.2, 1e-99]]), 2)
    assert ids.tolist() == [[1, 2], [1, 2]]
    np.testing.assert_allclose(values, np.log([[0.6, 0.2], [0.6, 0.2]]), rtol=1e-6)
    np.testing.assert_allclose(tail, np.log([0.2, 0.2]), rtol=1e-6)


def test_tails_are_finite_and_not_cancelled() -> None:
    # 1 - p as a difference of float32 would be 0, and its logarithm -inf.
    tail = top_k_rows(np.array([[0]]), np.array([[math.log1p(-1e-6)]]), 1).tail
    assert float(np.exp(tail[0])) == pytest.approx(1e-6, rel=1e-5)
    rounded = top_k_rows(np.array([[0, 1]]), np.array([[math.log(1 - 1e-9), math.log(1e-9) + 1e-3]]), 2).tail
    assert 0 < float(np.exp(rounded[0])) <= 1.1e-9, "no token that is left out has more than the last one"
    # vLLM writes -inf as -9999.0, which JSON can hold.
    clamped = top_k_rows(np.array([[0, 1]]), np.array([[0.0, -9999.0]]), 2)
    assert np.isfinite(clamped.tail).all()
    assert clamped.values.tolist() == [[0.0, -9999.0]]


@pytest.mark.parametrize(
    ("ids", "values", "words"),
    [
        ([[1, 2]], [[math.nan, -1.0]], "no number"),
        ([[1, 1]], [[-1.0, -1.0]], "twice"),
        ([[1, 2**31]], [[-1.0, -2.0]], "32 bits"),
        ([[1, -5]], [[-1.0, -2.0]], "position 1 has a token's id below 0"),
        ([[1, -1, 7]], [[-1.0, -math.inf, -math.inf]], "fewer than 2 tokens of a probability"),
        ([[1, 2]], [[3.0, 2.0]], "--logprobs-mode"),
        ([[1, 2]], [[-0.1, -0.2]], "--logprobs-mode"),
    ],
)
def test_other_values_are_refused(ids: list[list[int]], values: list[list[float]], words: str) -> None:
    with pytest.raises(EngineAnswerError, match=words):
        top_k_rows(np.array(ids), np.array(values), 2)
