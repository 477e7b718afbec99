"""Kinds of data sets, and their rows batch by batch."""

from __future__ import annotations

import abc
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from edl.distill.cache import SequenceIds
from edl.distill.source.arrays import as_array
from edl.distill.source.row_buffer import RowBuffer
from edl.errors import SettingsError, SourceError
from edl.protocol.tensors import Array

__all__ = [
    "ArrayData",
    "Batch",
    "IndexedData",
    "IterableData",
    "KnownFilter",
    "LabelDataset",
    "SampleId",
    "SequenceData",
]

SampleId: TypeAlias = int | str
KnownFilter: TypeAlias = Callable[[Sequence[SampleId] | SequenceIds], Array]
"""Which of these ids need no label, bool [ids]."""
Batch: TypeAlias = tuple[list[SampleId], dict[str, Any]]
"""Ids and inputs: arrays [rows, ...], or of sequences lists with an array [tokens, ...] for each id."""

_BLOCK = 65536
"""Ids looked up at a time: enough that the call costs nothing, and a few megabytes of Python objects."""


class LabelDataset(abc.ABC):
    """A data set to be labelled.

    Attributes:
        inputs: names of the teachers' inputs that it has.
        rows: how many samples, None if unknown.
        sequences: whether a sample is a sequence, of as many rows as it has tokens.
    """

    inputs: tuple[str, ...]
    rows: int | None = None
    sequences = False

    @abc.abstractmethod
    def batches(self, rows: int, known: KnownFilter) -> Iterator[Batch]:
        """Yield ids and inputs [rows, ...] of all samples that are not known, in order, up to `rows` at a time.

        Args:
            rows: most samples in a batch.
            known: tells which ids need no label.
        """

    def lookup_of(self, batch: Batch) -> Sequence[SampleId] | SequenceIds:
        """Return what tells whether the samples of a batch have labels."""
        return SequenceIds(batch[0]) if self.sequences else batch[0]


class IndexedData(LabelDataset):
    """A data set whose rows can be loaded singly, by ids that are known before.

    Args:
        rows: how many samples.
        ids: integers or strings [rows]; None: a row's position is its id.
        checksum: of the whole content, where it is known without reading it.

    Attributes:
        checksum: as given.
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
        """Yield ids and inputs of rows, a batch for each part; may take in parts ahead of what it yields.

        Args:
            parts: positions [rows] of the rows of a batch, at least one.

        Raises:
            SourceError: a sample cannot be sent; or whatever the data set's own code raises.
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
        """Return the positions of the rows from `start` to before `stop` that are not known, rising."""
        stop = self.rows if stop is None else stop
        found = []
        for begin in range(start, stop, _BLOCK):
            index = np.arange(begin, min(begin + _BLOCK, stop))
            ids = self.ids_of(index)
            found.append(index[~known(SequenceIds(ids) if self.sequences else ids)])
        return np.concatenate(found) if found else np.empty(0, np.int64)


class ArrayData(IndexedData):
    """Arrays [rows, ...] by input, perhaps mapped from files.

    Args:
        arrays: by input name.
        ids: integers or strings [rows]; None: a row's position is its id.
        checksum: see `IndexedData`.
    """

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


class SequenceData(IndexedData):
    """Samples by position, such as a PyTorch `Dataset` with `__len__` and `__getitem__`.

    Args:
        samples: by position.
        fields: by input, how to find it in a sample.
        workers: processes that load samples, as in PyTorch's `DataLoader`; 0 to load them in this process.
        sequences: see `LabelDataset`.
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
        self._samples = samples
        self._stack = _Stack(fields, sequences=sequences)
        self._workers = workers
        self._parts = _Parts()

    def load(self, parts: Iterable[Array]) -> Iterator[Batch]:
        """See `IndexedData.load`. With worker processes up to two parts for each of them are taken in ahead."""
        if not self._workers:
            for part in parts:
                yield self.ids_of(part), self._stack([self._stack.take(at, self._samples[at]) for at in part.tolist()])
            return
        taken: deque[Array] = deque()
        self._parts.positions = _noted(parts, taken)
        for loaded in self._worker_processes:
            yield self.ids_of(taken.popleft()), loaded
        if taken:  # a worker process's StopIteration passes for the loader's end
            first = self.ids_of(taken[0])[0]
            raise SourceError(f"the samples from {first!r} on are not loaded: the data set's code raises StopIteration")

    @functools.cached_property
    def _worker_processes(self) -> Iterable[dict[str, Any]]:
        """The processes, which live as long as this object: shards come one after the other, and a start takes long."""
        from torch.utils.data import DataLoader

        # Each part is one "sample" of the loader: its batches are as they were cut, whatever their sizes.
        return DataLoader(
            _Taken(self._samples, self._stack),  # type: ignore[arg-type]
            batch_sampler=self._parts,
            num_workers=self._workers,
            collate_fn=self._stack,
            persistent_workers=True,
        )


class _Parts:
    """The parts that a loader's next pass is over. A class, so that the loader can be told of them when it is there."""

    positions: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.positions


