"""Files by path or URL: which there are, how large they are, and ranges of their bytes.

A path is on this machine and needs nothing but Python. A URL goes through fsspec. Every error is a `SourceError` and
names the file. The meaning of the bytes does not belong here.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edl.errors import EDLError, ProtocolError, SettingsError, SourceError
from edl.quoting import quote, shown

__all__ = [
    "FileStat",
    "Storage",
    "StorageError",
    "check_paths",
    "file_changed",
    "has_wildcards",
    "open_storage",
]

_BLOCK_NBYTES: Final = 4 << 20
"""Bytes read at a time: a disk reaches its full speed well below that, and a reader holds at most two blocks."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_WILDCARDS = re.compile(r"[*?\[]")
_PERMANENT: Final = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
}
"""Errors that another attempt would not change."""
_VERSIONS: Final = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "mtime", "created")
"""Names that file systems of fsspec give to what changes when a file is written again."""


class StorageError(SourceError):
    """A file could not be read now: the storage may be away. A follower tries again; a reader's shard fails."""


@dataclass(frozen=True)
class FileStat:
    """Size and version of a file.

    Attributes:
        nbytes: Size in bytes.
        version: Changes when the file is written again: its modification time, or an object's tag. Empty if unknown.
    """

    nbytes: int
    version: str


def open_storage(location: str) -> Storage:
    """Return the storage for a path on this machine, or for a URL that fsspec knows, such as `s3://bucket/key`.

    Raises:
        SettingsError: There is no such kind of storage here.
    """
    return _RemoteStorage(location) if _is_url(location) else Storage()


def has_wildcards(location: str) -> bool:
    """Tell whether a location may stand for several files."""
    return _WILDCARDS.search(location) is not None


def check_paths(location: str, paths: Iterable[str]) -> None:
    """Refuse an index that names a file outside the data set's location, since it came over the network.

    Args:
        location: Absolute location of the data set.
        paths: Absolute paths of its files.

    Raises:
        ProtocolError: A path leads elsewhere.
    """
    folder = _plain_folder(location) if has_wildcards(location) else location.rstrip("/")
    for path in paths:
        if _is_url(location):  # file systems of fsspec have several spellings of a URL
            good = _is_url(path) and (_is_local_url(location) or not _is_local_url(path))
        else:
            good = not _is_url(path) and (path == location or path.startswith(f"{folder}/"))
        if not good or ".." in path.split("/"):
            raise ProtocolError(f"the index of the data set names {quote(path)}, which is not at {quote(location)}")


def file_changed(path: str, how: str) -> SourceError:
    """Return the error for a file that differs from the one that was indexed."""
    return SourceError(
        f"{quote(path)} is not as it was indexed: {how}. Put the file back as it was, and retry what is poisoned; or "
        f"create the data set again, under another name"
    )


