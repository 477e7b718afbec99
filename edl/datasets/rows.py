"""Data sets to be labelled: their rows, or sequences of rows, as the inputs of the teachers' model, batch by batch.

Unlike a `Dataset`, which is cut into shards of samples in the user's own form, a `LabelDataset` yields ids and arrays,
and only for rows that need a label. Where ids are known without the rows (`IndexedData`), no other row is loaded.
Asking teachers, and keeping labels, does not belong here.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from edl.errors import SettingsError, SourceError
from edl.protocol.arrays import RowBuffer, as_array
from edl.protocol.names import POSITION
from edl.protocol.tensors import Array

__all__ = [
    "ArrayData",
    "Batch",
    "IndexedData",
    "IterableData",
    "KnownFilter",
    "LabelDataset",
    "RaggedData",
    "SampleField",
    "SampleId",
    "SequenceData",
]

SampleId: TypeAlias = int | str
KnownFilter: TypeAlias = Callable[[list[SampleId], dict[str, Any] | None], Array]
"""Tells which ids need no label, bool [ids]. Gets the inputs as well where a label belongs to one text."""
Batch: TypeAlias = tuple[list[SampleId], dict[str, Any]]
"""Ids, and inputs by name: arrays [rows, ...], or for sequences lists with an array [tokens, ...] per id."""

_BLOCK = 65536
"""Ids looked up at a time: enough that the call costs nothing, and a few megabytes of Python objects."""
_SEQUENCES_BLOCK = 4096
"""Sequences looked up at a time: some megabytes of tokens."""


class LabelDataset(abc.ABC):
    """A data set to be labelled.

    Attributes:
        inputs: Names of the teachers' inputs that it has.
        rows: Number of samples; None if unknown.
        sequences: Whether a sample is a sequence, with a row for each of its tokens.
    """

    inputs: tuple[str, ...]
    rows: int | None = None
    sequences = False

    @abc.abstractmethod
    def batches(self, rows: int, known: KnownFilter) -> Iterator[Batch]:
        """Yield all samples that are not known, in order.

        Args:
            rows: Most samples in a batch.
            known: Tells which ids need no label.
        """


class IndexedData(LabelDataset):
    """A data set whose rows can be loaded one by one, and whose ids are known before.

    Args:
        rows: Number of samples.
        ids: Integers or strings [rows]; None: the position of a row is its id.
        checksum: Checksum of the whole content, where it is known without reading it.
    """

    rows: int

    def __init__(self, rows: int, ids: Array | None, checksum: str = "") -> None:
        self.rows = rows
        self.checksum = checksum
        self._ids = ids
        if ids is not None and (ids.shape != (rows,) or ids.dtype.kind not in "iuUO"):
            raise SettingsError(f"--ids: {ids.dtype} {list(ids.shape)}, expected one integer or string for {rows} rows")
        if ids is not None and len(set(ids.tolist())) < rows:
            raise SettingsError("--ids: some ids are there twice; each sample needs one of its own")

    @abc.abstractmethod
    def load(self, parts: Iterable[Array]) -> Iterator[Batch]:
        """Yield a batch for each part; may take parts in ahead of what it yields.

        Args:
            parts: Positions [rows] of the rows of each batch, at least one.

        Raises:
            SourceError: A sample cannot be sent; or whatever the data set's own code raises.
        """

    def batches(self, rows: int, known: KnownFilter) -> Iterator[Batch]:
        """See `LabelDataset.batches`."""
        index = self.unknown(known)
        return self.load(index[start : start + rows] for start in range(0, len(index), rows))

    def ids_of(self, index: Array) -> list[SampleId]:
        """Return the ids of the rows at these positions."""
        ids: list[SampleId] = (index if self._ids is None else self._ids[index]).tolist()
        return ids

    def unknown(self, known: KnownFilter, start: int = 0, stop: int | None = None) -> Array:
        """Return the positions, rising, of the rows from `start` to before `stop` that are not known."""
        index = np.arange(start, self.rows if stop is None else stop)
        parts = [index[at : at + _BLOCK] for at in range(0, len(index), _BLOCK)]
        return np.concatenate([index[:0], *(part[~known(self.ids_of(part), None)] for part in parts)])


class ArrayData(IndexedData):
    """Arrays [rows, ...] by input, perhaps mapped from files."""

    def __init__(self, arrays: Mapping[str, Array], ids: Array | None = None, checksum: str = "") -> None:
        counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if not all(counts.values()):
            raise SettingsError(f"arrays without rows: {', '.join(name for name in counts if not counts[name])}")
        if len(set(counts.values())) > 1:
            raise SettingsError(f"the arrays have different numbers of rows: {counts}")
        super().__init__(next(iter(counts.values())), ids, checksum)
        self.inputs = tuple(arrays)
        self._arrays = dict(arrays)

    def load(self, parts: Iterable[Array]) -> Iterator[Batch]:
        """See `IndexedData.load`."""
        for part in parts:
            found = {name: as_array(array[part], f"array {name!r}") for name, array in self._arrays.items()}
            yield self.ids_of(part), found


class RaggedData(IndexedData):
    """Sequences of any length: arrays [tokens of all, ...] by input, and where each sequence begins.

    Args:
        arrays: Arrays by input name, perhaps mapped from files.
        offsets: [sequences + 1], rising from 0 to the number of all tokens.

    Attributes:
        position_input: The model's input that holds positions; it need not be among the arrays.
        empty: Number of sequences without tokens, which get no label.
    """

    sequences = True
    position_input = POSITION

    def __init__(
        self, arrays: Mapping[str, Array], offsets: Array, ids: Array | None = None, checksum: str = ""
    ) -> None:
        counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
            raise SettingsError(
                f"offsets {offsets.dtype} {list(offsets.shape)}: expected integers, one more than there are sequences"
            )
        offsets = offsets.astype(np.int64)
        if offsets[0] or (np.diff(offsets) < 0).any() or any(count != offsets[-1] for count in counts.values()):
            raise SettingsError(
                f"offsets from {offsets[0]} to {offsets[-1]}: they must rise from 0 to the number of tokens, which is "
                f"{', '.join(f'{count} in {name!r}' for name, count in counts.items())}"
            )
        super().__init__(len(offsets) - 1, ids, checksum)
        self.inputs = tuple(arrays)
        self.empty = int(np.count_nonzero(np.diff(offsets) == 0))
        self._arrays = dict(arrays)
        self._offsets = offsets

    def load(self, parts: Iterable[Array]) -> Iterator[Batch]:
        """See `IndexedData.load`."""
        for part in parts:
            places = list(zip(self._offsets[part].tolist(), self._offsets[part + 1].tolist(), strict=True))
            fields: dict[str, Any] = {
                name: [np.asarray(array[start:stop]) for start, stop in places] for name, array in self._arrays.items()
            }
            yield self.ids_of(part), fields

    def unknown(self, known: KnownFilter, start: int = 0, stop: int | None = None) -> Array:
        """See `IndexedData.unknown`. Sequences without tokens need no label."""
        stop = self.rows if stop is None else stop
        index = start + np.flatnonzero(np.diff(self._offsets[start : stop + 1]))
        parts = [index[at : at + _SEQUENCES_BLOCK] for at in range(0, len(index), _SEQUENCES_BLOCK)]
        loaded = zip(parts, self.load(parts), strict=True)
        return np.concatenate([index[:0], *(part[~known(*batch)] for part, batch in loaded)])


@dataclass(frozen=True)
class SampleField:
    """Finds an input or the id in a sample: by key, by position, or the sample itself. Can be pickled.

    Attributes:
        key: Key in a mapping.
        position: Position in a tuple or list; None if a position was not named.
        alone: Whether nothing else is taken from a sample.
        sequences: Whether a list of numbers is a sample, as tokenizers return it.
    """

    key: str
    position: int | None
    alone: bool = False
    sequences: bool = False

    def __call__(self, sample: Any) -> Any:
        """Return what the field holds."""
        is_tokens = self.sequences and self.alone and isinstance(sample, list) and sample
        if is_tokens and isinstance(sample[0], int | float):
            return sample
        if isinstance(sample, Mapping):
            return sample[self.key]
        if isinstance(sample, tuple | list):
            if self.position is None:
                raise TypeError(f"samples are {type(sample).__name__}s: name a position, not {self.key!r}")
            return sample[self.position]
        if not self.alone:
            raise TypeError(f"a sample is one {type(sample).__name__}; it has no parts")
        return sample


class SequenceData(IndexedData):
    """Samples by position, such as a PyTorch `Dataset` with `__len__` and `__getitem__`.

    Args:
        samples: Samples by position.
        fields: Finds an input in a sample, by input name.
        workers: Processes that load samples, as in PyTorch's `DataLoader`; 0 to load them in this process.
    """

    def __init__(
        self,
        samples: Any,
        fields: Mapping[str, Callable[[Any], Any]],
        workers: int = 0,
        *,
        sequences: bool = False,
    ) -> None:
        super().__init__(len(samples), None)
        self.inputs = tuple(fields)
        self.sequences = sequences
        self._loaded = _Loaded(samples, _Stack(fields, sequences=sequences))
        self._workers = workers
        self._parts = _Parts()

    def load(self, parts: Iterable[Array]) -> Iterator[Batch]:
        """See `IndexedData.load`. With worker processes, up to two parts for each of them are taken in ahead."""
        if not self._workers:
            for part in parts:
                yield self.ids_of(part), self._loaded[part.tolist()]
            return
        taken = self._parts.begin(parts)
        for batch in self._worker_processes:
            yield self.ids_of(taken.popleft()), batch
        if taken:  # the loader takes a StopIteration in a worker process for its own end
            first = self.ids_of(taken[0])[0]
            raise SourceError(f"the samples from {first!r} on are not loaded: the data set's code raises StopIteration")

    @functools.cached_property
    def _worker_processes(self) -> Iterable[dict[str, Any]]:
        """The processes. They live as long as this object: a shard follows the other, and a start takes long."""
        from torch.utils.data import DataLoader

        return DataLoader(
            self._loaded,  # type: ignore[arg-type]
            batch_size=None,  # a part is one "sample" of the loader
            sampler=self._parts,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            persistent_workers=True,
        )


class _Parts:
    """The parts that a loader's next pass is over: it gets a single object for all passes."""

    def begin(self, parts: Iterable[Array]) -> deque[Array]:
        """Begin a pass; return the queue of the parts that were taken in and not yielded yet."""
        self._parts = parts
        self._taken: deque[Array] = deque()
        return self._taken

    def __iter__(self) -> Iterator[list[int]]:
        for part in self._parts:
            self._taken.append(part)
            yield part.tolist()


