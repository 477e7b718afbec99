"""How the outputs of a sample become a run of bytes, its record, and what a look-up returns.

A record is the fingerprint of the sample's inputs (0 where it was not computed), then each column with all rows of
the sample: one, or those of a sequence. `TopK` is three columns.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from edl.distill.cache.key import FINGERPRINT_NBYTES, Head
from edl.distill.compress import TopK, to_float16
from edl.errors import SettingsError
from edl.protocol.names import top_k_names
from edl.protocol.tensors import Array

__all__ = ["Found", "Outputs", "RowLayout", "flatten"]

Outputs: TypeAlias = Mapping[str, Array | TopK]
_TopKs: TypeAlias = Mapping[str, tuple[float, int | None]]


@dataclass(frozen=True)
class RowLayout:
    """The columns of a row.

    Attributes:
        columns: A structured dtype, little-endian, its fields sorted by name.
        top_k: Temperature and number of classes of each output that is `TopK`.
        sequence_inputs: The inputs that fingerprints of sequences cover; None where a record is a row.
    """

    columns: np.dtype[Any]
    top_k: _TopKs = field(default_factory=dict)
    sequence_inputs: tuple[str, ...] | None = None

    @property
    def _kinds(self) -> list[tuple[str, np.dtype[Any]]]:
        return [(name, self.columns[name]) for name in self.columns.names or ()]

    def merged(self, other: RowLayout) -> RowLayout | None:
        """Return the layout of records of both; None where they do not go together.

        Teachers of one model may know its number of classes or not, as an engine behind a gateway does not: that number
        counts where it is known.
        """
        same = (self.columns, self.sequence_inputs) == (other.columns, other.sequence_inputs)
        top_k = self.merged_top_k(other) if same else None
        return None if top_k is None else replace(self, top_k=top_k)

    def merged_top_k(self, other: RowLayout) -> _TopKs | None:
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

    def pack(self, arrays: Mapping[str, Array], heads: Sequence[Head]) -> list[bytes]:
        """Return a record for each head, of as many rows as it says; `arrays` are [rows of all, ...] by column."""
        columns = []
        for name, kind in self._kinds:
            array = np.ascontiguousarray(arrays[name], kind.base)
            columns.append((array.reshape(-1).view(np.uint8).data, kind.itemsize))
        records, start = [], 0
        for rows, fingerprint in heads:
            stop = start + rows
            records.append(b"".join([fingerprint, *(data[start * size : stop * size] for data, size in columns)]))
            start = stop
        return records

    def unpack(self, records: Sequence[bytes]) -> tuple[dict[str, Array], Array, Array]:
        """Return arrays [rows of all, ...] by column, the rows of each record, and fingerprints."""
        arrays: dict[str, Array] = {}
        lengths = list(map(self.rows_of, records))
        views, starts = [memoryview(record) for record in records], [FINGERPRINT_NBYTES] * len(records)
        for name, kind in self._kinds:
            stops = [start + rows * kind.itemsize for start, rows in zip(starts, lengths, strict=True)]
            data = b"".join([view[start:stop] for view, start, stop in zip(views, starts, stops, strict=True)])
            arrays[name] = np.frombuffer(data, kind.base).reshape(-1, *kind.shape)
            starts = stops
        prints = np.frombuffer(b"".join([view[:FINGERPRINT_NBYTES] for view in views]), "<u8").astype(np.uint64)
        return arrays, np.array(lengths, np.int64), prints

    def rows_of(self, record: bytes) -> int:
        """Return how many rows a record has."""
        return (len(record) - FINGERPRINT_NBYTES) // self.columns.itemsize

    def head_of(self, record: bytes) -> Head:
        """Return the rows and the fingerprint of a record."""
        return self.rows_of(record), record[:FINGERPRINT_NBYTES]

    def restore(self, arrays: Mapping[str, Array]) -> dict[str, Array | TopK]:
        """Return outputs out of columns: the arrays of `TopK` put together again."""
        outputs: dict[str, Array | TopK] = dict(arrays)
        for name, (temperature, classes) in self.top_k.items():
            ids, values, tail = (arrays[part] for part in top_k_names(name))
            for part in top_k_names(name):
                del outputs[part]
            outputs[name] = TopK(ids, values, tail, temperature, classes)
        return outputs

    def to_json(self) -> str:
        """Return the layout as text, with a checksum."""
        columns = [[name, kind.base.str, kind.shape] for name, kind in self._kinds]
        text = json.dumps([columns, dict(self.top_k), self.sequence_inputs], sort_keys=True)
        return f"{zlib.crc32(text.encode()):08x} {text}"

    @classmethod
    def from_json(cls, text: object) -> RowLayout:
        """Return the layout that `to_json` wrote.

        Raises:
            ValueError: `to_json` did not write this.
        """
        checksum, _, fields = str(text).partition(" ")
        if checksum != f"{zlib.crc32(fields.encode('utf-8', 'replace')):08x}":
            raise ValueError("the layout of its rows is damaged")
        columns, top_k, inputs = json.loads(fields)
        return cls(
            np.dtype([(name, dtype, tuple(shape)) for name, dtype, shape in columns]),
            {name: (float(temperature), classes) for name, (temperature, classes) in top_k.items()},
            tuple(inputs) if inputs is not None else None,
        )

    def __str__(self) -> str:
        columns = ", ".join(f"{name!r} {kind.base} {list(kind.shape)}" for name, kind in self._kinds)
        if self.sequence_inputs is None:
            return columns
        return f"tokens of sequences of {', '.join(map(repr, self.sequence_inputs)) or 'nothing'} with {columns}"


def flatten(outputs: Outputs, rows: int, *, half: bool = False) -> tuple[dict[str, Array], RowLayout]:
    """Return outputs [rows, ...] as plain arrays by column, and their layout.

    With `half`, floating-point values become float16, except for the tail's mass of `TopK`.

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
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise SettingsError(f"output {name!r} is {array.dtype}: the cache keeps numbers and booleans only")
        if 0 in array.shape[1:]:
            raise SettingsError(f"output {name!r} has rows of shape {list(array.shape[1:])}: nothing to keep")
    columns = [(name, array.dtype.newbyteorder("<"), array.shape[1:]) for name, array in sorted(arrays.items())]
    return arrays, RowLayout(np.dtype(columns), top_k)


