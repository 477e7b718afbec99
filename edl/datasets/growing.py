"""Sources without an end: a text that grows, a folder that gets files, a source of your own; and who follows them.

A data set that grows is opened with an index that knows nothing. A `Follower`, run by the program that created the data
set, looks at the source every `poll_s` seconds through a watcher, and tells the master what has come: the number of
units, and the next part of the index. Readers fetch the newer index when they get a lease that goes beyond theirs.
The follower continues where the master's index ends, so it keeps nothing, and may be killed and replaced.
"""

from __future__ import annotations

import abc
import logging
import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import numpy as np

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.datasets.dataset import Dataset, Progress, ShardSettings, missing_samples
from edl.datasets.files import FileSet, describe_files
from edl.datasets.index import MOST_NBYTES, IndexPart, pack_part
from edl.datasets.storage import FileStat, StorageError, file_changed, has_wildcards, open_storage
from edl.datasets.text import LinesDataset, Segments, ShardCutter, check_plain, newline_ends
from edl.errors import ClosedError, ConflictError, EDLError, ProtocolError, SettingsError, SourceError, TemporaryError
from edl.quoting import shown
from edl.settings import is_above_zero

__all__ = [
    "FollowSettings",
    "Follower",
    "GrowingDataset",
    "GrowingFileSet",
    "GrowingText",
    "Source",
    "SourceDataset",
    "decide",
    "growing_kind",
]

logger = logging.getLogger(__name__)

_RETRY_S: Final = (1.0, 30.0)
"""First and longest wait for a master that is away, for which the client has already waited."""
_CLOSE_S: Final = 10.0
"""How long `close` waits for a look that is under way: reading some hundred megabytes takes a second."""
_LOOK_NBYTES: Final = 256 << 20
"""Bytes read per look: the first shards of a text that is there already should be handed out within a second."""
_TAIL_NBYTES: Final = 4096
"""Bytes before the end of the last line that are compared at every look: another file of that name has others there."""
_ENDLESS: Final = 1 << 62
"""Units of a `Source`: a reader trusts the master's leases, and the source itself says what it has."""


@runtime_checkable
class Source(Protocol):
    """Units by offset, such as a table that gets rows. Every reader makes its own, which must offer the same."""

    def count(self) -> int:
        """Return how many units can be read by now. Never falls."""

    def ended(self) -> bool:
        """Return whether the source is complete."""

    def read(self, start: int, stop: int) -> Iterable[Any]:
        """Return `stop - start` samples, the same whenever they are read.

        Args:
            start: First unit.
            stop: First unit after the last one.
        """


class _Watcher(abc.ABC):
    """Looks at a source, from where the data set's index ends. Used by a single thread.

    Attributes:
        exclusive: Whether two watchers may find the same units in different orders, so that their indexes do not fit
            together.
    """

    exclusive: ClassVar[bool] = False

    @abc.abstractmethod
    def look(self, *, final: bool) -> tuple[int, bool]:
        """Return how many units there are in all, and whether the source says that it is complete.

        Args:
            final: Nothing more will come: what looks unfinished, such as a line without its end, counts as well.

        Raises:
            SourceError: The source is not what it was: it has shrunk, or was replaced.
        """

    @abc.abstractmethod
    def cut_index(self, units: int) -> bytes:
        """Return the next part of the index, up to `units`: all that `look` has counted, or all that fill shards."""


class GrowingDataset(Dataset):
    """A data set that gets more units."""

    @property
    def units(self) -> None:
        """None: no end is known."""
        return None

    @abc.abstractmethod
    def _watch(self, settle_s: float, clock: Callable[[], float]) -> _Watcher:
        """Return a watcher that continues where the index ends."""

    def known_units(self) -> int:
        """Return up to which unit the data set is indexed."""
        return self._known_units()


class GrowingText(LinesDataset, GrowingDataset):
    """Lines of a file that others append to. A line counts when its end is there; the last one when the source ends."""

    _unit: ClassVar[str] = "lines so far"

    @classmethod
    def _create(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: Progress | None
    ) -> Dataset:
        storage = open_storage(location)
        location = storage.absolute(location)
        if storage.list_files(location):  # it need not be there yet
            check_plain(storage, location, storage.stat_file(location).nbytes)
        head = {"of": "lines", "options": dict(options), "files": [location], "nbytes": [None]}
        index = IndexPart(head, ShardCutter(1).pop_segments(rest=True))
        return cls(settings.make_spec("follow", location, None, index))

    def _watch(self, settle_s: float, clock: Callable[[], float]) -> _Watcher:
        return _TextWatcher(self.spec.location, self.spec.shard_size, self._segments)


