"""A storage of files, and what is common to all of them."""

from __future__ import annotations

import abc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from edl.errors import ProtocolError, SettingsError, SourceError
from edl.quoting import quote

__all__ = [
    "WILDCARDS",
    "DataStorage",
    "FileStat",
    "StorageError",
    "check_paths",
    "file_changed",
    "has_wildcards",
    "is_url",
]

_BLOCK_NBYTES: Final = 4 << 20
"""Bytes read at a time: a disk is at its full speed well below, and a reader holds two of them at most."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
WILDCARDS = re.compile(r"[*?\[]")


class StorageError(SourceError):
    """A file could not be read now: the storage may be away. A follower tries again, a reader's shard has failed."""


def is_url(location: str) -> bool:
    """Tell whether a location is a URL, not a path on this machine."""
    return _URL.match(location) is not None


def has_wildcards(location: str) -> bool:
    """Tell whether a location may stand for several files."""
    return WILDCARDS.search(location) is not None


def check_paths(location: str, paths: Iterable[str]) -> None:
    """Refuse an index of which a file is not at the data set's location: it came over the network.

    Args:
        location: of the data set, absolute.
        paths: of its files, absolute.

    Raises:
        ProtocolError: a path leads elsewhere.
    """
    wildcard = WILDCARDS.search(location)
    folder = location.rstrip("/") if wildcard is None else location[: wildcard.start()].rpartition("/")[0]
    for path in paths:
        if is_url(location):  # file systems of fsspec have several spellings of a URL
            good = is_url(path) and (_is_local_url(location) or not _is_local_url(path))
        else:
            good = not is_url(path) and (path == location or path.startswith(f"{folder}/"))
        if not good or (".." in path and ".." in path.split("/")):
            raise ProtocolError(f"the index of the data set names {quote(path)}, which is not at {quote(location)}")


def _is_local_url(location: str) -> bool:
    return location.partition("://")[0].lower() in ("file", "local")


def file_changed(path: str, how: str) -> SourceError:
    """Return the error of a file that is not what it was when the data set was created.

    Args:
        path: of the file.
        how: it differs.
    """
    return SourceError(
        f"{quote(path)} is not as it was indexed: {how}. Put the file back as it was, and retry what is poisoned; or "
        f"create the data set again, under another name"
    )


@dataclass(frozen=True)
class FileStat:
    """What a storage says of a file.

    Attributes:
        nbytes: its size.
        version: changes when the file is written again: its time of change, or an object's tag; empty if unknown.
    """

    nbytes: int
    version: str


class DataStorage(abc.ABC):
    """Files by path. All errors are `SourceError` and name the file."""

    @abc.abstractmethod
    def absolute(self, location: str) -> str:
        """Return the location as it means the same in another folder."""

    @abc.abstractmethod
    def stat_file(self, path: str) -> FileStat:
        """Return size and version of a file.

        Raises:
            SourceError: it is not there, or is no file.
        """

    @abc.abstractmethod
    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` of a file; fewer where it ends.

        Raises:
            SourceError: it cannot be read.
        """

    @abc.abstractmethod
    def list_files(self, pattern: str) -> list[str]:
        """Return the files that a path, a folder (with all folders in it) or a pattern stands for, sorted.

        Names that begin with a dot are left out where they are not written out.

        Raises:
            SourceError: a folder cannot be listed: files might be missing.
        """

    @abc.abstractmethod
    def find_root(self, location: str) -> str:
        """Return what the paths of all files of a location begin with, up to and with a slash."""

    @abc.abstractmethod
    def is_folder(self, location: str) -> bool:
        """Tell whether there is a folder.

        Raises:
            SourceError: the storage does not say.
        """

    def find_files(self, location: str) -> list[str]:
        """Return the files of a location, of which there is one at least.

        Raises:
            SettingsError: there is none.
            SourceError: a folder cannot be listed.
        """
        found = self.list_files(location)
        if not found:
            what = "no file matches" if has_wildcards(location) else "there is no file at"
            raise SettingsError(f"{what} {quote(location)}; workers need it under the same path on their machines")
        return found

    def read_blocks(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes `start` to `stop` of a file, block by block.

        Raises:
            SourceError: the file cannot be read, or ends before.
        """
        while start < stop:
            block = self.read_range(path, start, min(stop, start + _BLOCK_NBYTES))
            if not block:
                raise file_changed(path, f"it was cut off, and ends at byte {start}, not {stop}")
            yield block
            start += len(block)
