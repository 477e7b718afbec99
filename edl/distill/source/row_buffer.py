"""Gathers rows in an array."""

from __future__ import annotations

import numpy as np

from edl.errors import SourceError
from edl.protocol.tensors import Array

__all__ = ["RowBuffer"]

_FIRST_ROWS = 256
"""Room at first: all of a usual request's. Room for millions that the user allows need not be there, nor be used."""
_EXACT_FLOAT64 = 2**53  # beyond it, float64 does not have every whole number


class RowBuffer:
    """Rows of an input, copied when they come: the source may fill its buffer again for the next row.

    Args:
        name: of the input, for messages.
        most: how many rows there will be at most.
        remedy: what to do about rows of different shapes, for messages.
    """

    def __init__(self, name: str, most: int, remedy: str) -> None:
        self._name = name
        self._most = most
        self._remedy = remedy
        self._count = 0
        self._rows: Array = np.empty(0)

    def append(self, array: Array, what: str) -> None:
        """Add a row.

        Args:
            array: of any shape.
            what: the sample it is from, for messages.

        Raises:
            SourceError: it has another shape than the rows before it, or no type holds them all as they are.
        """
        self._admit(array, array.shape, what)
        if self._count == len(self._rows):
            self._grow(self._count + 1)
        self._rows[self._count, ...] = array  # `...`: else an array of no dimension would be the object
        self._count += 1

    def extend(self, rows: Array, what: str) -> None:
        """Add rows.

        Args:
            rows: [rows, ...].
            what: the sample they are from, for messages.

        Raises:
            SourceError: as `append`.
        """
        self._admit(rows, rows.shape[1:], what)
        stop = self._count + len(rows)
        if stop > len(self._rows):
            self._grow(stop)
        self._rows[self._count : stop] = rows
        self._count = stop

    def _admit(self, array: Array, shape: tuple[int, ...], what: str) -> None:
        if not self._count:
            self._rows = np.empty((min(self._most, _FIRST_ROWS), *shape), array.dtype.newbyteorder("="))
        elif shape != self._rows.shape[1:]:
            raise SourceError(
                f"{what}: input {self._name!r} has shape {list(shape)}, samples before it "
                f"{list(self._rows.shape[1:])}: {self._remedy}"
            )
        elif array.dtype != self._rows.dtype:
            self._widen(array, what)

    def gathered(self) -> Array:
        """Return all rows so far, [rows, ...]."""
        found = self._rows[: self._count]
        return found if 2 * self._count > len(self._rows) else found.copy()  # a few rows need not keep room for all

    def _grow(self, least: int) -> None:
        rows = self._rows
        self._rows = np.empty((max(min(2 * self._count, self._most), least), *rows.shape[1:]), rows.dtype)
        self._rows[: self._count] = rows[: self._count]

    def _widen(self, array: Array, what: str) -> None:
        rows = self._rows[: self._count]
        dtype = np.result_type(rows, array) if (rows.dtype.kind == "O") == (array.dtype.kind == "O") else None
        if dtype is None or any(_changed_in(dtype, part) for part in (rows, array)):
            raise SourceError(
                f"{what}: input {self._name!r} is {array.dtype}, samples before it {rows.dtype}, and no type holds "
                "both as they are: make all samples the same type"
            )
        self._rows = self._rows.astype(dtype)


def _changed_in(dtype: np.dtype[np.generic], array: Array) -> bool:
    """Return whether whole numbers of 64 bits might become others, as floating-point numbers."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or dtype.kind != "f" or not array.size:
        return False
    return max(-int(array.min()), int(array.max())) > _EXACT_FLOAT64
