"""Data that are cut into shards: the base class of all kinds of data sets, and the simplest kind, numbers.

`open_dataset` reads the data once and records in an index where shards begin. The program sends the `spec` with this
index to the master, which hands out leases: ranges of units within a shard.

An index has one or more parts. When a source grows, parts are appended to the index. A part has a JSON head and columns
of whole numbers. Each number in a column takes as few bytes as the largest number needs. A column contains the lowest
bytes of all numbers first, then all second bytes, and so on (the shuffle filter of HDF5 and Blosc), and is compressed.
With this encoding, a shard of text takes about six bytes of the index.
"""

from __future__ import annotations

import abc
import itertools
import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from edl.errors import EDLError, ProtocolError, SettingsError, SourceError
from edl.permutation import Permutation
from edl.protocol.master import COMMIT_CHECKPOINT, COMMIT_REPORT, DatasetSpec
from edl.quoting import quote, shown
from edl.settings import is_above_zero, is_count

UnitId: TypeAlias = int | str
"""The id of a unit, stable across epochs and readers: the unit's number in the data set, or the file's path in a set of
files."""
Options: TypeAlias = Mapping[str, tuple[Any, Any]]  # by name: the default, and the type of other values
Numbers: TypeAlias = npt.NDArray[np.int64]

DEFAULT_SHARD_SIZE: Final = 64  # units per shard: a batch or two, so that a killed worker loses little work
MOST_INDEX_NBYTES: Final = 48 << 20  # the master's messages hold 64 MiB, about eight million shards of text
_MOST_UNPACKED: Final = 1 << 30  # bytes of a part: without a limit, a few hostile kilobytes would fill the memory
_MAGIC: Final = b"EDLX\x01"
_HEAD: Final = struct.Struct("<5sII")
_WIDTHS: Final = (1, 2, 4, 8)  # bytes per number, as in NumPy's types
_ORDER: Final = 2
"""Version of the order within a shard, kept in the index: continuing a partly read shard in a different order would
read the wrong units. In an old index, this value is `true`, which means an order by hashes."""
ENDLESS: Final = 1 << 62  # units of a `Source`: a reader trusts the master's leases, and the source knows its size
_SEEDS: Final = 1 << 64  # seeds have 64 bits on the wire
_MOST: Final = 1 << 62  # units, shard size or epochs: the sum of two still fits in 63 bits
_FAILURES: Final = (1 << 31) - 1  # failures have 31 bits on the wire


@dataclass(frozen=True)
class ShardSettings:
    """How a data set is cut into shards, the order of the shards, and when a lease ends.

    Attributes:
        shard_size: Units (samples, lines, rows, files) per shard. None for the default of the kind of data: 64, or for
            Parquet the number of rows in the largest row group.
        epochs: Passes over the data; 0 for endless passes.
        shuffle: Hand out the shards of an epoch in an order determined by `seed` and the epoch.
        shuffle_within: Read the units of a shard in an order determined by `seed`, the epoch and the shard.
        seed: Seed for both orders.
        max_failures: Number of failures after which a shard is poisoned.
        lease_s: Seconds without a renewal after which a shard goes to another reader.
        session_s: Seconds of silence after which a reader counts as ended.
        flush_s: For a source without an end: seconds without growth after which units that do not fill a shard are
            handed out as a short shard; 0 to hold these units back until the source ends.
        commit: "report": a shard is done when its reader reports it; "checkpoint": a shard is done when a checkpoint of
            the reader covers it.

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
        for name in ("lease_s", "session_s"):  # finite: a lease without an end would never return to the queue
            value = getattr(self, name)
            if not (is_above_zero(value) and math.isfinite(value)):
                raise SettingsError(f"{name}={value!r}: must be a number of seconds above 0")
        if not (is_above_zero(self.flush_s) and math.isfinite(self.flush_s)) and self.flush_s != 0:
            raise SettingsError(f"flush_s={self.flush_s!r}: must be a number of seconds above 0, or 0 for never")
        if self.commit not in ("report", "checkpoint"):
            raise SettingsError(f"commit={self.commit!r}: must be 'report' or 'checkpoint'")

    def _make_spec(
        self,
        kind: str,
        location: str,
        units: int | None,
        head: Mapping[str, Any],
        columns: Mapping[str, Numbers] | None = None,
        shard_size: int = DEFAULT_SHARD_SIZE,
    ) -> DatasetSpec:
        """Return a data set's specification, with an index of these columns. `units` is None for an endless source."""
        if units is None and (self.shuffle or self.shuffle_within or self.epochs != 1):
            raise SettingsError(
                f"{kind}:{location} has no end: it can be neither shuffled nor read several times "
                f"(shuffle={self.shuffle}, shuffle_within={self.shuffle_within}, epochs={self.epochs})"
            )
        if units is not None:
            if units > _MOST:
                raise SettingsError(f"{kind}:{location} has more than 2**62 units")
            head = {"shuffle_within": _ORDER if self.shuffle_within else False, **head}
        index = pack_part(head, columns or {})
        if len(index) > MOST_INDEX_NBYTES:
            raise SettingsError(
                f"{kind}:{location}: the index would take {len(index) >> 20} MiB, more than {MOST_INDEX_NBYTES >> 20}: "
                f"choose a larger shard_size, or split the files into several data sets"
            )
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
            index=index,
        )


