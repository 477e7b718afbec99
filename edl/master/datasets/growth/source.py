"""A source of the user's own: what it has to offer, and the data set that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from edl.errors import SettingsError, SourceError
from edl.master.datasets.growth.watching import GrowingDataset, SourceWatcher
from edl.master.datasets.index import IndexPart, pack_part
from edl.master.datasets.settings import DEFAULT_SHARD_SIZE, ShardSettings
from edl.quoting import shown

__all__ = ["Source", "SourceDataset"]

_ENDLESS = 1 << 62  # units: a reader trusts the master's leases, and the source says what it has


@runtime_checkable
class Source(Protocol):
    """Units by offset, such as a table that gets rows. Every reader makes its own, which must offer the same."""

    def count(self) -> int:
        """Return how many units can be read by now. Never falls."""

    def ended(self) -> bool:
        """Return whether no more will come."""

    def read(self, start: int, stop: int) -> Iterable[Any]:
        """Return the samples of some units, the same whenever they are read.

        Args:
            start: the first unit.
            stop: the unit behind the last.

        Returns:
            `stop - start` samples.
        """


class SourceDataset(GrowingDataset):
    """The units of a `Source`."""

    @classmethod
    def from_source(cls, location: str, source: Source, settings: ShardSettings) -> SourceDataset:
        """Make a data set of a source.

        Args:
            location: `MODULE:FACTORY`, or a name.
            source: what the function returns.
            settings: of the data set.
        """
        index = pack_part(IndexPart({"shuffle_within": False}))
        shard_size = settings.shard_size or DEFAULT_SHARD_SIZE
        return cls(settings.spec("source", location, None, shard_size, index), source)

    def describe(self) -> str:
        """See `Dataset.describe`."""
        return f"source:{shown(self.spec.location)} (without an end)"

    def watch_source(self, settle_s: float, clock: Callable[[], float]) -> SourceWatcher:
        """See `GrowingDataset.watch_source`."""
        return _CountWatcher(self._source)

    def known_units(self) -> int:
        """See `GrowingDataset.known_units`."""
        return self.spec.units

    def _load(self, parts: Sequence[IndexPart]) -> None:
        if not isinstance(self._samples, Source):
            raise SettingsError(
                f"the samples of {self.describe()} are made by code of yours: pass samples={self.spec.location!r}, or "
                f"the Source itself. EDL imports no code because a message names it"
            )
        self._source = self._samples

    def _known_units(self) -> int:
        return _ENDLESS

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        return self._source.read(start, stop)


class _CountWatcher(SourceWatcher):
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
