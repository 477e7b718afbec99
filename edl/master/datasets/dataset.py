"""What is cut into shards: the base of all kinds of data sets."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

from edl.errors import SettingsError, SourceError
from edl.master.datasets.index import IndexPart, unpack_parts
from edl.master.datasets.shuffling import permute_shard
from edl.protocol.master import DatasetSpec

__all__ = ["Dataset", "LeasedUnits", "UnitId"]

UnitId: TypeAlias = int | str
"""Stable in all epochs and for all readers: the unit's number in the data set, or a file's path in the set."""


class LeasedUnits(Protocol):
    """A shard, or the rest of a shard, that a reader has: a `Lease` of the protocol, or what has the same fields."""

    @property
    def epoch(self) -> int:
        """From 0 on."""

    @property
    def shard(self) -> int:
        """Its number in the data set, from 0 on."""

    @property
    def start(self) -> int:
        """The first unit."""

    @property
    def stop(self) -> int:
        """Behind the last unit."""


class Dataset(abc.ABC):
    """A data set that is cut into shards of `spec.shard_size` units, the last one perhaps shorter.

    Holds no open file: it may be used after a fork and in several threads, and be pickled for a process of one's own.

    Args:
        spec: what the master keeps of it.
        samples: a sequence or `Source` of the user's, or the name of a function that returns it.

    Raises:
        SettingsError: the specification cannot be used, or needs `samples`.
        ProtocolError: its index cannot be read.
    """

    def __init__(self, spec: DatasetSpec, samples: Any = None) -> None:
        if spec.shard_size < 1:
            raise SettingsError(f"shard_size={spec.shard_size}: must be above 0")
        self._spec = spec
        self._samples = samples
        self._shuffle_within = False
        parts = unpack_parts(spec.index)
        if parts:
            self._shuffle_within = bool(parts[0].head.get("shuffle_within"))
        self._load(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (type(self), self._spec.SerializeToString(), self._samples)

    @property
    def spec(self) -> DatasetSpec:
        """What the master keeps of it; not to be changed."""
        return self._spec

    @property
    def kind(self) -> str:
        """Such as "lines"."""
        return self._spec.kind

    @property
    def units(self) -> int | None:
        """How many samples, lines, rows or files it has; None for a source without an end."""
        return self._spec.units if self._spec.HasField("units") else None

    @abc.abstractmethod
    def describe(self) -> str:
        """Return a line for people: what it is, where, and how much of it."""

    @abc.abstractmethod
    def _load(self, parts: Sequence[IndexPart]) -> None:
        """Take over the parts of the index: all of them, also where some were there before."""

    @abc.abstractmethod
    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        """Read the units `start` to `stop` of the data set, which are in one shard, in order."""

    def _known_units(self) -> int:
        """Return how many units can be read by what is known here."""
        return self._spec.units

    def _id_of(self, unit: int) -> UnitId:
        return unit

    def covers(self, lease: LeasedUnits) -> bool:
        """Return whether these units can be read by what is known here; if not, the source has grown: see `update`.

        Args:
            lease: of this data set.
        """
        return lease.stop <= self._known_units()

    def update(self, spec: DatasetSpec) -> None:
        """Take over a newer specification of the same data set, which has grown.

        Args:
            spec: as the master has it now.

        Raises:
            SettingsError: it is of another data set.
        """
        old, new = self._spec, spec
        if (old.kind, old.location, old.shard_size) != (new.kind, new.location, new.shard_size):
            raise SettingsError(f"{new.kind}:{new.location} is not the data set {old.kind}:{old.location}")
        self._spec = spec
        self._load(unpack_parts(spec.index))

    def read(self, lease: LeasedUnits) -> Iterator[Any]:
        """Read the samples of a lease.

        Sample k of what is yielded is at position `lease.start` + k of the shard's order: a reader that has consumed k
        of them leaves the units from there on to the reader that goes on.

        Args:
            lease: of this data set.

        Returns:
            An iterator over `lease.stop - lease.start` samples.

        Raises:
            SettingsError: the lease is not of this data set as it is known here.
            SourceError: the data are not there, cannot be read, or have changed; names the file.
        """
        first, stop = self._shard_bounds(lease)
        return self._counted(lease, first, stop)

    def sample_ids(self, lease: LeasedUnits) -> list[UnitId]:
        """Return the ids of the samples of a lease, in the order of `read`.

        Args:
            lease: of this data set.

        Raises:
            SettingsError: the lease is not of this data set as it is known here.
        """
        first, stop = self._shard_bounds(lease)
        if not self._shuffle_within:
            return [self._id_of(unit) for unit in range(lease.start, lease.stop)]
        order = permute_shard(self._spec.seed, lease.epoch, lease.shard, stop - first)
        return [self._id_of(first + place) for place in order[lease.start - first : lease.stop - first]]

    def _counted(self, lease: LeasedUnits, first: int, stop: int) -> Iterator[Any]:
        wanted = lease.stop - lease.start
        if self._shuffle_within:
            samples = list(self._read_units(first, stop))
            if len(samples) != stop - first:
                raise SourceError(self._miscounted(lease, stop - first, len(samples)))
            order = permute_shard(self._spec.seed, lease.epoch, lease.shard, stop - first)
            yield from (samples[place] for place in order[lease.start - first : lease.stop - first])
            return
        count = 0
        for sample in itertools.islice(self._read_units(lease.start, lease.stop), wanted + 1):
            count += 1
            if count > wanted:
                break
            yield sample
        if count != wanted:
            raise SourceError(self._miscounted(lease, wanted, count))

    def _miscounted(self, lease: LeasedUnits, wanted: int, count: int) -> str:
        found = f"{count} samples" if count < wanted else "more samples"
        return f"{self.describe()}: shard {lease.shard} has {found}, not the {wanted} of its index; it has changed"

    def _shard_bounds(self, lease: LeasedUnits) -> tuple[int, int]:
        """Return the units of the whole shard that the lease is of."""
        first = lease.shard * self._spec.shard_size
        stop = min(first + self._spec.shard_size, self._known_units())
        if not 0 <= first <= lease.start < lease.stop <= stop:
            raise SettingsError(
                f"units {lease.start} to {lease.stop} are not in shard {lease.shard} of {self.describe()}, as it is "
                f"known here; where it has grown, update the data set"
            )
        return first, stop


def _load_again(kind: type[Dataset], spec: bytes, samples: Any) -> Dataset:
    """Make a data set again in another process of the same user."""
    return kind(DatasetSpec.FromString(spec), samples)