class LeasedUnits(Protocol):
    """Units of a shard that a reader has leased: a `Shard` of a `ShardReader`, or any object with the same fields."""

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
        """First unit after the last unit of the lease."""


class IndexPart(NamedTuple):
    """A part of an index: a JSON object, and arrays of non-negative whole numbers, by name."""

    head: dict[str, Any]
    columns: dict[str, Numbers]


def pack_part(head: Mapping[str, Any], columns: Mapping[str, Numbers]) -> bytes:
    """Return a part of an index as bytes. An index is a concatenation of parts."""
    shapes, planes = [], []
    for name, numbers in columns.items():
        most = int(numbers.max(initial=0))
        width = next(width for width in _WIDTHS if most < 1 << (8 * width))
        shapes.append([name, len(numbers), width])
        planes.append(numbers.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes())
    text = json.dumps([dict(head), shapes], separators=(",", ":"), sort_keys=True).encode()
    body = zlib.compress(b"".join([struct.pack("<I", len(text)), text, *planes]), 6)
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def unpack_parts(index: bytes) -> list[IndexPart]:
    """Return the parts of an index. The index is untrusted, because it arrives over the network."""
    parts = []
    at = 0
    try:
        while at < len(index):
            magic, length, crc = _HEAD.unpack_from(index, at)
            at += _HEAD.size + length
            body = index[at - length : at]
            if magic != _MAGIC or len(body) != length or zlib.crc32(body) != crc:
                raise ValueError("the index is damaged, or from another version of EDL")
            inflater = zlib.decompressobj()
            plain = inflater.decompress(body, _MOST_UNPACKED)
            if not inflater.eof:
                raise ValueError(f"a part is larger than {_MOST_UNPACKED >> 20} MiB")
            parts.append(_unpack(plain))
    except (struct.error, zlib.error, ValueError, TypeError, RecursionError) as exc:
        raise ProtocolError(f"the index of the data set cannot be read: {exc}") from exc
    return parts


def _unpack(plain: bytes) -> IndexPart:
    (length,) = struct.unpack_from("<I", plain)
    head, shapes = json.loads(plain[4 : 4 + length])
    at = 4 + length
    columns = {}
    for name, count, width in shapes:
        planes = np.frombuffer(plain, np.uint8, count * width, at).reshape(width, count)
        numbers = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(count).astype(np.int64)
        if (numbers < 0).any():
            raise ValueError(f"{quote(name)} has numbers of more than 63 bits")
        columns[name] = numbers
        at += count * width
    return IndexPart(head, columns)


