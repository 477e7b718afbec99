"""A folder that gets files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from edl.errors import ProtocolError
from edl.master.datasets.file_sets import FileSet, describe_files
from edl.master.datasets.growth.watching import GrowingDataset, SourceWatcher
from edl.master.datasets.index import IndexPart, pack_part
from edl.master.datasets.settings import DEFAULT_SHARD_SIZE, ShardSettings
from edl.master.datasets.storage import FileStat, open_storage
from edl.quoting import shown

__all__ = ["GrowingFileSet"]


class GrowingFileSet(FileSet, GrowingDataset):
    """Files in the order in which they came. A file is there when it has not changed for a while."""

    _kind: ClassVar[str] = "follow"

    @classmethod
    def from_pattern(cls, location: str, settings: ShardSettings, check: str) -> GrowingFileSet:
        """Make a data set of a folder or pattern, where there need not be a file yet.

        Args:
            location: a folder, with all folders in it, or a pattern.
            settings: of the data set.
            check: see `edl.master.datasets.file_sets.CHECKS`.
        """
        storage = open_storage(location)
        location = storage.absolute(location)
        head = {"of": "files", "root": storage.find_root(location), "check": check}
        index = pack_part(describe_files(head, [], []))
        return cls(settings.spec("follow", location, None, settings.shard_size or DEFAULT_SHARD_SIZE, index))

    def describe(self) -> str:
        """See `Dataset.describe`."""
        return f"follow:{shown(self.spec.location)} ({self._known_units()} files so far)"

    def watch_source(self, settle_s: float, clock: Callable[[], float]) -> SourceWatcher:
        """See `GrowingDataset.watch_source`."""
        return _FolderWatcher(self.spec.location, self._root, self._names, settle_s, clock)

    def _load(self, parts: Sequence[IndexPart]) -> None:
        units = 0
        for part in parts:
            if part.head.get("from", units) != units:
                raise ProtocolError("parts of the index do not fit together: are there two followers?")
            units += len(part.get_texts("names"))
        super()._load(parts)


class _FolderWatcher(SourceWatcher):
    exclusive: ClassVar[bool] = True

    def __init__(
        self, location: str, root: str, known: Sequence[str], settle_s: float, clock: Callable[[], float]
    ) -> None:
        self._location = location
        self._root = root
        self._storage = open_storage(location)
        self._known = set(known)
        self._published = len(known)
        self._settle_s = settle_s
        self._clock = clock
        self._seen: dict[str, tuple[FileStat, float]] = {}
        self._ready: list[tuple[str, FileStat]] = []

    def look(self, *, final: bool) -> tuple[int, bool]:
        now_s = self._clock()
        seen: dict[str, tuple[FileStat, float]] = {}
        for path in self._storage.list_files(self._location):
            name = path.removeprefix(self._root)
            if name in self._known:
                continue
            stat = self._storage.stat_file(path)
            before, since_s = self._seen.get(name, (stat, now_s))
            seen[name] = (stat, since_s if before == stat else now_s)
            if final or now_s - seen[name][1] >= self._settle_s:
                self._known.add(name)
                self._ready.append((name, stat))
                del seen[name]
        self._seen = seen
        return self._published + len(self._ready), False

    def cut_index(self, units: int) -> bytes:
        count = units - self._published
        taken = self._ready[:count]
        part = describe_files({"from": self._published}, [name for name, _ in taken], [stat for _, stat in taken])
        self._ready = self._ready[count:]
        self._published = units
        return pack_part(part)
