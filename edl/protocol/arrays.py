"""Makes numpy arrays of what a user's source yields, or refuses it with the remedy; gathers rows in an array."""

from __future__ import annotations

from typing import Any

import numpy as np

from edl.errors import ProtocolError, SourceError
from edl.protocol.tensors import EXACT_FLOAT64, Array, array_of

_FIRST_ROWS = 256
"""Rows that a buffer has room for at first: a usual request. The user may allow millions that never come."""


def is_tensor(value: Any) -> bool:
    """Return whether this is a tensor of torch or paddle."""
    return hasattr(value, "detach") and hasattr(value, "numpy")


def as_array(value: Any, what: str) -> Array:
    """Return a numpy array of numbers or strings: of an array, a tensor of any framework, or a list.

    Args:
        value: A value of any type.
        what: Place of the value in the source, for messages.

    Returns:
        The value itself if it is an array of numbers, a view of it if it is a tensor on the CPU, else a copy; bytes and
        strings as objects.

    Raises:
        SourceError: This cannot be sent to a teacher.
    """
    try:
        numpy_has_it = isinstance(value, np.ndarray) or not is_tensor(value)
        array = array_of(value) if numpy_has_it else _array_of_tensor(value)
    except (ValueError, TypeError, OverflowError, ProtocolError) as exc:
        raise SourceError(f"{what}: cannot be made an array: {exc}") from exc
    if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise SourceError(f"{what}: a masked array cannot be sent; fill in what is masked, array.filled(0) for example")
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # of ml_dtypes, as JAX has it; a name costs 5 us
        array = array.astype(np.float32)
    if array.dtype.kind not in "biufO" or array.dtype.itemsize > 8:
        raise SourceError(
            f"{what}: dtype {array.dtype} cannot be sent: make it numbers of up to 64 bits, booleans, bytes or strings"
        )
    if array.dtype.kind in "iuf" and isinstance(value, list | tuple) and _has_boolean(value):
        raise SourceError(f"{what}: a mix of booleans and numbers: make all of them numbers")
    if array.dtype.kind == "O":
        strange = {kind for kind in set(map(type, array.flat)) if not issubclass(kind, bytes | str)}
        if strange:
            at, found = next((at, element) for at, element in enumerate(array.flat) if type(element) in strange)
            raise SourceError(
                f"{what}: an array of Python objects cannot be sent; make it an array of numbers or strings "
                f"(element {at} is {type(found).__name__})"
            )
    return array


def _has_boolean(values: list[Any] | tuple[Any, ...]) -> bool:
    kinds = set(map(type, values))
    lists = [part for part in values if isinstance(part, list | tuple)] if kinds & {list, tuple} else []
    return bool in kinds or any(map(_has_boolean, lists))


def _array_of_tensor(value: Any) -> Array:
    """Return an array of a tensor of torch or paddle, on whichever device it lies."""
    try:
        tensor = value.detach().cpu()
        array: Array = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
    except RuntimeError as exc:  # sparse, nested, without data, ...
        raise TypeError(exc) from exc
    return array


class RowBuffer:
    """Rows of an input, copied when they come: the source may fill its buffer again for the next row.

    Args:
        name: Name of the input, for messages.
        most: Largest number of rows.
        remedy: What to do about rows of different shapes, for messages.
    """

    def __init__(self, name: str, most: int, remedy: str) -> None:
        self._name = name
        self._most = most
        self._remedy = remedy
        self._count = 0
        self._rows: Array = np.empty(0)

    def append(self, array: Array, what: str) -> None:
        """Add a row; see `extend`."""
        self.extend(array[None], what)

    def extend(self, rows: Array, what: str) -> None:
        """Add rows, an array [rows, ...]; `what` names their sample in messages.

        Raises:
            SourceError: They have another shape than the rows before, or no type holds all of them unchanged.
        """
        self._admit(rows, what)
        stop = self._count + len(rows)
        if stop > len(self._rows):
            self._grow(stop)
        self._rows[self._count : stop] = rows
        self._count = stop

    def _admit(self, array: Array, what: str) -> None:
        shape = array.shape[1:]
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
    return max(-int(array.min()), int(array.max())) > EXACT_FLOAT64
