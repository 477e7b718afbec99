"""Files on whatever fsspec reaches: memory, an object store, HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from edl.errors import EDLError, SettingsError, SourceError
from edl.master.datasets.storage.base import WILDCARDS, DataStorage, FileStat, StorageError, has_wildcards
from edl.quoting import quote, shown

__all__ = ["RemoteStorage"]

_VERSIONS: Final = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "mtime", "created")
"""What file systems of fsspec call that which changes when a file is written again."""


class RemoteStorage(DataStorage):
    """Files on a file system of fsspec's.

    Args:
        location: a URL on it.

    Raises:
        SettingsError: fsspec or the package for such URLs is not installed, or there is none; or it is a chain of URLs.
    """

    def __init__(self, location: str) -> None:
        if "::" in location:
            raise SettingsError(
                f"{quote(location)} is a chain of URLs, which may lead from any storage to any other: name a single one"
            )
        try:
            import fsspec.core  # type: ignore[import-untyped]

            self._fs, _ = fsspec.core.url_to_fs(location)
        except (ValueError, ImportError) as exc:
            raise SettingsError(
                f"{quote(location)}: {shown(exc)}; URLs need fsspec, pip install 'elastic-distill[tables]', and the "
                f"package for this kind of them"
            ) from exc

    def absolute(self, location: str) -> str:
        """See `DataStorage.absolute`."""
        return location

    def stat_file(self, path: str) -> FileStat:
        """See `DataStorage.stat_file`."""
        with _translated(path):
            self._fs.invalidate_cache()
            info: dict[str, Any] = self._fs.info(path)
        if info.get("type") == "directory":
            raise SourceError(f"{quote(path)} is a folder, not a file: name the files in it")
        if info.get("size") is None:
            raise SourceError(f"{quote(path)} has no size: this storage cannot be read by offsets")
        version = next((str(info[name]) for name in _VERSIONS if info.get(name) is not None), "")
        return FileStat(int(info["size"]), version)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """See `DataStorage.read_range`."""
        with _translated(path):
            data: bytes = self._fs.cat_file(path, start=start, end=stop)
        return data

    def list_files(self, pattern: str) -> list[str]:
        """See `DataStorage.list_files`."""
        with _translated(pattern):
            self._fs.invalidate_cache()
            if self._fs.isfile(pattern):
                found = [pattern]
            elif self._fs.isdir(pattern):
                found = list(self._fs.find(pattern))
            elif has_wildcards(pattern):
                found = [path for path, info in self._fs.glob(pattern, detail=True).items() if info["type"] == "file"]
            else:
                found = []
            root = str(self._fs._strip_protocol(pattern)).partition("*")[0]
            return sorted({self._fs.unstrip_protocol(path) for path in found if not _is_hidden(path, root)})

    def find_root(self, location: str) -> str:
        """See `DataStorage.find_root`."""
        with _translated(location):
            path = str(self._fs._strip_protocol(location))
            if not self._fs.isfile(path) and not self._fs.isdir(path):
                path = path[: wildcards.start()] if (wildcards := WILDCARDS.search(path)) else path
                path = path.rpartition("/")[0]
            elif self._fs.isfile(path):
                path = path.rpartition("/")[0]
            return f"{str(self._fs.unstrip_protocol(path)).rstrip('/')}/"

    def is_folder(self, location: str) -> bool:
        """See `DataStorage.is_folder`."""
        with _translated(location):
            self._fs.invalidate_cache()
            return bool(self._fs.isdir(location))


def _is_hidden(path: str, root: str) -> bool:
    return any(part.startswith(".") for part in path.removeprefix(root).split("/"))


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Raise `SourceError` for the errors of the libraries that fsspec's file systems are made of."""
    try:
        yield
    except EDLError:
        raise
    except FileNotFoundError as exc:
        raise SourceError(f"{quote(path)} cannot be read on this machine: there is no such file") from exc
    except (PermissionError, IsADirectoryError) as exc:
        raise SourceError(f"{quote(path)} cannot be read on this machine: {shown(exc)}") from exc
    except Exception as exc:
        raise StorageError(f"{quote(path)} cannot be read on this machine: {type(exc).__name__}: {shown(exc)}") from exc
