"""Arrays in .npy and .npz files, and sequences of tokens in JSON lines and list columns of Parquet, to be labelled.

Arrays are mapped into memory where that is possible, and never unpickled. Sequences are held as one array of all tokens
per input, and where each sequence begins.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edl.datasets.rows import ArrayData, LabelDataset, RaggedData
from edl.datasets.tables import import_pyarrow
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["open_arrays", "open_jsonl", "open_parquet_lists"]


def open_arrays(path: Path, wanted: Mapping[str, str], ids: str | None, offsets: str | None) -> LabelDataset:
    """Open the arrays of an `.npz` or `.npy` file; see `edl.datasets.opening.open_data`."""
    try:
        if path.suffix == ".npy":
            if offsets is not None or len(wanted) > 1:
                instead = "sequences and their offsets" if offsets is not None else "several inputs"
                raise SettingsError(f"{str(path)!r} is one array, for one input; {instead} go into an .npz file")
            return ArrayData(dict.fromkeys(wanted, _mapped(path)), _ids_array(path, ids))
        file = _Npz(path)
        arrays = {name: file.get(key) for name, key in wanted.items()}
        checksum = ",".join(f"{name}={file.checksum(key)}" for name, key in sorted(wanted.items()))
        if offsets is None:
            return ArrayData(arrays, _ids_array(path, ids), checksum)
        begins = file.get(offsets)
        return RaggedData(arrays, begins, _ids_array(path, ids), f"{checksum},{file.checksum(offsets)}")
    except SettingsError:
        raise
    except (OSError, ValueError, zipfile.BadZipFile) as exc:
        raise SettingsError(f"data {str(path)!r} cannot be read: {exc}") from exc


def open_jsonl(path: Path, wanted: Mapping[str, str], ids: str | None) -> RaggedData:
    """Read sequences from a file with a JSON object on each line, such as `{"input_ids": [5, 3, 9]}`.

    Blank lines are left out. Lines may end as on Windows, and the file may begin with a byte order mark.
    """
    columns: dict[str, list[Array]] = {name: [] for name in wanted}
    found_ids: list[Any] = []
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not text.strip():
                    continue
                found = json.loads(text)
                if not isinstance(found, dict):
                    example = f"{{{next(iter(wanted))!r}: …}}"
                    raise TypeError(f"it has a {type(found).__name__}, and must have an object, such as {example}")
                for key in [*wanted.values(), *([ids] if ids is not None else [])]:
                    if key not in found:
                        raise ValueError(f"it has no {key!r}, only {', '.join(map(repr, found)) or 'nothing'}")
                for name, key in wanted.items():
                    columns[name].append(_numbers(key, found[key]))
                found_ids.append(None if ids is None else found[ids])
    except OSError as exc:
        raise SettingsError(f"data {str(path)!r} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, TypeError, RecursionError) as exc:
        raise SettingsError(f"data {str(path)!r}, line {number}: {exc}") from exc
    return _of_columns(path, {name: _joined(name, parts, path) for name, parts in columns.items()}, found_ids, ids)


def open_parquet_lists(path: Path, wanted: Mapping[str, str], ids: str | None) -> RaggedData:
    """Read sequences from list columns of a Parquet file. A list that is null has no tokens."""
    import_pyarrow()
    import pyarrow.parquet

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
    except SettingsError:
        raise
    except (OSError, pyarrow.ArrowException) as exc:
        raise SettingsError(f"data {str(path)!r} cannot be read: {exc}") from exc
    return _of_columns(path, columns, found_ids, ids)


class _Npz:
    """Arrays of an .npz file; those that were stored without compression are mapped, not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with zipfile.ZipFile(path) as archive:
            self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    def get(self, name: str) -> Array:
        info = self._members.get(name)
        if info is None:
            raise SettingsError(f"{str(self._path)!r} has no array {name!r}, only {', '.join(sorted(self._members))}")
        mapped = self._map(info) if info.compress_type == zipfile.ZIP_STORED else None
        if mapped is not None:
            return mapped
        with np.load(self._path, allow_pickle=False) as file:
            array: Array = file[name]
        return array

    def checksum(self, name: str) -> str:
        """Return the CRC-32 of an array that is there, as the file's directory has it."""
        return f"{self._members[name].CRC:08x}"

    def _map(self, info: zipfile.ZipInfo) -> Array | None:
        with self._path.open("rb") as file:
            file.seek(info.header_offset + 26)  # lengths of name and extra field, at the end of the local header
            lengths = file.read(4)
            file.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), 1)
            version = np.lib.format.read_magic(file)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version not in readers:
                return None
            shape, fortran, dtype = readers[version](file)
            if dtype.hasobject or 0 in shape:
                return None
            return np.memmap(self._path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _ids_array(path: Path, ids: str | None) -> Array | None:
    if ids is None:
        return None
    return _mapped(Path(ids)) if ids.endswith(".npy") else _Npz(path).get(ids)


def _mapped(path: Path) -> Array:
    array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _numbers(key: str, found: Any) -> Array:
    if found is None:
        return np.empty(0)
    try:
        array = np.array(found)
    except ValueError as exc:
        raise ValueError(f"{key!r} has lists of different lengths in it: {exc}") from exc
    if not isinstance(found, list) or array.dtype.kind not in "biuf":
        raise TypeError(f"{key!r} is not a list of numbers: tokens are numbers, as a tokenizer makes them of a text")
    return array


def _joined(name: str, parts: list[Array], path: Path) -> tuple[Array, Array]:
    """Return all parts in one array, and their lengths."""
    lengths = np.array([len(part) for part in parts], np.int64)
    full = [part for part in parts if len(part)]
    if len({(part.shape[1:], part.dtype.kind in "biu") for part in full}) > 1:
        raise SettingsError(f"data {str(path)!r}: {name!r} has values of different shapes or types")
    return _narrowed(np.concatenate(full) if full else np.empty(0, np.int32)), lengths


def _narrowed(array: Array) -> Array:
    """Return token ids in half the memory, where all of them fit."""
    if array.dtype != np.int64 or not array.size or array.min() < -(2**31) or array.max() >= 2**31:
        return array
    return array.astype(np.int32)


def _list_column(path: Path, key: str, column: Any) -> tuple[Array, Array]:
    """Return all values of a list column of a table, and the lengths of its lists."""
    import pyarrow.compute
    import pyarrow.types as types

    kind = column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        raise SettingsError(f"{str(path)!r}: column {key!r} is {kind}, and must be a list of numbers for each row")
    values = [chunk.flatten() for chunk in column.chunks]  # without what lies behind null lists
    if any(found.null_count for found in values):
        raise SettingsError(f"{str(path)!r}: a list in column {key!r} has null in it, which is not a token")
    if not values:
        return np.empty(0, np.int32), np.empty(0, np.int64)
    lengths = pyarrow.compute.list_value_length(column).fill_null(0).to_numpy()
    return _narrowed(np.concatenate([found.to_numpy(zero_copy_only=False) for found in values])), lengths


def _of_columns(
    path: Path, columns: Mapping[str, tuple[Array, Array]], found_ids: list[Any], ids: str | None
) -> RaggedData:
    first = next(iter(columns.values()))[1].astype(np.int64)
    if not len(first):
        raise SettingsError(f"data {str(path)!r} has no sequences")
    for name, (_, lengths) in columns.items():
        other = np.flatnonzero(lengths != first)
        if other.size:
            raise SettingsError(
                f"data {str(path)!r}: sequence {other[0]} has {lengths[other[0]]} values of {name!r}, and "
                f"{first[other[0]]} of {next(iter(columns))!r}; each token has one of each"
            )
    ids_array = None
    if ids is not None:
        for found in found_ids:
            if type(found) not in (int, str):
                raise SettingsError(f"data {str(path)!r}: the id {found!r} is neither an integer nor a string")
        ids_array = np.empty(len(found_ids), object)  # numpy's own strings would lose zeros at their ends
        ids_array[:] = found_ids
    offsets = np.concatenate([[0], np.cumsum(first)])
    arrays = {name: array for name, (array, _) in columns.items()}
    total = zlib.crc32(offsets.tobytes())
    for name, array in sorted(arrays.items()):
        total = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(name.encode(), total))
    return RaggedData(arrays, offsets, ids_array, f"{total:08x}")
