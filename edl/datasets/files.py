"""Finds files by path or URL, reads byte ranges from them, and provides data sets whose units are whole files.

A path refers to a file on this machine, and reading it needs no package other than Python. A URL is read through
fsspec. Every error is a `SourceError` that names the file.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from edl.datasets.dataset import Dataset, IndexPart, Options, ShardSettings, UnitId, pack_part
from edl.errors import EDLError, SettingsError, SourceError
from edl.quoting import quote, shown

_BLOCK_NBYTES: Final = 4 << 20  # a disk reaches full speed with smaller blocks, and a reader holds at most two blocks
_PERMANENT: Final = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
}
"""Errors that a retry would not change."""
_VERSIONS: Final = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "mtime", "created")
"""Names under which fsspec's file systems report a value that changes when a file is rewritten."""


class StorageError(SourceError):
    """A file cannot be read now; the storage may be unreachable. A follower retries, and a reader's shard fails."""


class FileStat(NamedTuple):
    """Size and version of a file."""

    nbytes: int
    version: str  # changes when the file is rewritten: its modification time, or an object's tag; empty if unknown


def file_changed(path: str, how: str) -> SourceError:
    """Return the error for a file that differs from the one that was indexed."""
    return SourceError(
        f"{quote(path)} has changed since it was indexed: {how}. Restore the file, and retry poisoned shards; or "
        f"create the data set again, under a different name"
    )


def stat_file(path: str) -> FileStat:
    """Return a file's size and version; raise if it is missing or not a regular file."""
    with translated(path):
        if _is_url(path):
            info: dict[str, Any] = _file_system(path).info(path)
            is_file, nbytes = info.get("type") != "directory", info.get("size")
            version = next((str(info[name]) for name in _VERSIONS if info.get(name) is not None), "")
        else:
            found = Path(path).stat()
            is_file, nbytes, version = not stat.S_ISDIR(found.st_mode), found.st_size, str(found.st_mtime_ns)
            nbytes = nbytes if stat.S_ISREG(found.st_mode) else None
    if not is_file:
        raise SourceError(f"{quote(path)} is a folder, not a file: name the files in it, for example with /*")
    if nbytes is None:
        raise SourceError(f"{quote(path)} has no size: a pipe, a device or a stream cannot be read by offsets")
    return FileStat(int(nbytes), version)


def read_range(path: str, start: int, stop: int) -> bytes:
    """Return the bytes `start` to `stop` of a file; fewer if it ends earlier."""
    with translated(path):
        if _is_url(path):
            data: bytes = _file_system(path).cat_file(path, start=start, end=stop)
            return data
        with Path(path).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)


