"""Data that are cut into shards: the base class of all kinds of data sets; the simplest kind, numbers and sequences.

A data set is opened where it is created (`edl.datasets.opening`). Its `spec` goes to the master, which hands out
leases: ranges of units within a shard. A reader on any machine makes the data set again from the `spec` and reads the
units of its leases. A new kind is a subclass with `_create`, `_load` and `_read_units`, listed in `opening.py`.
"""

from __future__ import annotations

import abc
import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

from edl.datasets.index import IndexPart, check_size, pack_part, unpack_parts
from edl.errors import EDLError, ProtocolError, SettingsError, SourceError
from edl.protocol.master import COMMIT_CHECKPOINT, COMMIT_REPORT, DatasetSpec
from edl.quoting import quote, shown
from edl.settings import is_above_zero, is_count

__all__ = [
    "DEFAULT_SHARD_SIZE",
    "Dataset",
    "LeasedUnits",
    "Options",
    "Progress",
    "RangeDataset",
    "ShardSettings",
    "UnitId",
    "missing_samples",
    "permute_shard",
]

UnitId: TypeAlias = int | str
"""The same in all epochs and for all readers: the unit's number in the data set, or a file's path in the set."""
Progress: TypeAlias = Callable[[int, int], object]
"""Called with the bytes looked at so far, and the bytes of all files as far as they are known."""
Options: TypeAlias = Mapping[str, tuple[Any, tuple[type, ...]]]
"""Options of a kind of data sets by name: the default, and the types that a value may have."""

DEFAULT_SHARD_SIZE: Final = 64
"""Default units per shard: a batch or two, so that a killed worker loses little work. The master hands out thousands of
shards a second."""
_SEEDS: Final = 1 << 64
"""Seeds have 64 bits on the wire."""
_MOST: Final = 1 << 62
"""Largest number of units, shard size or epochs: the sum of two of them still has 63 bits."""
_FAILURES: Final = (1 << 31) - 1
"""Failures have 31 bits on the wire."""