def _half(array: Array, half: bool) -> Array:
    return to_float16(array) if half and array.dtype.kind == "f" else array


@dataclass(frozen=True, eq=False)
class Found:
    """Rows, or sequences, that a look-up found.

    Attributes:
        mask: bool [ids], which of the ids are there.
        outputs: Arrays [rows found, ...] or `TopK`, in the order of the ids; empty if none is there. Arrays may be
            read-only.
        lengths: int64 [ids] of sequences, how many rows each has (0 where that is not known); None where an id is a
            row.
    """

    mask: Array
    outputs: dict[str, Array | TopK]
    lengths: Array | None = None

    @property
    def row_mask(self) -> Array:
        """Which rows are there, bool [rows]."""
        found: Array = self.mask if self.lengths is None else np.repeat(self.mask, self.lengths)
        return found

    @property
    def complete(self) -> bool:
        """Whether every id was there."""
        return bool(self.mask.all())

    def filled(self, rest: Outputs) -> dict[str, Array | TopK]:
        """Return outputs of all rows, in the cache's dtypes.

        Args:
            rest: Outputs of the rows that were not there, in their order.

        Raises:
            SettingsError: `rest` has other outputs or shapes than the rows of the cache.
        """
        if not self.outputs:
            return dict(rest)
        mask = self.row_mask
        have, layout = flatten(self.outputs, int(mask.sum()))
        new, other = flatten(rest, int((~mask).sum()))
        top_k = layout.merged_top_k(other)
        shapes, other_shapes = ({name: array.shape[1:] for name, array in arrays.items()} for arrays in (have, new))
        if top_k is None or shapes != other_shapes:
            remedy = "rows of several shapes cannot be kept: pad them alike, or leave the cache out"
            raise SettingsError(f"rows of the cache are {layout}, the others {other}; {remedy}")
        arrays = {}
        for name, found in have.items():
            array: Array = np.empty((len(mask), *found.shape[1:]), found.dtype)
            added = new[name]
            array[mask] = found
            array[~mask] = to_float16(added) if found.dtype == np.float16 and added.dtype.kind == "f" else added
            arrays[name] = array
        return replace(layout, top_k=top_k).restore(arrays)