def read_blocks(path: str, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes `start` to `stop` of a file block by block; raise if the file ends earlier."""
    while start < stop:
        block = read_range(path, start, min(stop, start + _BLOCK_NBYTES))
        if not block:
            raise file_changed(path, f"it was truncated, and ends at byte {start}, not {stop}")
        yield block
        start += len(block)


def open_file(path: str) -> Any:
    """Open a file for reading by offset."""
    with translated(path):
        return _file_system(path).open(path, "rb") if _is_url(path) else Path(path).open("rb")


def _is_pattern(location: str) -> bool:
    return re.search(r"[*?\[]", location) is not None


def _is_folder(location: str) -> bool:
    with translated(location):
        return bool(_file_system(location).isdir(location)) if _is_url(location) else Path(location).is_dir()


def absolute(location: str) -> str:
    """Return the location in a form that does not depend on the working folder."""
    if _is_url(location):
        file_system = _file_system(location)
        return str(file_system.unstrip_protocol(file_system._strip_protocol(location)))
    return os.path.normpath(Path(location).expanduser().absolute())


def list_files(location: str) -> list[str]:
    """Return the sorted files at an absolute path, in a folder (recursively) or for a pattern; hidden ones if named.

    If a folder cannot be listed, an error is raised, because files might be missing from the result.
    """
    with translated(location):
        if _is_url(location):
            return _list_urls(location)
        if Path(location).is_dir():
            return sorted(set(_expand(location, ["**", "*"])))
        if os.path.lexists(location) or not _is_pattern(location):
            return [location] if os.path.lexists(location) else []
        folder = _plain_folder(location)
        return sorted(set(_expand(folder, location.removeprefix(folder).split("/"))))


def find_files(location: str) -> tuple[str, list[str], list[FileStat]]:
    """Return the absolute location, its files (at least one), and their sizes and versions."""
    location = absolute(location)
    found = list_files(location)
    if not found:
        what = "no file matches" if _is_pattern(location) else "cannot find"
        raise SettingsError(f"{what} {quote(location)}; workers also need it at the same path on their machines")
    return location, found, [stat_file(path) for path in found]


def is_growing_folder(location: str) -> bool:
    """Return True if a growing location is a folder or pattern, which gets new files; False if it is a text file."""
    path = absolute(location)
    return location.endswith("/") or _is_folder(path) or (_is_pattern(path) and path not in list_files(path))


def _find_root(location: str) -> str:
    """Return the common prefix of the paths of all files at a location, with a slash at the end."""
    if _is_folder(location):
        return f"{location.rstrip('/')}/"
    return _plain_folder(location) if _is_pattern(location) else f"{location.rpartition('/')[0]}/"


def _plain_folder(pattern: str) -> str:
    return f"{re.split(r'[*?[]', pattern, maxsplit=1)[0].rpartition('/')[0]}/"


def _expand(folder: str, segments: Sequence[str], above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    """Yield the files under `folder` that match `segments`; `above` lists parent folders: links may lead back to them.

    `glob.glob` and fsspec are unsuitable: they leave out folders that they cannot list.
    """
    segment, *rest = segments
    is_deep = segment == "**"
    if is_deep:
        found = Path(folder).stat()
        place = (found.st_dev, found.st_ino)
        if place in above:
            return
        above = (*above, place)
        yield from _expand(folder, rest or ["*"])
    matches = re.compile(fnmatch.translate("*" if is_deep else segment)).match
    with os.scandir(folder) as entries:
        chosen = [entry for entry in entries if matches(entry.name)]
    for entry in chosen:
        if entry.name.startswith(".") and not segment.startswith("."):
            continue
        if not entry.is_dir():
            if not rest and not is_deep:
                yield entry.path
        elif is_deep:
            yield from _expand(entry.path, segments, above)
        elif rest:
            yield from _expand(entry.path, rest)


def _list_urls(location: str) -> list[str]:
    file_system = _file_system(location)
    if file_system.isfile(location):
        return [location]
    if file_system.isdir(location):
        found = list(file_system.find(location))
    elif not _is_pattern(location):
        return []
    else:
        glob = file_system.glob(location, detail=True)
        found = [path for path, info in glob.items() if info["type"] == "file"]
    root = str(file_system._strip_protocol(location)).partition("*")[0]
    return sorted(
        {
            file_system.unstrip_protocol(path)
            for path in found
            if not any(part.startswith(".") for part in path.removeprefix(root).split("/"))
        }
    )


def _is_url(location: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location) is not None


def _file_system(location: str) -> Any:
    """Return fsspec's file system for a URL, without cached listings."""
    if "::" in location:
        raise SettingsError(f"{quote(location)} is a chain of URLs, whose files have no URLs of their own: unpack it")
    try:
        import fsspec.core  # type: ignore[import-untyped]

        file_system, _ = fsspec.core.url_to_fs(location)
    except (ValueError, ImportError) as exc:
        raise SettingsError(
            f"{quote(location)}: {shown(exc)}; URLs need fsspec (pip install 'elastic-distill[tables]') and the "
            f"package for this kind of URL"
        ) from exc
    file_system.invalidate_cache()
    return file_system


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Raise `SourceError` for any error from a file system: fsspec's file systems wrap many libraries."""
    try:
        yield
    except EDLError:
        raise
    except Exception as exc:
        is_permanent = isinstance(exc, (FileNotFoundError, PermissionError, IsADirectoryError))
        is_permanent = is_permanent or (not _is_url(path) and isinstance(exc, ValueError))  # NUL in a path
        words = "file not found" if isinstance(exc, FileNotFoundError) else f"{type(exc).__name__}: {shown(exc)}"
        if isinstance(exc, OSError) and exc.errno is not None:
            is_permanent = is_permanent or exc.errno in _PERMANENT
            path, words = str(exc.filename or path), exc.strerror or words
        kind = SourceError if is_permanent else StorageError
        raise kind(f"{quote(path)} cannot be read on this machine: {words}") from exc


@dataclass(frozen=True)
class FileSample:
    """A file in a set.

    Attributes:
        id: Path within the set.
        path: Path or URL.
        nbytes: Size in bytes.
        version: Modification time or tag, if versions are compared.
    """

    id: str
    path: str
    nbytes: int
    version: str = ""

    def read_bytes(self) -> bytes:
        """Return all of the file's bytes.

        Raises:
            SourceError: The file cannot be read, or has changed since it was indexed.
        """
        data = read_range(self.path, 0, self.nbytes + 1) if self.nbytes else b""
        if self.version and stat_file(self.path).version != self.version:
            raise file_changed(self.path, "it was rewritten before it was read")
        if len(data) != self.nbytes:
            raise file_changed(self.path, f"its size is no longer {self.nbytes} bytes")
        return data


class FileSet(Dataset):
    """Files in the order of their paths, such as the files in a folder of images. Samples are `FileSample`s.

    The files in a growing folder are in the order of their arrival. A new file counts once it has not changed for
    `FollowSettings.settle_s`.
    """

    _unit: ClassVar[str] = "files"
    _options_known: ClassVar[Options] = {"check": ("mtime", str)}

    @classmethod
    def _create(cls, kind: str, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        grows = kind == "follow"  # then no files are known yet
        location, paths, stats = (absolute(location), [], []) if grows else find_files(location)
        root = _find_root(location)
        names = [path.removeprefix(root) for path in paths]
        head = {"root": root, "check": options["check"], **({"of": "files"} if grows else {})}
        return cls(settings._make_spec(kind, location, None if grows else len(paths), *_part_of(head, names, stats)))

    def _load(self, parts: Sequence[IndexPart]) -> int:
        self._root, self._check = parts[0].head["root"], parts[0].head["check"]
        if self._check not in ("mtime", "size"):  # "size" is for copies whose times differ between machines
            raise SettingsError(f"check={self._check!r}: must be 'mtime' or 'size'")
        self._names: list[str] = [name for part in parts for name in part.head["names"]]
        self._nbytes = np.concatenate([part.columns["nbytes"] for part in parts])
        self._versions = np.concatenate([part.columns["versions"] for part in parts])
        self._found = set(self._names) if self.grows else set()
        self._ready: list[tuple[str, FileStat]] = []
        self._unsettled: dict[str, tuple[FileStat, float]] = {}  # with the time when each was first seen in that state
        return len(self._names)

    def _id_of(self, unit: int) -> UnitId:
        return self._names[unit]

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        return (self._sample(unit) for unit in range(start, stop))

    def _sample(self, unit: int) -> FileSample:
        path = self._root + self._names[unit]
        found = stat_file(path)
        if found.nbytes != self._nbytes[unit]:
            raise file_changed(path, f"it has {found.nbytes} bytes, but had {self._nbytes[unit]}")
        if self._check == "mtime" and zlib.crc32(found.version.encode()) != self._versions[unit]:
            raise file_changed(path, "it was rewritten (if only its modification time differs, use check='size')")
        return FileSample(self._names[unit], path, found.nbytes, found.version if self._check == "mtime" else "")

    def _look(self, now_s: float, settle_s: float, *, final: bool) -> tuple[int, bool]:
        unsettled: dict[str, tuple[FileStat, float]] = {}
        for path in list_files(self.spec.location):
            name = path.removeprefix(self._root)
            if name in self._found:
                continue
            stat = stat_file(path)
            before, since_s = self._unsettled.get(name, (stat, now_s))
            since_s = since_s if before == stat else now_s
            if final or now_s - since_s >= settle_s:
                self._found.add(name)
                self._ready.append((name, stat))
            else:
                unsettled[name] = (stat, since_s)
        self._unsettled = unsettled
        return len(self._found), False

    def _next_part(self, known: int, units: int) -> bytes:
        taken, self._ready = self._ready[: units - known], self._ready[units - known :]
        return pack_part(*_part_of({}, [name for name, _ in taken], [stat for _, stat in taken]))


def _part_of(head: Mapping[str, Any], names: Sequence[str], stats: Sequence[FileStat]) -> IndexPart:
    columns = {
        "nbytes": np.array([stat.nbytes for stat in stats], np.int64),
        "versions": np.array([zlib.crc32(stat.version.encode()) for stat in stats], np.int64),
    }
    return IndexPart({**head, "names": list(names)}, columns)
