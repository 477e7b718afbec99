"""Sets of files, such as folders of images: a unit is a file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from edl.datasets.dataset import Dataset, Options, Progress, ShardSettings, UnitId
from edl.datasets.index import IndexPart
from edl.datasets.storage import FileStat, check_paths, file_changed, open_storage
from edl.errors import ProtocolError, SettingsError

__all__ = ["FileSample", "FileSet", "describe_files"]

_CHECKS: Final = ("mtime", "size")
"""A file is the one that was indexed if its modification time (or an object's tag) and its size are the same; or its
size alone, for copies whose time differs from machine to machine."""


@dataclass(frozen=True)
class FileSample:
    """A file of a set.

    Attributes:
        id: Path in the set.
        path: Path or URL.
        nbytes: Size in bytes.
        version: Modification time or tag, if that is compared.
    """

    id: str
    path: str
    nbytes: int
    version: str = ""

    def read_bytes(self) -> bytes:
        """Return all of the file's bytes.

        Raises:
            SourceError: The file cannot be read, or is not what it was when it was indexed.
        """
        storage = open_storage(self.path)
        data = storage.read_range(self.path, 0, self.nbytes + 1) if self.nbytes else b""
        if self.version and storage.stat_file(self.path).version != self.version:
            raise file_changed(self.path, "it was written again before it was read")
        if len(data) != self.nbytes:
            raise file_changed(self.path, f"it has not the {self.nbytes} bytes that it had")
        return data


class FileSet(Dataset):
    """Files in the order of their paths; for a folder that grows, in the order in which they came.

    Samples are `FileSample`s.
    """

    _unit: ClassVar[str] = "files"
    _options_known: ClassVar[Options] = {"check": ("mtime", (str,))}

    @classmethod
    def _read_options(cls, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        options = super()._read_options(kind, given)
        if options["check"] not in _CHECKS:
            raise SettingsError(f"check={options['check']!r}: must be one of {', '.join(_CHECKS)}")
        return options

    @classmethod
    def _create(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: Progress | None
    ) -> Dataset:
        storage = open_storage(location)
        location, paths, stats = storage.find_files(location)
        if progress is not None:
            nbytes = sum(stat.nbytes for stat in stats)
            progress(nbytes, nbytes)
        root = storage.find_root(location)
        names = [path.removeprefix(root) for path in paths]
        index = describe_files({"root": root, "check": options["check"]}, names, stats)
        return cls(settings.make_spec("files", location, len(paths), index))

    def _load(self, parts: Sequence[IndexPart]) -> None:
        self._root = parts[0].get_text("root")
        self._check = parts[0].get_text("check")
        self._names = [name for part in parts for name in part.get_texts("names")]
        self._nbytes = np.concatenate([part.columns["nbytes"] for part in parts])
        self._versions = np.concatenate([part.columns["versions"] for part in parts])
        check_paths(self.spec.location, (self._root + name for name in self._names))
        units = self.spec.units if self.spec.HasField("units") else len(self._names)
        if not len(self._names) == len(self._nbytes) == len(self._versions) == units:
            raise ProtocolError(f"the index of {self.kind}:{self.spec.location} has another number of files")

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


def describe_files(head: Mapping[str, Any], names: Sequence[str], stats: Iterable[FileStat]) -> IndexPart:
    """Return a part of an index about files: their paths in the set, and what the storage says of each."""
    stats = list(stats)
    nbytes = np.array([stat.nbytes for stat in stats], np.int64)
    versions = np.array([_digest(stat.version) for stat in stats], np.int64)
    return IndexPart({**head, "names": list(names)}, {"nbytes": nbytes, "versions": versions})


def _digest(version: str) -> int:
    return zlib.crc32(version.encode())
