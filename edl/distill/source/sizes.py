"""Bytes that arrays and objects of the user's hold, for the bound on memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from edl.protocol.tensors import Array

__all__ = ["OBJECT_NBYTES", "arrays_nbytes", "object_nbytes"]

OBJECT_NBYTES = 33
"""What CPython's bytes object takes besides its bytes; without it, many short strings would weigh next to nothing."""


def arrays_nbytes(arrays: Iterable[Array]) -> int:
    """Return the bytes that arrays hold; for arrays of strings, with their strings."""
    return sum(array.nbytes + (_weight_of_objects(array) if array.dtype.kind == "O" else 0) for array in arrays)


def object_nbytes(value: Any) -> int:
    """Return the bytes that an object of any type holds, or its attributes, as far as they say.

    Pictures are counted as Pillow has them.
    """
    nbytes = _own_nbytes(value)
    if nbytes is None:
        attributes = getattr(value, "__dict__", None)
        nbytes = sum(_own_nbytes(part) or 0 for part in attributes.values()) if isinstance(attributes, dict) else 0
    return nbytes


def _own_nbytes(value: Any) -> int | None:
    if isinstance(value, bytes | str | bytearray):
        return len(value) + OBJECT_NBYTES
    try:
        if str(type(value).__module__).startswith("PIL."):
            return int(math.prod(value.size) * len(value.getbands()))
        nbytes = getattr(value, "nbytes", None)
    except Exception:  # noqa: BLE001 - of the user's type, or of sparse tensors: what does not say it is not counted
        return None
    return nbytes if isinstance(nbytes, int) else None


def _weight_of_objects(array: Array) -> int:
    return sum(len(element) + OBJECT_NBYTES for element in array.flat)