class Storage:
    """Files by path: here those of this machine; `_RemoteStorage` has the others."""

    def absolute(self, location: str) -> str:
        """Return the location in a form that means the same in another working folder."""
        path = Path(location).expanduser().absolute()
        if ".." not in path.parts:
            return str(path)
        wild = list(itertools.dropwhile(lambda part: not has_wildcards(part), path.parts))
        plain = path.parts[: len(path.parts) - len(wild)]
        return str(Path(*plain).resolve().joinpath(*wild))  # the parent of a link is not where its path says

    def stat_file(self, path: str) -> FileStat:
        """Return size and version of a file; one that is missing or not a regular file is an error."""
        with _translated(path):
            found = Path(path).stat()
        if stat.S_ISDIR(found.st_mode):
            raise SourceError(f"{quote(path)} is a folder, not a file: name the files in it, as with /*")
        if not stat.S_ISREG(found.st_mode):
            raise SourceError(f"{quote(path)} is not a regular file: a pipe or device cannot be read by offsets")
        return FileStat(found.st_size, str(found.st_mtime_ns))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` of a file; fewer where it ends."""
        with _translated(path), Path(path).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def open_file(self, path: str) -> Any:
        """Return the file, opened to be read by offsets."""
        with _translated(path):
            return Path(path).open("rb")

    def list_files(self, pattern: str) -> list[str]:
        """Return the files that a path, a folder (with all folders in it) or a pattern stands for, sorted.

        Hidden files are left out unless their names are given. A folder that cannot be listed is an error: files might
        be missing.
        """
        with _translated(pattern):
            if self.is_folder(pattern):
                return sorted(set(_expand(pattern, ["**", "*"], ())))
            if self.is_file(pattern) or not has_wildcards(pattern):
                return [pattern] if self.is_file(pattern) else []
            anchor = Path(pattern).anchor
            segments = [part for part in Path(pattern).parts if part != anchor]
            return sorted(set(_expand(anchor or ".", segments, ())))

    def is_folder(self, location: str) -> bool:
        """Tell whether there is a folder."""
        with _translated(location):
            return Path(location).is_dir()

    def is_file(self, location: str) -> bool:
        """Tell whether there is anything but a folder."""
        return os.path.lexists(location) and not self.is_folder(location)

    def find_root(self, location: str) -> str:
        """Return what the paths of all files of a location begin with, including a slash at the end."""
        folder = self._canonical(location)
        if not self.is_folder(location):
            is_pattern = has_wildcards(location) and not self.is_file(location)
            folder = _plain_folder(folder) if is_pattern else folder.rpartition("/")[0]
        return f"{folder.rstrip('/')}/"

    def find_files(self, location: str) -> tuple[str, list[str], list[FileStat]]:
        """Return the absolute location, its files, of which there is at least one, and what is known of each.

        Raises:
            SettingsError: There is no file.
        """
        location = self.absolute(location)
        found = self.list_files(location)
        if not found:
            what = "no file matches" if has_wildcards(location) else "there is no file at"
            raise SettingsError(f"{what} {quote(location)}; workers need it under the same path on their machines")
        return location, found, [self.stat_file(path) for path in found]

    def read_blocks(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes `start` to `stop` of a file block by block; a file that ends before is an error."""
        while start < stop:
            block = self.read_range(path, start, min(stop, start + _BLOCK_NBYTES))
            if not block:
                raise file_changed(path, f"it was cut off, and ends at byte {start}, not {stop}")
            yield block
            start += len(block)

    def _canonical(self, location: str) -> str:
        """Return a location in the spelling that `list_files` has."""
        return location


class _RemoteStorage(Storage):
    """Files on a file system of fsspec: an object store, HTTP, memory.

    Raises:
        SettingsError: fsspec or its package for such URLs is not installed, or there is none; or it is a chain of URLs.
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
        return location

    def stat_file(self, path: str) -> FileStat:
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
        with _translated(path):
            data: bytes = self._fs.cat_file(path, start=start, end=stop)
        return data

    def open_file(self, path: str) -> Any:
        with _translated(path):
            return self._fs.open(path, "rb")

    def list_files(self, pattern: str) -> list[str]:
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
            hidden = (any(part.startswith(".") for part in path.removeprefix(root).split("/")) for path in found)
            return sorted(
                {self._fs.unstrip_protocol(path) for path, hide in zip(found, hidden, strict=True) if not hide}
            )

    def is_folder(self, location: str) -> bool:
        with _translated(location):
            self._fs.invalidate_cache()
            return bool(self._fs.isdir(location))

    def is_file(self, location: str) -> bool:
        with _translated(location):
            self._fs.invalidate_cache()
            return bool(self._fs.isfile(location))

    def _canonical(self, location: str) -> str:
        return str(self._fs.unstrip_protocol(self._fs._strip_protocol(location)))


def _is_url(location: str) -> bool:
    return _URL.match(location) is not None


def _is_local_url(location: str) -> bool:
    return location.partition("://")[0].lower() in ("file", "local")


def _plain_folder(pattern: str) -> str:
    """Return the folders before the first wildcard, without a slash at the end."""
    return _WILDCARDS.split(pattern, maxsplit=1)[0].rpartition("/")[0]


def _expand(folder: str, segments: list[str], above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Yield the files under `folder` that match; `above` are the folders it is in, to which a link may lead back.

    Neither `glob.glob` nor fsspec can be used here: both leave out folders that they cannot list.
    """
    segment, rest = segments[0], segments[1:]
    if segment == "**":
        found = Path(folder).stat()
        place = (found.st_dev, found.st_ino)
        if place in above:
            return
        yield from _expand(folder, rest or ["*"], ())
        for entry in _entries(folder):
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _expand(entry.path, segments, (*above, place))
        return
    if not has_wildcards(segment):
        path = str(Path(folder, segment))
        if rest and Path(path).is_dir():
            yield from _expand(path, rest, ())
        elif not rest and os.path.lexists(path) and not Path(path).is_dir():
            yield path
        return
    matches = re.compile(fnmatch.translate(segment)).match
    for entry in _entries(folder):
        if matches(entry.name) and (segment.startswith(".") or not entry.name.startswith(".")):
            if rest and entry.is_dir():
                yield from _expand(entry.path, rest, ())
            elif not rest and not entry.is_dir():
                yield entry.path


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Raise `SourceError` for whatever a file system raises: those of fsspec are made of many libraries."""
    try:
        yield
    except EDLError:
        raise
    except Exception as exc:
        permanent = isinstance(exc, (FileNotFoundError, PermissionError, IsADirectoryError))
        permanent = permanent or (not _is_url(path) and isinstance(exc, ValueError))  # NUL in a path
        name, words = path, f"{type(exc).__name__}: {shown(exc)}"
        if isinstance(exc, OSError) and exc.errno is not None:
            permanent = permanent or exc.errno in _PERMANENT
            name, words = str(exc.filename or path), exc.strerror or words
        elif isinstance(exc, FileNotFoundError):
            words = "there is no such file"
        kind = SourceError if permanent else StorageError
        raise kind(f"{quote(name)} cannot be read on this machine: {words}") from exc