@dataclass(frozen=True)
class ShardSettings:
    """How a data set is cut into shards, in which order they are handed out, and when a lease ends.

    Attributes:
        shard_size: Units (samples, lines, rows, files) per shard. None leaves it to the kind of data set: 64, and for
            Parquet the rows of the largest row group.
        epochs: Passes over the data; 0 for no end.
        shuffle: Hand out the shards of an epoch in an order that follows from `seed` and the epoch.
        shuffle_within: Read the units of a shard in an order that follows from `seed`, the epoch and the shard.
        seed: Seed of both orders.
        max_failures: Failures after which a shard is poisoned.
        lease_s: Seconds without a renewal after which a shard goes to another reader.
        session_s: Seconds of silence after which a reader counts as ended.
        flush_s: For a source without an end: seconds without growth after which units that fill no shard are handed
            out as a short one; 0 to keep them until the source ends.
        commit: "report": a shard is done when it is reported; "checkpoint": when a checkpoint of the reader covers it.

    Raises:
        SettingsError: A value cannot be used.
    """

    shard_size: int | None = None
    epochs: int = 1
    shuffle: bool = False
    shuffle_within: bool = False
    seed: int = 0
    max_failures: int = 3
    lease_s: float = 60.0
    session_s: float = 30.0
    commit: Literal["report", "checkpoint"] = "report"
    flush_s: float = 10.0

    def __post_init__(self) -> None:
        limits = {
            "shard_size": (1, _MOST),
            "epochs": (0, _MOST),
            "seed": (0, _SEEDS - 1),
            "max_failures": (1, _FAILURES),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            is_number = is_count(value) or (type(value) is int and value == least)
            if not (is_number and value <= most) and (name, value) != ("shard_size", None):
                raise SettingsError(f"{name}={value!r}: must be a whole number from {least} to {most}")
        for name in ("lease_s", "session_s"):  # finite: a lease without an end would never come back
            value = getattr(self, name)
            if not (is_above_zero(value) and math.isfinite(value)):
                raise SettingsError(f"{name}={value!r}: must be a number of seconds above 0")
        if not (is_above_zero(self.flush_s) and math.isfinite(self.flush_s)) and self.flush_s != 0:
            raise SettingsError(f"flush_s={self.flush_s!r}: must be a number of seconds above 0, or 0 for never")
        if self.commit not in ("report", "checkpoint"):
            raise SettingsError(f"commit={self.commit!r}: must be 'report' or 'checkpoint'")

    def make_spec(
        self, kind: str, location: str, units: int | None, index: IndexPart, shard_size: int = DEFAULT_SHARD_SIZE
    ) -> DatasetSpec:
        """Return the specification of a data set, as `CreateDataset` carries it.

        Args:
            kind: Such as "lines".
            location: Where the data are.
            units: Number of units; None for a source without an end.
            index: What readers need beside the location.
            shard_size: Units per shard where the settings do not say.

        Raises:
            SettingsError: The settings do not fit such a data set, or its index is too large.
        """
        if units is None and (self.shuffle or self.shuffle_within or self.epochs != 1):
            raise SettingsError(
                f"{kind}:{location} has no end: it is neither shuffled nor read several times "
                f"(shuffle={self.shuffle}, shuffle_within={self.shuffle_within}, epochs={self.epochs})"
            )
        if units is not None and units > _MOST:
            raise SettingsError(f"{kind}:{location} has more than 2**62 units")
        head = index.head if units is None else {"shuffle_within": self.shuffle_within, **index.head}
        packed = pack_part(IndexPart(head, index.columns))
        return DatasetSpec(
            kind=kind,
            location=location,
            units=units,
            shard_size=self.shard_size or shard_size,
            seed=self.seed,
            shuffle=self.shuffle,
            epochs=self.epochs,
            max_failures=self.max_failures,
            lease_s=self.lease_s,
            session_s=self.session_s,
            commit=COMMIT_REPORT if self.commit == "report" else COMMIT_CHECKPOINT,
            flush_s=self.flush_s if units is None else 0.0,
            index=check_size(packed, "choose a larger shard_size, or split the files into several data sets"),
        )


class LeasedUnits(Protocol):
    """The units of a shard that a reader has: a `Lease` of the protocol, or anything with the same fields."""

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""

    @property
    def shard(self) -> int:
        """Number of the shard in the data set, from 0."""

    @property
    def start(self) -> int:
        """First unit."""

    @property
    def stop(self) -> int:
        """First unit after the last one."""


class Dataset(abc.ABC):
    """A data set that is cut into shards of `spec.shard_size` units; the last one may be shorter.

    Holds no open file: it may be used after a fork and in several threads, and pickled for another process.

    Args:
        spec: The specification that the master keeps.
        samples: A sequence or `Source` of yours, for data sets whose samples your code makes.

    Raises:
        SettingsError: The specification cannot be used, or needs `samples`.
        ProtocolError: Its index cannot be read.
    """

    _unit: ClassVar[str] = "samples"
    _options_known: ClassVar[Options] = {}
    _paths: Sequence[str] = ()

    def __init__(self, spec: DatasetSpec, samples: Any = None) -> None:
        if spec.shard_size < 1:
            raise SettingsError(f"shard_size={spec.shard_size}: must be above 0")
        self._samples = samples
        self._take_spec(spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (type(self), self._spec.SerializeToString(), self._samples)

    @property
    def spec(self) -> DatasetSpec:
        """The specification that the master keeps. Do not change it."""
        return self._spec

    @property
    def kind(self) -> str:
        """Kind of data set, such as "lines"."""
        return self._spec.kind

    @property
    def units(self) -> int | None:
        """Number of samples, lines, rows or files; None for a source without an end."""
        return self._spec.units if self._spec.HasField("units") else None

    def describe(self) -> str:
        """Return a line for people: what it is, where, and how much of it."""
        files = f", {len(self._paths)} files" if len(self._paths) > 1 else ""
        return f"{self.kind}:{shown(self.spec.location)} ({self._known_units()} {self._unit}{files})"

    @classmethod
    def _read_options(cls, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of this kind of data set: those that are given, and defaults.

        Raises:
            SettingsError: There is no such option, or it has another type.
        """
        if unknown := given.keys() - cls._options_known.keys():
            raise SettingsError(f"data of the kind {kind!r} has no option {', '.join(map(repr, sorted(unknown)))}")
        found = {}
        for name, (default, types) in cls._options_known.items():
            value = given.get(name, default)
            value = list(value) if isinstance(value, tuple) else value
            if not isinstance(value, types):
                expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in types)
                raise SettingsError(f"{name}={quote(value)}: must be {expected}")
            found[name] = value
        return found

    @classmethod
    def _create(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: Progress | None
    ) -> Dataset:
        """Look at the data once, and cut them into shards. For kinds that a location names."""
        raise NotImplementedError

    @abc.abstractmethod
    def _load(self, parts: Sequence[IndexPart]) -> None:
        """Take over all parts of the index. What this raises about odd values becomes `ProtocolError`."""

    @abc.abstractmethod
    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        """Read units, all of one shard, in order."""

    def _known_units(self) -> int:
        """Return how many units can be read by what is known here."""
        return self._spec.units

    def _id_of(self, unit: int) -> UnitId:
        return unit

    def _take_spec(self, spec: DatasetSpec) -> None:
        self._spec = spec
        parts = unpack_parts(spec.index)
        self._shuffle_within = bool(parts and parts[0].head.get("shuffle_within"))
        try:
            self._load(parts)
        except EDLError:
            raise
        except (LookupError, ValueError, TypeError, AttributeError) as exc:
            raise ProtocolError(f"the index of {spec.kind}:{quote(spec.location)} lacks a part: {exc!r}") from exc

    def _options_of(self, part: IndexPart) -> dict[str, Any]:
        """Return the options that an index has."""
        found = part.head["options"]
        if found.keys() != self._options_known.keys():
            raise ProtocolError("the index of the data set has other options than this version of EDL")
        return self._read_options(self.kind, found)

    def covers(self, lease: LeasedUnits) -> bool:
        """Return whether the units of a lease can be read by what is known here. If not, call `update`.

        Args:
            lease: Units of this data set.
        """
        return lease.stop <= self._known_units()

    def update(self, spec: DatasetSpec) -> None:
        """Take over a newer specification of the same data set, which has grown.

        Args:
            spec: As the master has it now.

        Raises:
            SettingsError: It is of another data set.
        """
        old, new = self._spec, spec
        if (old.kind, old.location, old.shard_size) != (new.kind, new.location, new.shard_size):
            raise SettingsError(f"{new.kind}:{new.location} is not the data set {old.kind}:{old.location}")
        self._take_spec(spec)

    def read(self, lease: LeasedUnits) -> Iterator[Any]:
        """Read the samples of a lease.

        Sample k is at position `lease.start` + k of the shard's order. A reader that stops after k samples leaves the
        units from there on to the reader that continues.

        Args:
            lease: Units of this data set.

        Returns:
            An iterator over `lease.stop - lease.start` samples.

        Raises:
            SettingsError: The lease is not of this data set as it is known here.
            SourceError: The data are missing, cannot be read, or have changed. Names the file.
        """
        first, stop = self._shard_bounds(lease)
        if self._shuffle_within:
            return self._read_shuffled(lease, first, stop)
        return self._read_exactly(lease.shard, lease.start, lease.stop)

    def sample_ids(self, lease: LeasedUnits) -> list[UnitId]:
        """Return the ids of the samples of a lease, in the order of `read`.

        Args:
            lease: Units of this data set.

        Raises:
            SettingsError: The lease is not of this data set as it is known here.
        """
        first, stop = self._shard_bounds(lease)
        if not self._shuffle_within:
            return [self._id_of(unit) for unit in range(lease.start, lease.stop)]
        return [self._id_of(first + place) for place in self._order(lease, first, stop)]

    def _order(self, lease: LeasedUnits, first: int, stop: int) -> list[int]:
        order = permute_shard(self._spec.seed, lease.epoch, lease.shard, stop - first)
        return order[lease.start - first : lease.stop - first]

    def _read_shuffled(self, lease: LeasedUnits, first: int, stop: int) -> Iterator[Any]:
        samples = list(self._read_exactly(lease.shard, first, stop))
        for place in self._order(lease, first, stop):
            yield samples[place]

    def _read_exactly(self, shard: int, start: int, stop: int) -> Iterator[Any]:
        """Read units, and make sure that there are neither fewer nor more of them."""
        count, wanted = 0, stop - start
        for sample in itertools.islice(self._read_units(start, stop), wanted + 1):
            count += 1
            if count > wanted:
                break
            yield sample
        if count != wanted:
            found = f"{count} samples" if count < wanted else "more samples"
            raise SourceError(
                f"{self.describe()}: shard {shard} has {found}, not the {wanted} of its index; it has changed"
            )

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
    return kind(DatasetSpec.FromString(spec), samples)


def permute_shard(seed: int, epoch: int, shard: int, count: int) -> list[int]:
    """Return the order in which the units of a shard are read, a permutation of `range(count)`.

    The units are sorted by a keyed BLAKE2b hash of their number (RFC 7693). The order depends on nothing but the
    arguments, and is part of the protocol: readers of several versions of EDL may share a shard. The generators of
    Python and NumPy may change with a version. The order of the shards in an epoch, which is computed a position at a
    time, is the master's: see `edl.master.shards.order`.
    """
    key = struct.pack("<QQQ", seed, epoch, shard)
    hashes = [hashlib.blake2b(struct.pack("<Q", unit), digest_size=16, key=key).digest() for unit in range(count)]
    return sorted(range(count), key=hashes.__getitem__)


class RangeDataset(Dataset):
    """The numbers from 0, or the samples of your sequence that have these numbers."""

    @classmethod
    def _create(
        cls, location: str, settings: ShardSettings, options: Mapping[str, Any], progress: Progress | None
    ) -> Dataset:
        if not location.isascii() or not location.isdecimal():
            raise SettingsError(f"range:{location}: expected a size, as in range:1000")
        return cls.from_size(location, int(location), settings)

    @classmethod
    def from_size(cls, location: str, units: int, settings: ShardSettings, samples: Any = None) -> Dataset:
        """Cut a range of `units` numbers, or the sequence `samples`, which is called `location`."""
        if units < 1:
            raise SettingsError(f"range:{location} has no samples")
        head = {"named": samples is not None}
        return cls(settings.make_spec("range", location, units, IndexPart(head)), samples)

    def _load(self, parts: Sequence[IndexPart]) -> None:
        if parts and parts[0].head.get("named") and self._samples is None:
            raise missing_samples(self, "the sequence itself")
        if self._samples is not None and len(self._samples) != self.spec.units:
            raise SourceError(
                f"the sequence has {len(self._samples)} samples here, and {self.spec.units} where the data set was "
                f"created: every reader needs the same"
            )

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        if self._samples is None:
            return range(start, stop)
        return (self._samples[number] for number in range(start, stop))


def missing_samples(dataset: Dataset, instead: str) -> SettingsError:
    """Return the error for a data set that your code makes, where a reader did not say which code."""
    return SettingsError(
        f"the samples of {dataset.describe()} are made by code of yours: pass samples={dataset.spec.location!r}, or "
        f"{instead}. EDL imports no code because a message names it"
    )
