"""A teacher that needs no model: `edl serve --callable small_teacher.py:predict`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt


def predict(inputs: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
    """The row's sum, ten times."""
    x = inputs["x"]
    return {"logits": np.repeat(x.reshape(len(x), -1).sum(-1, keepdims=True), 10, axis=1)}