class IterableData(LabelDataset):
    """Samples in sequence.

    Args:
        make: Returns an iterable from the start on, each time that it is called.
        fields: Finds an input in a sample, by input name.
        id_field: Finds a sample's id; None for its position.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[Any]],
        fields: Mapping[str, Callable[[Any], Any]],
        id_field: Callable[[Any], Any] | None = None,
        *,
        sequences: bool = False,
    ) -> None:
        self.inputs = tuple(fields)
        self.sequences = sequences
        self._make = make
        self._stack = _Stack(fields, sequences=sequences)
        self._id_field = id_field

    def batches(self, rows: int, known: KnownFilter) -> Iterator[Batch]:
        """See `LabelDataset.batches`."""
        waiting: list[_Entry] = []
        samples = (self._stack.take(sample_id, sample) for sample_id, sample in self._with_ids())
        while block := list(itertools.islice(samples, rows)):
            new = ~known([sample_id for sample_id, _ in block], None)
            waiting += [entry for entry, is_new in zip(block, new, strict=True) if is_new]
            while len(waiting) >= rows:
                yield self._batch(waiting[:rows])
                del waiting[:rows]
        if waiting:
            yield self._batch(waiting)

    def _batch(self, entries: list[_Entry]) -> Batch:
        return [sample_id for sample_id, _ in entries], self._stack(entries)

    def _with_ids(self) -> Iterator[tuple[SampleId, Any]]:
        if self._id_field is None:
            yield from enumerate(self._make())
            return
        seen: set[SampleId] = set()  # takes less than what the cache knows of the same ids
        for at, sample in enumerate(self._make()):
            try:
                found = self._id_field(sample)
            except (LookupError, TypeError) as exc:
                raise SourceError(f"sample {at} has no field for its id: {exc!r}") from exc
            sample_id = found.item() if getattr(found, "shape", None) == () else found
            if type(sample_id) not in (int, str):
                raise SourceError(f"sample {at}: its id is {found!r}; an id is an integer or a string")
            if sample_id in seen:  # they would share a label
                raise SourceError(f"sample {at}: a sample before it has the id {sample_id!r} too; each needs its own")
            seen.add(sample_id)
            yield sample_id, sample


_Entry: TypeAlias = tuple[SampleId, dict[str, Array]]


class _Stack:
    """Makes the inputs of a batch out of samples, in whichever process loads them."""

    def __init__(self, fields: Mapping[str, Callable[[Any], Any]], *, sequences: bool) -> None:
        self._fields = fields
        self._sequences = sequences

    def take(self, sample_id: SampleId, sample: Any) -> _Entry:
        """Return a sample's inputs, copied: the next sample may be loaded into the same memory."""
        taken = {}
        for name, field in self._fields.items():
            try:
                found = field(sample)
            except (LookupError, TypeError) as exc:
                raise SourceError(f"sample {sample_id!r} has no field for input {name!r}: {exc!r}") from exc
            taken[name] = np.array(as_array(found, f"sample {sample_id!r}, input {name!r}"))
        return sample_id, taken

    def __call__(self, entries: Sequence[_Entry]) -> dict[str, Any]:
        if self._sequences:
            return {name: [fields[name] for _, fields in entries] for name in self._fields}
        stacked = {name: RowBuffer(name, len(entries), "bring all samples to one shape") for name in self._fields}
        for sample_id, fields in entries:
            for name, array in fields.items():
                stacked[name].append(array, f"sample {sample_id!r}")
        return {name: rows.gathered() for name, rows in stacked.items()}


@dataclass(frozen=True)
class _Loaded:
    """Inputs of the samples at some positions."""

    samples: Any
    stack: _Stack

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, positions: list[int]) -> dict[str, Any]:
        return self.stack([self.stack.take(at, self.samples[at]) for at in positions])


def _as_it_is(batch: Any) -> Any:
    return batch
