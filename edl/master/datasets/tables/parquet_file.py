"""A Parquet file on a storage: its footer, and the bytes that pyarrow asks for."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from edl.errors import EDLError, SettingsError, SourceError
from edl.master.datasets.storage import DataStorage
from edl.quoting import quote, shown

__all__ = ["RangeFile", "import_pyarrow", "parse_footer", "read_footer", "translated"]

_TAIL: Final = struct.Struct("<I4s")
"""Ends a file: the footer's length, and the magic (https://parquet.apache.org/docs/file-format)."""


class RangeFile(io.RawIOBase):
    """A file of a storage as pyarrow reads it.

    Args:
        storage: that it is on.
        path: of the file.
        nbytes: its size.
    """

    def __init__(self, storage: DataStorage, path: str, nbytes: int) -> None:
        self._storage = storage
        self._path = path
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset."""
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as many bytes as there are, and fit in."""
        data = self._storage.read_range(self._path, self._at, min(self._at + len(buffer), self._nbytes))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def import_pyarrow() -> None:
    """Import pyarrow, which is an extra.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as exc:
        raise SettingsError("Parquet needs pyarrow: pip install 'elastic-distill[tables]'") from exc


def read_footer(storage: DataStorage, path: str, nbytes: int) -> bytes:
    """Return the end of a file, from the footer's first byte on.

    Args:
        storage: that it is on.
        path: of the file.
        nbytes: its size.

    Raises:
        SourceError: it is no Parquet file, or cannot be read.
    """
    tail = storage.read_range(path, max(0, nbytes - _TAIL.size), nbytes)
    if len(tail) < _TAIL.size:
        raise SourceError(f"{quote(path)} is no Parquet file: it has {nbytes} bytes")
    length, magic = _TAIL.unpack(tail)
    if magic == b"PARE":
        raise SourceError(f"{quote(path)} has an encrypted footer, which EDL has no keys for")
    if magic != b"PAR1" or length + _TAIL.size > nbytes:
        raise SourceError(f"{quote(path)} is no Parquet file, or is cut off: it does not end in a footer")
    return storage.read_range(path, nbytes - _TAIL.size - length, nbytes)


def parse_footer(path: str, footer: bytes) -> Any:
    """Return pyarrow's `FileMetaData` of what `read_footer` returned.

    Raises:
        SourceError: it cannot be read.
    """
    import pyarrow.parquet

    with translated(path):
        return pyarrow.parquet.read_metadata(io.BytesIO(b"PAR1" + footer))


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Raise `SourceError` for pyarrow's errors, which are of several builtin classes."""
    import pyarrow

    try:
        yield
    except EDLError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, NotImplementedError) as exc:
        raise SourceError(f"{quote(path)} cannot be read as Parquet: {shown(exc)}") from exc