def _noted(parts: Iterable[Array], taken: deque[Array]) -> Iterator[list[int]]:
    for part in parts:
        taken.append(part)
        yield part.tolist()


class _Taken:
    """Inputs taken of samples, in whichever process loads them."""

    def __init__(self, samples: Any, stack: _Stack) -> None:
        self._samples = samples
        self._stack = stack

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, at: int) -> tuple[SampleId, dict[str, Array]]:
        return self._stack.take(at, self._samples[at])


class IterableData(LabelDataset):
    """Samples in sequence.

    Args:
        make: returns an iterable from the start on, every time that it is called.
        fields: by input, how to find it in a sample.
        id_field: how to find a sample's id; None: its position.
        sequences: see `LabelDataset`.
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
        waiting: list[tuple[SampleId, dict[str, Array]]] = []
        seen: set[SampleId] = set()  # takes less than what the cache knows of the same ids
        samples = (self._take(at, sample, seen) for at, sample in enumerate(self._make()))
        while block := list(itertools.islice(samples, rows)):
            new = ~known([sample_id for sample_id, _ in block])
            waiting += [entry for entry, is_new in zip(block, new, strict=True) if is_new]
            if len(waiting) >= rows:
                yield self._batch(waiting[:rows])
                del waiting[:rows]
        if waiting:
            yield self._batch(waiting)

    def _take(self, at: int, sample: Any, seen: set[SampleId]) -> tuple[SampleId, dict[str, Array]]:
        return self._stack.take(self._new_id(at, sample, seen), sample)

    def _batch(self, entries: list[tuple[SampleId, dict[str, Array]]]) -> Batch:
        return [sample_id for sample_id, _ in entries], self._stack(entries)

    def _new_id(self, at: int, sample: Any, seen: set[SampleId]) -> SampleId:
        """Return a sample's id, and check that it is new: two samples of the same id would share a label."""
        sample_id = self._id(at, sample)
        if self._id_field is not None:
            if sample_id in seen:
                raise SourceError(f"sample {at}: a sample before it has the id {sample_id!r} too; each needs its own")
            seen.add(sample_id)
        return sample_id

    def _id(self, at: int, sample: Any) -> SampleId:
        if self._id_field is None:
            return at
        try:
            found = self._id_field(sample)
        except (LookupError, TypeError) as exc:
            raise SourceError(f"sample {at} has no field for its id: {exc!r}") from exc
        sample_id: SampleId = found.item() if getattr(found, "shape", None) == () else found
        if type(sample_id) not in (int, str):
            raise SourceError(f"sample {at}: its id is {found!r}; an id is an integer or a string")
        return sample_id


class _Stack:
    """Makes an array [rows, ...] of every input out of samples, in whichever process loads them.

    Of sequences, which differ in length, it makes a list of arrays.
    """

    def __init__(self, fields: Mapping[str, Callable[[Any], Any]], *, sequences: bool = False) -> None:
        self._fields = fields
        self._sequences = sequences

    def take(self, sample_id: SampleId, sample: Any) -> tuple[SampleId, dict[str, Array]]:
        """Return a sample's inputs, copied before the next sample is loaded, perhaps into the same memory."""
        taken = {}
        for name, field in self._fields.items():
            try:
                found = field(sample)
            except (LookupError, TypeError) as exc:
                raise SourceError(f"sample {sample_id!r} has no field for input {name!r}: {exc!r}") from exc
            taken[name] = np.array(as_array(found, f"sample {sample_id!r}, input {name!r}"))
        return sample_id, taken

    def __call__(self, entries: Sequence[tuple[SampleId, dict[str, Array]]]) -> dict[str, Any]:
        if self._sequences:
            return {name: [fields[name] for _, fields in entries] for name in self._fields}
        stacked = {name: RowBuffer(name, len(entries), "bring all samples to one shape") for name in self._fields}
        for sample_id, fields in entries:
            for name, array in fields.items():
                stacked[name].append(array, f"sample {sample_id!r}")
        return {name: rows.gathered() for name, rows in stacked.items()}
