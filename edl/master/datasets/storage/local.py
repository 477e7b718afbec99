"""Files of this machine."""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edl.errors import SourceError
from edl.master.datasets.storage.base import DataStorage, FileStat, StorageError, has_wildcards
from edl.quoting import quote

__all__ = ["LocalStorage"]

_PERMANENT: Final = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
"""What another attempt would not change."""


class LocalStorage(DataStorage):
    """Files of this machine. Unlike `glob.glob`, a folder that cannot be listed is an error: files might be missing."""

    def absolute(self, location: str) -> str:
        """See `DataStorage.absolute`."""
        path = Path(location).expanduser().absolute()
        if ".." not in path.parts:
            return str(path)
        wild = list(itertools.dropwhile(lambda part: not has_wildcards(part), path.parts))
        plain = path.parts[: len(path.parts) - len(wild)]
        return str(Path(*plain).resolve().joinpath(*wild))  # a link's parent is elsewhere than its path says

    def stat_file(self, path: str) -> FileStat:
        """See `DataStorage.stat_file`."""
        try:
            found = Path(path).stat()
        except (OSError, ValueError) as exc:
            raise _unreadable(path, exc) from exc
        if stat.S_ISDIR(found.st_mode):
            raise SourceError(f"{quote(path)} is a folder, not a file: name the files in it, as with /*")
        if not stat.S_ISREG(found.st_mode):
            raise SourceError(f"{quote(path)} is no regular file: a pipe or device has no offsets to read it by")
        return FileStat(found.st_size, str(found.st_mtime_ns))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """See `DataStorage.read_range`."""
        try:
            with Path(path).open("rb", buffering=0) as file:
                file.seek(start)
                data = file.read(stop - start)
                while 0 < len(data) < stop - start:  # a read may be short, on a network's file system
                    more = file.read(stop - start - len(data))
                    if not more:
                        break
                    data += more
                return data
        except (OSError, ValueError) as exc:
            raise _unreadable(path, exc) from exc

    def list_files(self, pattern: str) -> list[str]:
        """See `DataStorage.list_files`."""
        try:
            if os.path.lexists(pattern) or not has_wildcards(pattern):
                return self._list_path(pattern)
            root = Path(pattern).anchor or "."
            segments = [part for part in Path(pattern).parts if part != Path(pattern).anchor]
            return sorted(set(_expand(root, segments, ())))
        except OSError as exc:
            raise _unreadable(str(exc.filename or pattern), exc) from exc

    def find_root(self, location: str) -> str:
        """See `DataStorage.find_root`."""
        if os.path.lexists(location) or not has_wildcards(location):
            folder = Path(location) if Path(location).is_dir() else Path(location).parent
        else:
            plain = list(itertools.takewhile(lambda part: not has_wildcards(part), Path(location).parts))
            folder = Path(*plain)
        return f"{str(folder).rstrip('/')}/"

    def is_folder(self, location: str) -> bool:
        """See `DataStorage.is_folder`."""
        return Path(location).is_dir()

    def _list_path(self, path: str) -> list[str]:
        if Path(path).is_dir():
            return sorted(set(_expand(path, ["**", "*"], ())))
        return [path] if os.path.lexists(path) else []


def _expand(folder: str, segments: list[str], above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Yield the files under `folder` that match; `above` are the folders it is in, which a link may lead back to."""
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


def _unreadable(path: str, exc: OSError | ValueError) -> SourceError:
    reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
    permanent = isinstance(exc, ValueError) or exc.errno in _PERMANENT
    return (SourceError if permanent else StorageError)(f"{quote(path)} cannot be read on this machine: {reason}")
