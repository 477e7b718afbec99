"""A text that grows, by lines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from edl.master.datasets.growth.watching import GrowingDataset, SourceWatcher
from edl.master.datasets.index import IndexPart, pack_part
from edl.master.datasets.settings import DEFAULT_SHARD_SIZE, ShardSettings
from edl.master.datasets.storage import file_changed, open_storage
from edl.master.datasets.text.cutting import ShardCutter
from edl.master.datasets.text.files import check_plain
from edl.master.datasets.text.lines import LinesDataset
from edl.master.datasets.text.segments import Segments
from edl.quoting import shown

__all__ = ["GrowingText"]

_LOOK_NBYTES: Final = 256 << 20
"""Bytes read in a look: of a text that is there already, the first shards are to be handed out within a second."""
_TAIL_NBYTES: Final = 4096
"""Bytes before the last line's end that are compared at every look: another file of the same name has others there."""


class GrowingText(LinesDataset, GrowingDataset):
    """Lines of a file that others append to. A line is there when its end is, and the last one when the source ends."""

    _kind: ClassVar[str] = "follow"

    @classmethod
    def from_path(cls, location: str, settings: ShardSettings, options: Mapping[str, Any]) -> GrowingText:
        """Make a data set of a file, which need not be there yet.

        Args:
            location: a path or URL.
            settings: of the data set.
            options: as of lines.

        Raises:
            SettingsError: there is a file, and it is compressed.
        """
        storage = open_storage(location)
        location = storage.absolute(location)
        if storage.list_files(location):
            check_plain(storage, location, storage.stat_file(location).nbytes)
        head = {"of": "lines", "options": dict(options), "files": [location], "nbytes": [None]}
        index = pack_part(IndexPart(head, ShardCutter(1).pop_segments(rest=True)))
        return cls(settings.spec("follow", location, None, settings.shard_size or DEFAULT_SHARD_SIZE, index))

    def describe(self) -> str:
        """See `Dataset.describe`."""
        return f"follow:{shown(self.spec.location)} ({self._known_units()} lines so far)"

    def watch_source(self, settle_s: float, clock: Callable[[], float]) -> SourceWatcher:
        """See `GrowingDataset.watch_source`."""
        return _TextWatcher(self.spec.location, self.spec.shard_size, self._segments)


class _TextWatcher(SourceWatcher):
    def __init__(self, path: str, shard_size: int, known: Segments) -> None:
        self._path = path
        self._storage = open_storage(path)
        self._at = known.end
        self._published = known.units
        self._cutter = ShardCutter(shard_size, known.units)
        self._tail = (known.end, known.end, 0)
        if len(known.crcs):
            begin, end = known.bounds(len(known.crcs) - 1)
            self._tail = (begin, end, int(known.crcs[-1]))

    def look(self, *, final: bool) -> tuple[int, bool]:
        if not self._at and not self._storage.list_files(self._path):
            return 0, False  # it is still to come
        nbytes = self._storage.stat_file(self._path).nbytes
        if nbytes < self._at:
            raise file_changed(self._path, f"it has {nbytes} bytes, and had {self._at}: was it cut off, or rotated?")
        self._check_tail()
        stop = nbytes if final else min(nbytes, self._at + _LOOK_NBYTES)
        begun: list[bytes] = []  # of a line whose end is not there yet
        last = b""
        for block in self._storage.read_blocks(self._path, self._at, stop):
            cut = block.rfind(b"\n") + 1
            if not cut:
                begun.append(block)
                continue
            data = b"".join([*begun, block[:cut]])
            begun = [block[cut:]]
            self._cutter.feed(data, np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1)
            self._at += len(data)
            last = data
        rest = b"".join(begun)
        if final and rest:
            self._cutter.feed(rest, np.array([len(rest)]))
            self._at += len(rest)
            last = rest
        if last:
            last = last[-_TAIL_NBYTES:]
            self._tail = (self._at - len(last), self._at, zlib.crc32(last))
        return self._cutter.units, False

    def cut_index(self, units: int) -> bytes:
        columns = self._cutter.pop_segments(rest=units == self._cutter.units)
        part = pack_part(IndexPart({"from": self._published}, columns))
        self._published += int(columns["counts"].sum())
        return part

    def _check_tail(self) -> None:
        begin, end, crc = self._tail
        found = b"".join(self._storage.read_blocks(self._path, begin, end))
        if zlib.crc32(found) != crc:
            raise file_changed(self._path, f"its bytes {begin} to {end} are others: was it replaced, or rotated?")
