"""Opens arrays in .npz and .npy files, mapped into memory where possible. Unpickles none."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edl.distill.datasets.kinds import ArrayData, LabelDataset
from edl.distill.datasets.ragged import RaggedData
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["open_arrays"]


def open_arrays(path: Path, wanted: Mapping[str, str], ids: str | None, offsets: str | None = None) -> LabelDataset:
    """Open the arrays of a file.

    Args:
        path: of the `.npz` or `.npy` file.
        wanted: input names to names of arrays.
        ids: see `open_data`.
        offsets: of sequences, the array of where each begins; see `open_data`.

    Raises:
        SettingsError: the file cannot be read, or lacks an array.
    """
    checksum = ""
    try:
        if path.suffix == ".npy":
            if offsets is not None:
                raise SettingsError(f"{str(path)!r} is one array; sequences and their offsets go into an .npz file")
            if len(wanted) > 1:
                raise SettingsError(f"{str(path)!r} is one array, for one input; several inputs go into an .npz file")
            arrays = dict.fromkeys(wanted, _mapped(path))
        else:
            file = _Npz(path)
            arrays = {name: file.get(key) for name, key in wanted.items()}
            checksum = ",".join(f"{name}={file.checksum(key)}" for name, key in sorted(wanted.items()))
            if offsets is not None:
                found = None if ids is None else _ids_array(path, ids)
                return RaggedData(arrays, file.get(offsets), found, f"{checksum},{file.checksum(offsets)}")
        return ArrayData(arrays, None if ids is None else _ids_array(path, ids), checksum)
    except (OSError, ValueError, zipfile.BadZipFile) as exc:
        if isinstance(exc, SettingsError):
            raise
        raise SettingsError(f"data {str(path)!r} cannot be read: {exc}") from exc


def _ids_array(path: Path, ids: str) -> Array:
    return _mapped(Path(ids)) if ids.endswith(".npy") else _Npz(path).get(ids)


def _mapped(path: Path) -> Array:
    array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


class _Npz:
    """Arrays of an .npz file; arrays that were stored without compression are mapped, not read."""

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
