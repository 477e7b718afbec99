"""The rows of a sequence, of the log-probabilities that an engine gives for the positions of its prompt.

An engine's position p holds its prediction OF token p; row t of ours holds the prediction of token t + 1. So a sequence
of T tokens is asked with another token behind it, and row t is position t + 1. Which token that is does not matter:
what a causal model predicts depends on the tokens before.
"""

from __future__ import annotations

import numpy as np

from edl_serving.backends.backend import Array, TopKArrays

__all__ = ["EngineAnswerError", "top_k_rows"]

_MASS_TOLERANCE = 1e-2
"""By how much the k probabilities may exceed 1 together: those of bfloat16 logits do by some thousandths, and logits or
values of another temperature by far more."""
_RESOLUTION = 2.0**-24
"""Half of the distance from 1 to the next float32. An engine computes in float32, so of what is left of 1 nothing below
is known."""


class EngineAnswerError(Exception):
    """Raised where an engine's answer is not what was asked for; says what it has instead."""


def top_k_rows(ids: Array, values: Array, k: int) -> TopKArrays:
    """Sort, cut and complete the entries of positions.

    Args:
        ids: int64 `[rows, entries]`, at least k entries a row; -1 where a row has fewer entries than others.
        values: float64 `[rows, entries]`, their log-probabilities at temperature 1; -inf beside an id of -1.
        k: how many to keep.

    Returns:
        The k largest of each row, equal ones by rising id, and the log of the probability of all other tokens.

    Raises:
        EngineAnswerError: the values are no log-probabilities of different tokens.
    """
    order = np.lexsort((ids, -values), axis=-1)
    ids = np.take_along_axis(ids, order, -1)
    values = np.take_along_axis(values, order, -1)
    _check_entries(ids, values)
    if (ids[:, :k] < 0).any():
        raise EngineAnswerError(
            f"position {_first_row(ids[:, :k] < 0)} has a token's id below 0, or fewer than {k} tokens of a "
            "probability above 0"
        )
    kept = values[:, :k]
    tail = np.log(_left_out(kept))
    return TopKArrays(ids[:, :k].astype(np.int32), kept.astype(np.float32), tail.astype(np.float32))


def _left_out(kept: Array) -> Array:
    """Return the probability that is left of 1, `[rows]`, from log-probabilities by falling value."""
    # 1 - p of the largest by `expm1`, which is exact where p is nearly 1; the others are added from the smallest.
    left: Array = -np.expm1(kept[:, 0]) - np.exp(kept[:, :0:-1]).sum(-1)
    # Where rounding left nothing: each token that is left out has the last one's probability at most.
    least = np.minimum(np.exp(kept[:, -1]), _RESOLUTION)
    return np.maximum(left, np.maximum(least, np.finfo(np.float32).tiny))


def _check_entries(ids: Array, values: Array) -> None:
    if np.isnan(values).any() or (values == np.inf).any():
        raise EngineAnswerError(f"a value of position {_first_row(np.isnan(values) | (values == np.inf))} is no number")
    listed = np.sort(ids, axis=-1)
    twice = (listed[:, 1:] == listed[:, :-1]) & (listed[:, 1:] >= 0)
    if twice.any():
        raise EngineAnswerError(f"position {_first_row(twice)} has a token twice")
    if ids.max(initial=0) > np.iinfo(np.int32).max:
        raise EngineAnswerError("a token's id is beyond 32 bits")
    mass = np.exp(np.minimum(values, 1.0)).sum(-1)
    if (mass > 1 + _MASS_TOLERANCE).any():
        row = int((mass > 1 + _MASS_TOLERANCE).argmax())
        raise EngineAnswerError(
            f"the probabilities of position {row + 1} sum up to {mass[row]:.4g}: these are no log-probabilities "
            "(vLLM gives other numbers with --logprobs-mode raw_logits or processed_logits: start it without)"
        )


def _first_row(wrong: Array) -> int:
    """Return the engine's position of the first row in which `wrong` is true."""
    return int(wrong.any(-1).argmax()) + 1
