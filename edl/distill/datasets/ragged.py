"""Sequences of any length in arrays that lie behind one another, and the files that have them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edl.distill.cache import SequenceIds, fingerprints_of
from edl.distill.datasets.kinds import Batch, IndexedData, KnownFilter
from edl.errors import SettingsError
from edl.protocol.names import POSITION
from edl.protocol.tensors import Array

if TYPE_CHECKING:
    import pyarrow

__all__ = ["RaggedData", "open_jsonl", "open_parquet"]

_BLOCK = 4096
"""Sequences whose fingerprints are made at a time: the tokens of some megabytes."""


class RaggedData(IndexedData):
    """Sequences of any length: arrays [tokens of all, ...] by input, and where each begins.

    Args:
        arrays: by input name, perhaps mapped from files.
        offsets: [sequences + 1], rising from 0 to the number of all tokens.
        ids: integers or strings [sequences]; None: a sequence's position is its id.
        checksum: see `IndexedData`.

    Attributes:
        position_input: the model's input that holds positions; it need not be among the arrays.
        empty: sequences without tokens, which get no label.
    """

    sequences = True
    position_input = POSITION

    def __init__(
        self, arrays: Mapping[str, Array], offsets: Array, ids: Array | None = None, checksum: str = ""
    ) -> None:
        counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
            raise SettingsError(
                f"offsets {offsets.dtype} {list(offsets.shape)}: expected integers, one more than there are sequences"
            )
        offsets = offsets.astype(np.int64)
        wrong = [name for name, count in counts.items() if count != offsets[-1]]
        if offsets[0] or (np.diff(offsets) < 0).any() or wrong:
            raise SettingsError(
                f"offsets from {offsets[0]} to {offsets[-1]}: they must rise from 0 to the number of tokens, which is "
                f"{', '.join(f'{count} in {name!r}' for name, count in counts.items())}"
            )
        super().__init__(len(offsets) - 1, ids, checksum)
        self.inputs = tuple(arrays)
        self.empty = int(np.count_nonzero(np.diff(offsets) == 0))
        self._arrays = dict(arrays)
        self._offsets = offsets

    def load(self, parts: Iterable[Array]) -> Iterator[Batch]:
        """See `IndexedData.load`. Of each input a list has an array [tokens, ...] for each sequence."""
        for part in parts:
            places = list(zip(self._offsets[part].tolist(), self._offsets[part + 1].tolist(), strict=True))
            fields: dict[str, Any] = {
                name: [np.asarray(array[start:stop]) for start, stop in places] for name, array in self._arrays.items()
            }
            yield self.ids_of(part), fields

    def lookup_of(self, batch: Batch) -> SequenceIds:
        """See `LabelDataset.lookup_of`. A sequence is known if its label is of the same text."""
        ids, fields = batch
        columns: dict[str, Sequence[Array]] = dict(fields)
        positions = columns.pop(self.position_input, None)
        lengths = np.array([len(part) for part in next(iter(columns.values()))], np.int64)
        arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
        prints = fingerprints_of(arrays, lengths, np.concatenate(positions) if positions is not None else None)
        return SequenceIds(ids, lengths, prints, tuple(sorted(columns)))

    def unknown(self, known: KnownFilter, start: int = 0, stop: int | None = None) -> Array:
        """See `IndexedData.unknown`. Sequences without tokens need no label."""
        stop = self.rows if stop is None else stop
        there = start + np.flatnonzero(np.diff(self._offsets[start : stop + 1]))
        found = []
        for begin in range(0, len(there), _BLOCK):
            index = there[begin : begin + _BLOCK]
            (batch,) = self.load([index])
            found.append(index[~known(self.lookup_of(batch))])
        return np.concatenate(found) if found else np.empty(0, np.int64)


def open_jsonl(path: Path, wanted: Mapping[str, str], ids: str | None) -> RaggedData:
    """Read sequences from a file with a JSON object on each line, such as `{"input_ids": [5, 3, 9]}`.

    Blank lines are left out; lines may end as on Windows, and the file may begin with a byte order mark.

    Args:
        path: of the file.
        wanted: input names to keys.
        ids: key of the ids; None: a sequence's position is its id.

    Raises:
        SettingsError: the file cannot be read, or a line is something else.
    """
    columns: dict[str, list[Any]] = {name: [] for name in wanted}
    found_ids: list[Any] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    _take_line(json.loads(text), wanted, ids, columns, found_ids, number)
    except OSError as exc:
        raise SettingsError(f"data {str(path)!r} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, TypeError, RecursionError) as exc:
        raise SettingsError(f"data {str(path)!r}, line {number}: {exc}") from exc
    return _of_columns(path, {name: _joined(name, parts, path) for name, parts in columns.items()}, found_ids, ids)


def open_parquet(path: Path, wanted: Mapping[str, str], ids: str | None) -> RaggedData:
    """Read sequences from list columns of a Parquet file. A list that is null has no tokens.

    Args:
        path: of the file.
        wanted: input names to columns.
        ids: column of the ids; None: a sequence's position is its id.

    Raises:
        SettingsError: the file cannot be read, or has no such columns.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        raise SettingsError(f"data {str(path)!r} needs pyarrow: pip install 'elastic-distill[tables]'") from exc
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = list(dict.fromkeys([*wanted.values(), *([ids] if ids is not None else [])]))
            missing = [name for name in names if name not in file.schema_arrow.names]
            if missing:
                there = ", ".join(file.schema_arrow.names)
                raise SettingsError(f"{str(path)!r} has no column {missing[0]!r}, only {there}")
            table = file.read(columns=names)
            columns = {name: _list_column(path, key, table.column(key)) for name, key in wanted.items()}
            found_ids = table.column(ids).to_pylist() if ids is not None else []
    except (OSError, pyarrow.ArrowException) as exc:
        raise SettingsError(f"data {str(path)!r} cannot be read: {exc}") from exc
    return _of_columns(path, columns, found_ids, ids)