class _TextWatcher(_Watcher):
    def __init__(self, path: str, shard_size: int, known: Segments) -> None:
        self._path = path
        self._storage = open_storage(path)
        self._at = known.end
        self._published = known.units
        self._cutter = ShardCutter(shard_size, known.units)
        self._tail = (known.end, known.end, 0)
        if len(known.crcs):
            self._tail = (*known.bounds(len(known.crcs) - 1), int(known.crcs[-1]))

    def look(self, *, final: bool) -> tuple[int, bool]:
        if not self._at and not self._storage.list_files(self._path):
            return 0, False  # it is still to come
        nbytes = self._storage.stat_file(self._path).nbytes
        if nbytes < self._at:
            raise file_changed(self._path, f"it has {nbytes} bytes, and had {self._at}: was it cut off, or rotated?")
        begin, end, crc = self._tail
        if zlib.crc32(b"".join(self._storage.read_blocks(self._path, begin, end))) != crc:
            raise file_changed(self._path, f"its bytes {begin} to {end} are others: was it replaced, or rotated?")
        stop = nbytes if final else min(nbytes, self._at + _LOOK_NBYTES)
        begun: list[bytes] = []  # of a line whose end is not there yet
        for block in self._storage.read_blocks(self._path, self._at, stop):
            cut = block.rfind(b"\n") + 1
            if cut:
                data = b"".join([*begun, block[:cut]])
                self._feed(data, newline_ends(data))
                begun = []
            begun.append(block[cut:])
        rest = b"".join(begun)
        if final and rest:
            self._feed(rest, np.array([len(rest)]))
        return self._cutter.units, False

    def _feed(self, data: bytes, ends: Any) -> None:
        self._cutter.feed(data, ends)
        self._at += len(data)
        last = data[-_TAIL_NBYTES:]
        self._tail = (self._at - len(last), self._at, zlib.crc32(last))

    def cut_index(self, units: int) -> bytes:
        columns = self._cutter.pop_segments(rest=units == self._cutter.units)
        part = pack_part(IndexPart({"from": self._published}, columns))
        self._published += int(columns["counts"].sum())
        return part


class GrowingFileSet(FileSet, GrowingDataset):
    """Files in the order in which they came. A file counts when it has not changed for a while."""

    _unit: ClassVar[str] = "files so far"

    @classmethod
    def _create(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: Progress | None
    ) -> Dataset:
        storage = open_storage(location)
        location = storage.absolute(location)
        head = {"of": "files", "root": storage.find_root(location), "check": options["check"]}
        return cls(settings.make_spec("follow", location, None, describe_files(head, [], [])))

    def _watch(self, settle_s: float, clock: Callable[[], float]) -> _Watcher:
        return _FolderWatcher(self.spec.location, self._root, self._names, settle_s, clock)

    def _load(self, parts: Sequence[IndexPart]) -> None:
        units = 0
        for part in parts:
            if part.head.get("from", units) != units:
                raise ProtocolError("parts of the index do not fit together: are there two followers?")
            units += len(part.get_texts("names"))
        super()._load(parts)


class _FolderWatcher(_Watcher):
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
            since_s = since_s if before == stat else now_s
            if final or now_s - since_s >= self._settle_s:
                self._known.add(name)
                self._ready.append((name, stat))
            else:
                seen[name] = (stat, since_s)
        self._seen = seen
        return self._published + len(self._ready), False

    def cut_index(self, units: int) -> bytes:
        count = units - self._published
        taken, self._ready = self._ready[:count], self._ready[count:]
        part = describe_files({"from": self._published}, [name for name, _ in taken], [stat for _, stat in taken])
        self._published = units
        return pack_part(part)


