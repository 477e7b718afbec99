"""Packs rows of several outputs into records: a run of bytes per row, all of the same length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from edl.distill.compress import TopK, to_float16
from edl.errors import SettingsError
from edl.protocol.names import top_k_names
from edl.protocol.tensors import Array

__all__ = ["ID_PREFIX", "Column", "Outputs", "RowLayout", "flatten"]

Outputs: TypeAlias = Mapping[str, Array | TopK]

ID_PREFIX = "sample_ids"
"""Names of tensors that hold the ids in a file; outputs must not be called so."""


@dataclass(frozen=True)
class Column:
    """An array of the rows.

    Attributes:
        name: of the output, or of a part of it.
        dtype: little-endian.
        shape: without the rows.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class RowLayout:
    """Which columns a record has, in which order.

    Attributes:
        columns: sorted by name.
        top_k: by output that is `TopK`, its temperature and number of classes; its three arrays are columns.
    """

    columns: tuple[Column, ...]
    top_k: Mapping[str, tuple[float, int | None]] = field(default_factory=dict)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a record."""
        return sum(column.nbytes for column in self.columns)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a row, by column."""
        return {column.name: column.shape for column in self.columns}

    @classmethod
    def of(cls, arrays: Mapping[str, Array], top_k: Mapping[str, tuple[float, int | None]]) -> RowLayout:
        """Return the layout of these arrays [rows, ...].

        Raises:
            SettingsError: an array that cannot be kept.
        """
        columns = []
        for name, array in sorted(arrays.items()):
            if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
                raise SettingsError(f"output {name!r} is {array.dtype}: the cache keeps numbers and booleans only")
            if name.startswith(ID_PREFIX):
                raise SettingsError(f"output {name!r}: the cache keeps ids under names that start with {ID_PREFIX!r}")
            column = Column(name, array.dtype.newbyteorder("<"), array.shape[1:])
            if not column.nbytes:
                raise SettingsError(f"output {name!r} has rows of shape {list(column.shape)}: nothing to keep")
            columns.append(column)
        return cls(tuple(columns), dict(top_k))

    def pack(self, arrays: Mapping[str, Array]) -> list[bytes]:
        """Return a record for every row."""
        parts = [_as_bytes(arrays[column.name], column) for column in self.columns]
        packed = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return [row.tobytes() for row in packed]

    def unpack(self, records: bytes, rows: int) -> dict[str, Array]:
        """Return arrays [rows, ...] by column out of joined records. Read-only where that saves a copy."""
        packed = np.frombuffer(records, np.uint8).reshape(rows, self.row_nbytes)
        arrays, at = {}, 0
        for column in self.columns:
            part = np.ascontiguousarray(packed[:, at : at + column.nbytes])
            arrays[column.name] = part.reshape(-1).view(column.dtype).reshape(rows, *column.shape)
            at += column.nbytes
        return arrays

    def restore(self, arrays: Mapping[str, Array]) -> dict[str, Array | TopK]:
        """Return outputs out of columns: the arrays of `TopK` put together again."""
        outputs: dict[str, Array | TopK] = dict(arrays)
        for name, (temperature, classes) in self.top_k.items():
            parts = [arrays[part] for part in top_k_names(name)]
            for part in top_k_names(name):
                del outputs[part]
            outputs[name] = TopK(parts[0], parts[1], parts[2], temperature, classes)
        return outputs

    def __str__(self) -> str:
        return ", ".join(map(str, self.columns))


def flatten(outputs: Outputs, rows: int, *, half: bool = False) -> tuple[dict[str, Array], RowLayout]:
    """Return outputs as plain arrays by column, and their layout.

    Args:
        outputs: arrays [rows, ...] or `TopK`, by name.
        rows: how many they must have.
        half: make floating-point values float16, except for the tail's mass.

    Raises:
        SettingsError: outputs that do not have `rows` rows, or cannot be kept.
    """
    arrays: dict[str, Array] = {}
    top_k: dict[str, tuple[float, int | None]] = {}
    for name, output in outputs.items():
        if isinstance(output, TopK):
            ids, values, tail = top_k_names(name)
            arrays[ids], arrays[values], arrays[tail] = output.ids, _half(output.values, half), output.tail_lse
            top_k[name] = (float(output.temperature), int(output.classes) if output.classes is not None else None)
        else:
            arrays[name] = _half(np.asarray(output), half)
    if not arrays:
        raise SettingsError("no outputs to keep")
    for name, array in arrays.items():
        if array.ndim < 1 or len(array) != rows:
            raise SettingsError(f"output {name!r} has shape {list(array.shape)}: expected {rows} rows, one for each id")
    return arrays, RowLayout.of(arrays, top_k)


def _half(array: Array, half: bool) -> Array:
    return to_float16(array) if half and array.dtype.kind == "f" else array


def _as_bytes(array: Array, column: Column) -> Array:
    contiguous: Array = np.ascontiguousarray(array, column.dtype)
    return contiguous.reshape(-1).view(np.uint8).reshape(len(array), column.nbytes)
