"""Packs rows of several outputs into records: a run of bytes for each row, or for each sequence of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from edl.distill.cache import SequenceIds
from edl.distill.compress import TopK, to_float16
from edl.errors import SettingsError
from edl.protocol.names import top_k_names
from edl.protocol.tensors import Array

__all__ = ["FINGERPRINT_NBYTES", "ID_PREFIX", "Column", "Outputs", "RowLayout", "flatten"]

Outputs: TypeAlias = Mapping[str, Array | TopK]

ID_PREFIX = "sample_ids"
"""Names of tensors that hold the ids in a file; outputs must not be called so."""

FINGERPRINT_NBYTES = 8
"""Bytes at the beginning of a sequence's record."""


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
        sequence_inputs: of records of sequences, the inputs that their fingerprints are of; None for records of a row.
    """

    columns: tuple[Column, ...]
    top_k: Mapping[str, tuple[float, int | None]] = field(default_factory=dict)
    sequence_inputs: tuple[str, ...] | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of a record."""
        return sum(column.nbytes for column in self.columns)

    def merged(self, other: RowLayout) -> RowLayout | None:
        """Return the layout of records of both; None where they do not go together.

        Teachers of one model may know its number of classes or not, as an engine behind a gateway does not: that number
        counts where it is known.
        """
        if self == other:
            return self
        same = (self.columns, self.sequence_inputs, sorted(self.top_k)) == (
            other.columns,
            other.sequence_inputs,
            sorted(other.top_k),
        )
        top_k = self.merged_top_k(other) if same else None
        return None if top_k is None else RowLayout(self.columns, top_k, self.sequence_inputs)

    def merged_top_k(self, other: RowLayout) -> Mapping[str, tuple[float, int | None]] | None:
        """Return temperatures and numbers of classes of both; None where they differ."""
        if sorted(self.top_k) != sorted(other.top_k):
            return None
        merged = {}
        for name, (temperature, classes) in self.top_k.items():
            other_temperature, other_classes = other.top_k[name]
            if temperature != other_temperature or (classes or other_classes) != (other_classes or classes):
                return None
            merged[name] = (temperature, classes or other_classes)
        return merged

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

    def pack_sequences(self, arrays: Mapping[str, Array], sequences: SequenceIds) -> list[bytes]:
        """Return a record for every sequence.

        Args:
            arrays: [rows of all sequences, ...] by column.
            sequences: with lengths and fingerprints.
        """
        heads = sequences.heads
        assert heads is not None
        columns = [_as_bytes(arrays[column.name], column).reshape(-1) for column in self.columns]
        widths = [column.nbytes for column in self.columns]
        records, start = [], 0
        for rows, head in heads:
            stop = start + rows
            parts = [part[start * width : stop * width].tobytes() for part, width in zip(columns, widths, strict=True)]
            records.append(b"".join([head, *parts]))
            start = stop
        return records

    def unpack_sequences(self, records: Sequence[bytes]) -> tuple[dict[str, Array], Array, Array]:
        """Return arrays [rows of all sequences, ...] by column, lengths and fingerprints."""
        lengths = np.fromiter(map(self.rows_of, records), np.int64, len(records))
        prints = np.frombuffer(b"".join(record[:FINGERPRINT_NBYTES] for record in records), "<u8").astype(np.uint64)
        starts = np.full(len(records), FINGERPRINT_NBYTES, np.int64)
        views = [memoryview(record) for record in records]
        arrays = {}
        for column in self.columns:
            stops = starts + lengths * column.nbytes
            pieces = [view[a:b] for view, a, b in zip(views, starts.tolist(), stops.tolist(), strict=True)]
            arrays[column.name] = np.frombuffer(b"".join(pieces), column.dtype).reshape(-1, *column.shape)
            starts = stops
        return arrays, lengths, prints

    def rows_of(self, record: bytes) -> int:
        """Return how many rows the record of a sequence has."""
        return (len(record) - FINGERPRINT_NBYTES) // self.row_nbytes

    def head_of(self, record: bytes) -> tuple[int, bytes]:
        """Return the rows and the fingerprint of a sequence's record."""
        return self.rows_of(record), record[:FINGERPRINT_NBYTES]

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
        columns = ", ".join(map(str, self.columns))
        if self.sequence_inputs is None:
            return columns
        return f"tokens of sequences of {', '.join(map(repr, self.sequence_inputs)) or 'nothing'} with {columns}"


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
