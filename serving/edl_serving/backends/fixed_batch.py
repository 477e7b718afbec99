"""Batches for models that were saved for certain batch sizes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edl_serving.backends.backend import Array
from edl_serving.backends.specs import Predict

__all__ = ["BatchSizeRange", "predict_in_parts"]


@dataclass(frozen=True)
class BatchSizeRange:
    """The batch sizes that a model accepts.

    Attributes:
        least: the smallest.
        most: the largest; None for any.
    """

    least: int = 1
    most: int | None = None


def predict_in_parts(predict: Predict, inputs: Mapping[str, Array], accepted: BatchSizeRange) -> dict[str, Array]:
    """Call `predict` with batches of sizes that it accepts.

    A batch that is too large is cut. A batch that is too small is filled up with copies of its last row, whose answers
    are dropped.

    Args:
        predict: the model.
        inputs: arrays `[rows, ...]` by name.
        accepted: sizes of batches.

    Returns:
        Arrays `[rows, ...]` by name.
    """
    rows = len(next(iter(inputs.values())))
    most = accepted.most or rows
    if accepted.least <= rows <= most:
        return dict(predict(inputs))
    parts: list[Mapping[str, Array]] = []
    for start in range(0, rows, most):
        part = {name: array[start : start + most] for name, array in inputs.items()}
        count = min(most, rows - start)
        if count < accepted.least:
            part = {
                name: np.concatenate([array, *[array[-1:]] * (accepted.least - count)]) for name, array in part.items()
            }
        parts.append({name: array[:count] for name, array in predict(part).items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
