"""A teacher that needs no model: `edl serve --callable small_teacher.py:predict`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def predict(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The row's sum, ten times."""
    sums: npt.NDArray[np.float32] = x.reshape(len(x), -1).sum(-1, keepdims=True)
    return np.repeat(sums, 10, axis=1)
