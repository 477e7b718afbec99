"""The rows of the soak: made from their number alone, so that every process knows what row and label must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from edl.testing.models import fingerprint_of

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Service:
    """What the teachers of one service serve: `edl.testing.models.fingerprint` with these options."""

    classes: int
    shape: tuple[int, ...]
    dtype: str


SERVICES = {
    "small": Service(10, (16,), "float32"),
    "other": Service(12, (16,), "float32"),
    "image": Service(10, (3, 32, 32), "uint8"),
}


def rows_of(service: Service, numbers: Array) -> Array:
    """Inputs [rows, *shape] of these rows (int64 [rows]); no two rows are alike.

    Most of a row is zero, as the corner of an image or the start of a padded text is: a check that looks at a few
    bytes only must not be enough.
    """
    rows = np.zeros((len(numbers), *service.shape), service.dtype)
    flat = rows.reshape(len(numbers), -1)
    for digit in range(5):  # base 128 is exact in every dtype
        flat[:, -1 - digit] = (numbers >> (7 * digit)) & 127
    return rows


def labels_of(service: Service, numbers: Array) -> Array:
    """The labels [rows, classes] that belong to these rows."""
    return fingerprint_of(rows_of(service, numbers), service.classes)