class Dataset(abc.ABC):
    """A data set that is cut into shards of `spec.shard_size` units; the last shard may be shorter.

    A data set keeps no file open, so you can pickle it, and use it after a fork and in several threads.

    Args:
        spec: The specification that the master keeps.
        samples: Your sequence or `Source`, for data sets whose samples your code creates.

    Raises:
        SettingsError: The specification cannot be used, or needs `samples`.
        ProtocolError: The index in the specification cannot be read.
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
        """The kind of the data set, such as "lines"."""
        return self._spec.kind

    @property
    def units(self) -> int | None:
        """Number of samples, lines, rows or files; None if the source has no end."""
        return None if self.grows else self._spec.units

    @property
    def grows(self) -> bool:
        """Whether more units may follow. A `Follower` reports new units to the master."""
        return self.kind in ("follow", "source")

    def describe(self) -> str:
        """Return a one-line description: kind, location and size."""
        files = f", {len(self._paths)} files" if len(self._paths) > 1 else ""
        units = f"{self._known if self._known < ENDLESS else 'no'} {self._unit}{' so far' if self.grows else ''}"
        return f"{self.kind}:{shown(self.spec.location)} ({units}{files})"

    @classmethod
    def _read_options(cls, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options for this kind of data set: the options that were given, and defaults for the rest."""
        if unknown := given.keys() - cls._options_known.keys():
            raise SettingsError(f"data of kind {kind!r} has no option {', '.join(map(repr, sorted(unknown)))}")
        for name, value in given.items():
            default, expected = cls._options_known[name]
            if not isinstance(value, expected) and value is not default:
                raise SettingsError(f"{name}={quote(value)}: must be {getattr(expected, '__name__', expected)}")
        return {name: given.get(name, default) for name, (default, _) in cls._options_known.items()}

    @classmethod
    @abc.abstractmethod
    def _create(cls, kind: str, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        """Read the data once, and cut them into shards. For data that grow (`follow`), the index starts empty."""

    @abc.abstractmethod
    def _load(self, parts: Sequence[IndexPart]) -> int:
        """Load all parts of the index, and return their number of units.

        If the index is incomplete, this may raise `LookupError`, `ValueError`, `TypeError` or `AttributeError`.
        """

    @abc.abstractmethod
    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        """Read units of one shard, in order. If their number is not `stop - start`, the data have changed."""

    def _id_of(self, unit: int) -> UnitId:
        return unit

    def _take_spec(self, spec: DatasetSpec) -> None:
        self._spec = spec
        parts = unpack_parts(spec.index)
        try:
            order = parts[0].head.get("shuffle_within", False) if parts else False
            if order not in (False, _ORDER):
                raise SettingsError(
                    f"{spec.kind}:{quote(spec.location)} was created by a version of EDL that reads the units of a "
                    f"shard in a different order: create it again, under a different name"
                )
            self._shuffle_within = order == _ORDER
            self._known = self._load(parts)
        except (LookupError, ValueError, TypeError, AttributeError) as exc:
            if isinstance(exc, EDLError):
                raise
            raise ProtocolError(f"the index of {spec.kind}:{quote(spec.location)} lacks a part: {exc!r}") from exc
        if spec.HasField("units") and self._known not in (spec.units, ENDLESS):
            raise ProtocolError(f"the index of {spec.kind}:{spec.location} has a different number of units")

    def covers(self, lease: LeasedUnits) -> bool:
        """Return whether this data set's index covers the units of a lease. If not, call `update`.

        Args:
            lease: Units of this data set.
        """
        return lease.stop <= self._known

    def update(self, spec: DatasetSpec) -> None:
        """Adopt a newer specification of the same data set, which has grown.

        Args:
            spec: The master's current specification.

        Raises:
            SettingsError: The specification is for a different data set.
        """
        old, new = self._spec, spec
        if (old.kind, old.location, old.shard_size) != (new.kind, new.location, new.shard_size):
            raise SettingsError(f"{new.kind}:{new.location} is not the data set {old.kind}:{old.location}")
        self._take_spec(spec)

    def read(self, lease: LeasedUnits) -> Iterator[Any]:
        """Read the samples of a lease.

        Sample k is unit number `lease.start` + k if the units of each shard are counted in the shard's order. If a
        reader stops after k samples, the next reader continues with the remaining units.

        Args:
            lease: Units of this data set.

        Returns:
            An iterator over `lease.stop - lease.start` samples.

        Raises:
            SettingsError: This data set's index does not cover the lease.
            SourceError: The data are missing, cannot be read, or have changed. The message names the file.
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
            SettingsError: This data set's index does not cover the lease.
        """
        first, stop = self._shard_bounds(lease)
        return [self._id_of(first + place) for place in self._order(lease, first, stop)]

    def _order(self, lease: LeasedUnits, first: int, stop: int) -> Sequence[int]:
        """Return the positions of a lease's units in their shard, which contains the units `first` to `stop`."""
        if not self._shuffle_within:
            return range(lease.start - first, lease.stop - first)
        order = Permutation(stop - first, b"%d/%d/%d" % (self._spec.seed, lease.epoch, lease.shard))
        return order.values(lease.start - first, lease.stop - first)

    def _read_shuffled(self, lease: LeasedUnits, first: int, stop: int) -> Iterator[Any]:
        samples = list(self._read_exactly(lease.shard, first, stop))
        for place in self._order(lease, first, stop):
            yield samples[place]

    def _read_exactly(self, shard: int, start: int, stop: int) -> Iterator[Any]:
        count, expected = 0, stop - start
        for sample in itertools.islice(self._read_units(start, stop), expected + 1):
            count += 1
            if count > expected:
                break
            yield sample
        if count != expected:
            found = f"{count} samples" if count < expected else "more samples"
            raise SourceError(
                f"{self.describe()}: shard {shard} has {found}, not the {expected} of its index; the data have changed"
            )

    def _shard_bounds(self, lease: LeasedUnits) -> tuple[int, int]:
        """Return the range of units of the lease's whole shard."""
        first = lease.shard * self._spec.shard_size
        stop = min(first + self._spec.shard_size, self._known)
        if not 0 <= first <= lease.start < lease.stop <= stop:
            raise SettingsError(
                f"units {lease.start} to {lease.stop} are not in shard {lease.shard} of {self.describe()}, according "
                f"to this reader's index; if the data set has grown, update it"
            )
        return first, stop

    def _look(self, now_s: float, settle_s: float, *, final: bool) -> tuple[int, bool]:
        """Return how many units there are now (with unfinished units if `final`), and whether the source is complete.

        After a call of `update`, earlier results are no longer valid. Raises `SourceError` if the source has shrunk or
        was replaced.
        """
        raise NotImplementedError

    def _next_part(self, known: int, units: int) -> bytes:
        """Return the index part from unit `known` to before `units`: all that `_look` counted, or full shards only."""
        return b""


def _load_again(kind: type[Dataset], spec: bytes, samples: Any) -> Dataset:
    return kind(DatasetSpec.FromString(spec), samples)


@runtime_checkable
class Source(Protocol):
    """Units by offset, such as a growing table. Each reader creates its own `Source`, with the same units."""

    def count(self) -> int:
        """Return how many units can be read now. Never decreases."""

    def ended(self) -> bool:
        """Return whether the source is complete."""

    def read(self, start: int, stop: int) -> Iterable[Any]:
        """Return `stop - start` samples; every read of the same range must return the same samples.

        Args:
            start: First unit.
            stop: First unit after the last unit to read.
        """


class NumberedDataset(Dataset):
    """The numbers from 0, or the samples of your sequence at these numbers, or the units of your `Source`."""

    @classmethod
    def _create(cls, kind: str, location: str, settings: ShardSettings, options: dict[str, Any]) -> Dataset:
        if not location.isascii() or not location.isdecimal():
            raise SettingsError(f"range:{location}: expected a size, such as range:1000")
        return cls.of(location, int(location), settings)

    @classmethod
    def of(cls, location: str, units: int | None, settings: ShardSettings, samples: Any = None) -> Dataset:
        """Cut `units` numbers, or the user's samples named `location`, into shards; `units` is None for a `Source`."""
        if units is not None and units < 1:
            raise SettingsError(f"range:{location} has no samples")
        kind = "source" if units is None else "range"
        return cls(settings._make_spec(kind, location, units, {"named": samples is not None}), samples)

    def _load(self, parts: Sequence[IndexPart]) -> int:
        location, units = self._spec.location, self._spec.units
        is_named = self.grows or (parts and parts[0].head.get("named"))
        if is_named and (self._samples is None or self.grows is not isinstance(self._samples, Source)):
            raise SettingsError(
                f"your own code makes the samples of {self.kind}:{shown(location)}: pass samples={location!r}, or the "
                f"object itself. EDL does not import code merely because a message names it"
            )
        if self.grows:
            self._counted = 0
            return ENDLESS
        if self._samples is not None and len(self._samples) != units:
            raise SourceError(
                f"the sequence has {len(self._samples)} samples here, but had {units} where the data set was created: "
                f"every reader needs the same sequence"
            )
        return units

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        if self._samples is None:
            return range(start, stop)
        if self.grows:
            found: Iterable[Any] = self._samples.read(start, stop)
            return found
        return (self._samples[number] for number in range(start, stop))

    def _look(self, now_s: float, settle_s: float, *, final: bool) -> tuple[int, bool]:
        ended = self._samples.ended()  # before the count, so that units added in between are not lost
        units = self._samples.count()
        if units < self._counted:
            raise SourceError(f"the source had {self._counted} units, but now has {units}: its offsets have changed")
        self._counted = units
        return units, ended