class SourceDataset(GrowingDataset):
    """The units of a `Source`."""

    @classmethod
    def from_source(cls, location: str, source: Source, settings: ShardSettings) -> SourceDataset:
        """Make a data set of a source, which is called `location`."""
        return cls(settings.make_spec("source", location, None, IndexPart({"shuffle_within": False})), source)

    def describe(self) -> str:
        """See `Dataset.describe`."""
        return f"source:{shown(self.spec.location)} (without an end)"

    def known_units(self) -> int:
        """See `GrowingDataset.known_units`."""
        return self.spec.units

    def _watch(self, settle_s: float, clock: Callable[[], float]) -> _Watcher:
        return _CountWatcher(self._source)

    def _load(self, parts: Sequence[IndexPart]) -> None:
        if not isinstance(self._samples, Source):
            raise missing_samples(self, "the Source itself")
        self._source = self._samples

    def _known_units(self) -> int:
        return _ENDLESS

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        return self._source.read(start, stop)


class _CountWatcher(_Watcher):
    def __init__(self, source: Source) -> None:
        self._source = source
        self._units = 0

    def look(self, *, final: bool) -> tuple[int, bool]:
        ended = self._source.ended()  # before the count: what comes in between must not be lost
        units = self._source.count()
        if units < self._units:
            raise SourceError(f"the source had {self._units} units, and has {units}: offsets mean something else now")
        self._units = units
        return units, ended

    def cut_index(self, units: int) -> bytes:
        return b""


def growing_kind(location: str) -> type[GrowingDataset]:
    """Return what a location that grows is: a folder or pattern has files, anything else is a text."""
    storage = open_storage(location)
    absolute = storage.absolute(location)
    is_folder = location.endswith("/") or storage.is_folder(absolute)
    is_pattern = has_wildcards(location) and not storage.is_file(absolute)
    return GrowingFileSet if is_folder or is_pattern else GrowingText


@dataclass(frozen=True)
class FollowSettings:
    """How a source is followed.

    Attributes:
        poll_s: Seconds between two looks.
        settle_s: Seconds without a change after which a file in a folder counts: it might still be written.
        end_after_s: Seconds without growth after which the source has ended; None for never.
        end_marker: Path or URL of a file that ends the source when it is there; empty for none.

    Raises:
        SettingsError: A value cannot be used.
    """

    poll_s: float = 1.0
    settle_s: float = 5.0
    end_after_s: float | None = None
    end_marker: str = ""

    def __post_init__(self) -> None:
        for name in ("poll_s", "settle_s", "end_after_s"):
            value = getattr(self, name)
            if (value is not None or name != "end_after_s") and not (is_above_zero(value) and math.isfinite(value)):
                raise SettingsError(f"{name}={value!r}: must be a number of seconds above 0")


