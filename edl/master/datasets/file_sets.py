"""Sets of files: a unit is a file."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from edl.errors import ProtocolError
from edl.master.datasets.dataset import Dataset, UnitId
from edl.master.datasets.index import IndexPart, check_size, pack_part
from edl.master.datasets.settings import DEFAULT_SHARD_SIZE, ShardSettings
from edl.master.datasets.storage import FileStat, check_paths, file_changed, open_storage
from edl.quoting import shown

__all__ = ["CHECKS", "FileSample", "FileSet", "describe_files"]

CHECKS: Final = ("mtime", "size")
"""By what a file is known as that which was indexed: by its time of change (or an object's tag) and its size, or by its
size alone, for copies whose time of change is another on every machine."""


@dataclass(frozen=True)
class FileSample:
    """A file of a set.

    Attributes:
        id: its path in the set.
        path: its path or URL.
        nbytes: its size.
        version: its time of change or tag, if that is compared.
    """

    id: str
    path: str
    nbytes: int
    version: str = ""

    def read_bytes(self) -> bytes:
        """Return all of the file's bytes.

        Raises:
            SourceError: the file cannot be read, or is not what it was when it was indexed.
        """
        storage = open_storage(self.path)
        data = storage.read_range(self.path, 0, self.nbytes + 1) if self.nbytes else b""
        if self.version and storage.stat_file(self.path).version != self.version:
            raise file_changed(self.path, "it was written again before it was read")
        if len(data) != self.nbytes:
            raise file_changed(self.path, f"it has not the {self.nbytes} bytes that it had")
        return data


class FileSet(Dataset):
    """Files in the order of their paths; of a folder that grows, in the order in which they came.

    Samples are `FileSample`s.
    """

    @classmethod
    def from_location(
        cls, location: str, settings: ShardSettings, check: str, progress: Callable[[int, int], object] | None
    ) -> Dataset:
        """List the files.

        Args:
            location: a folder, with all folders in it, or a pattern.
            settings: of the data set.
            check: see `CHECKS`.
            progress: is called with the bytes of the files looked at, and of all files as far as is known.

        Raises:
            SettingsError: there is no file.
            SourceError: a folder cannot be listed.
        """
        storage = open_storage(location)
        location = storage.absolute(location)
        root = storage.find_root(location)
        paths = storage.find_files(location)
        stats = []
        done = 0
        for path in paths:
            stats.append(storage.stat_file(path))
            done += stats[-1].nbytes
            if progress is not None:
                progress(done, done)
        shard_size = settings.shard_size or DEFAULT_SHARD_SIZE
        head = {"shuffle_within": settings.shuffle_within, "root": root, "check": check}
        names = [path.removeprefix(root) for path in paths]
        index = pack_part(describe_files(head, names, stats))
        check_size(index, "split the set of files into several data sets")
        return cls(settings.spec("files", location, len(paths), shard_size, index))

    def describe(self) -> str:
        """See `Dataset.describe`."""
        return f"{self.kind}:{shown(self.spec.location)} ({self._known_units()} files)"

    def _load(self, parts: Sequence[IndexPart]) -> None:
        try:
            self._root = parts[0].get_text("root")
            self._check = parts[0].get_text("check")
            self._names = [name for part in parts for name in part.get_texts("names")]
            self._nbytes = np.concatenate([part.columns["nbytes"] for part in parts])
            self._versions = np.concatenate([part.columns["versions"] for part in parts])
        except (LookupError, ValueError, TypeError) as exc:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} lacks a part: {exc!r}") from exc
        check_paths(self.spec.location, (self._root + name for name in self._names))
        units = self.spec.units if self.spec.HasField("units") else len(self._names)
        if not len(self._names) == len(self._nbytes) == len(self._versions) == units:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} is of another number of files")

    def _known_units(self) -> int:
        return len(self._names)

    def _id_of(self, unit: int) -> UnitId:
        return self._names[unit]

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        return (self._sample(unit) for unit in range(start, stop))

    def _sample(self, unit: int) -> FileSample:
        path = self._root + self._names[unit]
        nbytes = int(self._nbytes[unit])
        found = open_storage(path).stat_file(path)
        if found.nbytes != nbytes:
            raise file_changed(path, f"it has {found.nbytes} bytes, and had {nbytes}")
        if self._check == "mtime" and _digest(found.version) != self._versions[unit]:
            raise file_changed(path, "it was written again (where only its time differs: check='size')")
        return FileSample(self._names[unit], path, nbytes, found.version if self._check == "mtime" else "")


def describe_files(head: dict[str, Any], names: Sequence[str], stats: Iterable[FileStat]) -> IndexPart:
    """Return a part of an index about some files.

    Args:
        head: what else stands in the part's head.
        names: their paths in the set.
        stats: what the storage says of each.
    """
    stats = list(stats)
    nbytes = np.array([stat.nbytes for stat in stats], np.int64)
    versions = np.array([_digest(stat.version) for stat in stats], np.int64)
    return IndexPart({**head, "names": list(names)}, {"nbytes": nbytes, "versions": versions})


def _digest(version: str) -> int:
    return zlib.crc32(version.encode())