def _take_line(
    found: Any, wanted: Mapping[str, str], ids: str | None, columns: dict[str, list[Any]], found_ids: list[Any], at: int
) -> None:
    if not isinstance(found, dict):
        raise TypeError(
            f"it has a {type(found).__name__}, and must have an object, such as {{{next(iter(wanted))!r}: …}}"
        )
    for key in [*wanted.values(), *([ids] if ids is not None else [])]:
        if key not in found:
            raise ValueError(f"it has no {key!r}, only {', '.join(map(repr, found)) or 'nothing'}")
    for name, key in wanted.items():
        columns[name].append(_numbers(key, found[key]))
    if ids is not None:
        found_ids.append(found[ids])


def _numbers(key: str, found: Any) -> Array:
    if found is None:
        return np.empty(0)
    try:
        array = np.array(found)
    except ValueError as exc:
        raise ValueError(f"{key!r} has lists of different lengths in it: {exc}") from exc
    if not isinstance(found, list) or array.dtype.kind not in "biuf":
        raise TypeError(f"{key!r} is no list of numbers: tokens are numbers, as a tokenizer makes them of a text")
    return array


def _joined(name: str, parts: list[Array], path: Path) -> tuple[Array, Array]:
    """Return all parts behind one another, and their lengths."""
    lengths = np.array([len(part) for part in parts], np.int64)
    full = [part for part in parts if len(part)]
    if len({part.shape[1:] for part in full}) > 1 or len({part.dtype.kind in "biu" for part in full}) > 1:
        raise SettingsError(f"data {str(path)!r}: {name!r} has values of different shapes or types")
    array = np.concatenate(full) if full else np.empty(0, np.int32)
    return _narrowed(array), lengths


def _narrowed(array: Array) -> Array:
    """Return token ids in half the memory, where all of them fit."""
    if array.dtype != np.int64 or not array.size or array.min() < -(2**31) or array.max() >= 2**31:
        return array
    return array.astype(np.int32)


def _list_column(path: Path, key: str, column: pyarrow.ChunkedArray) -> tuple[Array, Array]:
    import pyarrow.compute
    import pyarrow.types

    kind = column.type
    lists = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    if not any(is_list(kind) for is_list in lists) or not (
        pyarrow.types.is_integer(kind.value_type) or pyarrow.types.is_floating(kind.value_type)
    ):
        raise SettingsError(f"{str(path)!r}: column {key!r} is {kind}, and must be a list of numbers for each row")
    values, lengths = [], []
    for chunk in column.chunks:
        found = chunk.flatten()  # without what lies behind null lists
        if found.null_count:
            raise SettingsError(f"{str(path)!r}: a list in column {key!r} has null in it, which is no token")
        values.append(found.to_numpy(zero_copy_only=False))
        lengths.append(pyarrow.compute.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False))
    if not values:
        return np.empty(0, np.int32), np.empty(0, np.int64)
    return _narrowed(np.concatenate(values)), np.concatenate(lengths).astype(np.int64)


def _of_columns(
    path: Path, columns: Mapping[str, tuple[Array, Array]], found_ids: list[Any], ids: str | None
) -> RaggedData:
    first = next(iter(columns.values()))[1]
    if not len(first):
        raise SettingsError(f"data {str(path)!r} has no sequences")
    for name, (_, lengths) in columns.items():
        other = np.flatnonzero(lengths != first)
        if other.size:
            raise SettingsError(
                f"data {str(path)!r}: sequence {other[0]} has {lengths[other[0]]} values of {name!r}, and "
                f"{first[other[0]]} of {next(iter(columns))!r}; each token has one of each"
            )
    strange = next((found for found in found_ids if type(found) not in (int, str)), None)
    if strange is not None or (ids is not None and None in found_ids):
        raise SettingsError(f"data {str(path)!r}: the id {strange!r} is neither an integer nor a string")
    ids_array = None
    if ids is not None:
        ids_array = np.empty(len(found_ids), object)  # numpy's own strings would lose zeros at their ends
        ids_array[:] = found_ids
    offsets = np.concatenate([[0], np.cumsum(first)])
    arrays = {name: array for name, (array, _) in columns.items()}
    total = zlib.crc32(offsets.tobytes())
    for name, array in sorted(arrays.items()):
        total = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(name.encode(), total))
    return RaggedData(arrays, offsets, ids_array, f"{total:08x}")