def decide(
    units: int, quiet_s: float, settings: FollowSettings, *, ended: bool, shard_size: int, flush_s: float
) -> tuple[int, bool]:
    """Decide what the master is told: up to which unit, and whether the source has ended.

    Whole shards are told at once. Units that fill none are told when the source has ended, or has been quiet for half
    of `flush_s`: the master, too, waits before it hands out a part of a shard.

    Args:
        units: Units that are there.
        quiet_s: Seconds since the source last grew.
        settings: How the source is followed.
        ended: The source, its marker or its user says that it is complete.
        shard_size: Units per shard.
        flush_s: See `ShardSettings`; 0 to keep parts of shards until the end.
    """
    end = ended or (settings.end_after_s is not None and quiet_s >= settings.end_after_s)
    everything = end or (flush_s > 0 and quiet_s >= flush_s / 2)
    return (units if everything else units // shard_size * shard_size), end


class Follower:
    """Follows a source that grows, in a thread of its own. A data set has a single follower at a time.

    It continues where the master's index ends, so a follower may be killed and another one started. While the master or
    the storage is away it waits. Any other error ends it, and is kept in `error`.

    Args:
        client: A `MasterClient`.
        name: Name of the data set, which must have been created.
        dataset: As `open_dataset` or `load_dataset` made it.
        settings: None for the defaults.
        clock: Returns seconds, and never goes back. Tests pass their own.

    Attributes:
        error: What ended the follower; None so far.

    Raises:
        SettingsError: The data set does not grow.
    """

    def __init__(
        self,
        client: Any,
        name: str,
        dataset: Dataset,
        settings: FollowSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(dataset, GrowingDataset):
            raise SettingsError(f"{name} does not grow; a data set that does is opened as 'follow:PATH'")
        self.error: EDLError | None = None
        self._client = client
        self._name = name
        self._dataset = dataset
        self._settings = settings or FollowSettings()
        self._clock = clock
        self._finishing = False
        self._watcher: _Watcher | None = None
        self._units = self._published = self._index_nbytes = 0
        self._grown_s = 0.0
        self._refused = False
        self._backoff = Backoff(*_RETRY_S)
        self._loop: BackgroundLoop | None = None

    def start(self) -> None:
        """Follow, in the background."""
        if self._loop is None:
            self._loop = BackgroundLoop("edl-follower", self._step)

    def finish(self) -> None:
        """Say that the source has ended with what is there now. Returns at once; see `wait_ended`."""
        self._finishing = True
        if self._loop is not None:
            self._loop.wake()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the master knows that the source has ended, or the follower has failed.

        Args:
            timeout_s: Seconds to wait.

        Returns:
            Whether that has happened in time.

        Raises:
            EDLError: What ended the follower.
        """
        ended = self._loop is not None and self._loop.wait_ended(timeout_s)
        if self.error is not None:
            raise self.error
        return ended

    def close(self) -> None:
        """Stop following. That does not end the source: another follower may continue."""
        if self._loop is not None:
            self._loop.close(_CLOSE_S)

    def follow_once(self) -> bool:
        """Look at the source once, and tell the master what has come.

        Returns:
            Whether the source has ended, and the master knows.

        Raises:
            SourceError: The source is not what it was.
            StorageError: The storage is away.
            TemporaryError: The master is away.
            ConflictError: Another follower has ended the data set, or follows it as well.
        """
        watcher = self._watcher or self._begin()
        self._watcher = None  # after an error, the master is asked again what it knows
        finishing = self._finishing
        units, ended = watcher.look(final=finishing)
        publish, end = self._decide(units, ended=finishing or ended or self._is_marked())
        if end and not finishing:  # what has come since, and what looked unfinished
            units, _ = watcher.look(final=True)
            publish, _ = self._decide(units, ended=True)
        if publish > self._published:
            self._publish(watcher, publish)
        if end:
            self._client.end_dataset(self._name)
        self._watcher = watcher
        return end

    def _begin(self) -> _Watcher:
        spec = self._client.describe_dataset(self._name)
        if spec is None:
            raise SettingsError(f"the master has no data set {self._name}: create it before it is followed")
        self._dataset.update(spec)
        self._index_nbytes = len(spec.index)
        self._units = self._published = self._dataset.known_units()
        self._grown_s = self._clock()
        return self._dataset._watch(self._settings.settle_s, self._clock)

    def _decide(self, units: int, *, ended: bool) -> tuple[int, bool]:
        now_s = self._clock()
        if units > self._units:
            self._grown_s = now_s
        self._units = units
        spec = self._dataset.spec
        quiet_s = now_s - self._grown_s
        return decide(units, quiet_s, self._settings, ended=ended, shard_size=spec.shard_size, flush_s=spec.flush_s)

    def _publish(self, watcher: _Watcher, units: int) -> None:
        index = watcher.cut_index(units)
        self._index_nbytes += len(index)
        if self._index_nbytes > MOST_NBYTES:
            raise SourceError(
                f"the index of {self._name} would have more than {MOST_NBYTES >> 20} MiB: end the data set, and follow "
                f"the source's next part under another name, with larger shards"
            )
        self._client.extend_dataset(self._name, units, index, self._published if watcher.exclusive else None)
        self._published = units

    def _is_marked(self) -> bool:
        marker = self._settings.end_marker
        return bool(marker) and bool(open_storage(marker).list_files(marker))

    def _step(self) -> float | None:
        try:
            if self.follow_once():
                return None
        except (TemporaryError, StorageError) as exc:
            wait_s = self._backoff.next_wait_s()
            logger.warning("data set %s: not followed for %.0f s: %s", self._name, wait_s, exc)
            return wait_s
        except EDLError as exc:
            if isinstance(exc, ConflictError) and not self._refused:
                self._refused = True  # because of another follower's part: this one continues where that one ends
                logger.warning("data set %s: looked at again: %s", self._name, exc)
                return self._settings.poll_s
            if not isinstance(exc, ClosedError):
                logger.error("data set %s is no longer followed: %s", self._name, exc)
            self.error = exc
            return None
        self._refused = False
        self._backoff.reset()
        return self._settings.poll_s
