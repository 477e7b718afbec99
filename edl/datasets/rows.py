"""Opens data sets to label, which yield rows or sequences of tokens as inputs for the teachers' model, in batches.

Unlike a `Dataset`, a `LabelDataset` yields ids and arrays, and only for rows that need a label. If the ids are known
without loading rows (`IndexedData`), only the rows that need a label are loaded.

Arrays in `.npy` and `.npz` files are mapped into memory if possible, and are never unpickled. Sequences from JSON lines
and Parquet are held in memory: one array of all tokens for each input, and the start of each sequence.
"""

from __future__ import annotations

import abc
import functools
import itertools
import json
import os
import struct
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from edl.datasets.opening import find_factory, is_indexed, make_samples
from edl.datasets.parquet import import_parquet
from edl.errors import SettingsError, SourceError
from edl.protocol.names import POSITION
from edl.protocol.tensors import Array, RowBuffer, as_array
from edl.quoting import quote

SampleId: TypeAlias = int | str
KnownFilter: TypeAlias = Callable[[list[SampleId], dict[str, Any] | None], Array]
"""Function that returns which ids need no label, bool [ids]. Its second argument contains the inputs if the sequences
are in arrays (`RaggedData`), and is None otherwise."""
Batch: TypeAlias = tuple[list[SampleId], dict[str, Any]]
"""The ids, and the inputs by name: arrays [rows, ...], or for sequences, lists with one array [tokens, ...] per id."""

_BLOCK = 65536  # ids looked up at a time: makes the call's cost negligible, in a few megabytes of Python objects
_SEQUENCES_BLOCK = 4096  # sequences looked up at a time: some megabytes of tokens
_EXPECTED = "expected FILE.npz, FILE.npy, FILE.jsonl, FILE.parquet, PACKAGE.MODULE:FACTORY or FILE.py:FACTORY"


def open_data(
    name: str,
    inputs: Sequence[str],
    ids: str | None = None,
    workers: int = 0,
    *,
    sequences: bool = False,
    offsets: str | None = None,
) -> LabelDataset:
    """Open a data set to label.

    Args:
        name: `FILE.npz` or `FILE.npy` (mapped into memory if possible), or `MODULE:FACTORY` or `FILE.py:FACTORY`: a
            function that returns a `Dataset`, a sequence or an iterable of samples (arrays, tuples or mappings).
            `FILE.jsonl` and `FILE.parquet` (list columns) contain sequences.
        inputs: Inputs of the teachers' model: `NAME`, or `NAME=KEY` if the data set uses a different name. KEY is an
            array in the file, a key in a mapping, or a position in a tuple.
        ids: Source of the ids: an array in an `.npz` file, an `.npy` file, or a key or position in a sample. None to
            use a row's position as its id.
        workers: Number of processes that load samples, as in PyTorch's `DataLoader`; 0 to load samples in this process.
        sequences: Whether each sample from a function is a sequence of tokens, of any length.
        offsets: For sequences in an `.npz` file, the array [sequences + 1] of their starts.

    Returns:
        The data set, whose `batches` yield ids and inputs.

    Raises:
        SettingsError: The data set does not exist, or lacks a part that an argument names.
    """
    pairs = (part.partition("=") for part in inputs)
    wanted = {name.strip(): key.strip() or name.strip() for name, _, key in pairs}
    if not wanted or "" in wanted:
        raise SettingsError(f"--inputs {','.join(inputs)!r}: name at least one input of the teachers")
    if len(wanted) < len(inputs):
        raise SettingsError(f"--inputs {','.join(inputs)!r}: a name appears twice")
    if workers < 0:
        raise SettingsError(f"--workers {workers}: must be 0 or more")
    is_arrays = name.endswith((".npz", ".npy"))
    if offsets is not None and not is_arrays:
        raise SettingsError(f"--offsets {offsets}: only for sequences in an .npz file")
    if is_arrays:
        if sequences and offsets is None:
            raise SettingsError("--sequences requires --offsets: name the array of the .npz file that has their starts")
        return _open_arrays(Path(name), wanted, ids, offsets)
    if name.endswith((".jsonl", ".parquet")):
        return _open_sequences(Path(name), wanted, ids)
    return _open_samples(name, wanted, ids, workers, sequences)


class LabelDataset(abc.ABC):
    """A data set to label.

    Attributes:
        inputs: Names of the teachers' inputs that the data set provides.
        rows: Number of samples; None if unknown.
        sequences: Whether each sample is a sequence, with a row for each token.
    """

    inputs: tuple[str, ...]
    rows: int | None = None
    sequences = False

    @abc.abstractmethod
    def batches(self, rows: int, known: KnownFilter) -> Iterator[Batch]:
        """Yield, in order, all samples that need a label.

        Args:
            rows: Largest number of samples in a batch.
            known: Function that returns which ids need no label.
        """


class IndexedData(LabelDataset):
    """A data set whose rows can be loaded one by one. `ids` are integers or strings [rows]; None for positions.

    `checksum` covers the whole content; it is given only if it is known without reading the content.
    """

    rows: int

    def __init__(self, rows: int, ids: Array | None, checksum: str = "") -> None:
        self.rows = rows
        self.checksum = checksum
        self._ids = None if ids is None else np.array(ids)  # in memory: `ids` may be mapped from a file
        if ids is not None and (ids.shape != (rows,) or ids.dtype.kind not in "iuUO"):
            raise SettingsError(f"--ids: {ids.dtype} {list(ids.shape)}, expected one integer or string for {rows} rows")
        if ids is not None and len(set(ids.tolist())) < rows:
            ((twice, _),) = Counter(ids.tolist()).most_common(1)
            raise SettingsError(f"--ids: the id {quote(twice)} appears twice; each sample needs its own id")

    @abc.abstractmethod
    def load(self, parts: Iterable[Array]) -> Iterator[Batch]:
        """Yield a batch for each part, a non-empty array of row positions. Later parts may be read ahead."""

    def batches(self, rows: int, known: KnownFilter) -> Iterator[Batch]:
        """See `LabelDataset.batches`."""
        index = self.unknown(known)
        return self.load(index[start : start + rows] for start in range(0, len(index), rows))

    def ids_of(self, index: Array) -> list[SampleId]:
        """Return the ids of the rows at these positions."""
        ids: list[SampleId] = (index if self._ids is None else self._ids[index]).tolist()
        return ids

    def unknown(self, known: KnownFilter, start: int = 0, stop: int | None = None) -> Array:
        """Return the ascending positions of the rows from `start` to before `stop` that need a label."""
        index = np.arange(start, self.rows if stop is None else stop)
        parts = [index[at : at + _BLOCK] for at in range(0, len(index), _BLOCK)]
        return np.concatenate([index[:0], *(part[~known(self.ids_of(part), None)] for part in parts)])


# --- Arrays. ---


class ArrayData(IndexedData):
    """Arrays [rows, ...] by input."""

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
            found = {name: as_array(_rows(array, part), f"array {name!r}") for name, array in self._arrays.items()}
            yield self.ids_of(part), found


class RaggedData(IndexedData):
    """Sequences: arrays [all tokens, ...] by input, with `offsets` [sequences + 1] from 0 to the number of tokens."""

    sequences = True
    position_input = POSITION  # the model's input that holds positions; it need not be among the arrays

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
                name: [np.array(_rows(array, slice(*place))) for place in places]
                for name, array in self._arrays.items()
            }
            yield self.ids_of(part), fields

    def unknown(self, known: KnownFilter, start: int = 0, stop: int | None = None) -> Array:
        """See `IndexedData.unknown`. Sequences without tokens need no label."""
        stop = self.rows if stop is None else stop
        index = start + np.flatnonzero(np.diff(self._offsets[start : stop + 1]))
        parts = [index[at : at + _SEQUENCES_BLOCK] for at in range(0, len(index), _SEQUENCES_BLOCK)]
        loaded = zip(parts, self.load(parts), strict=True)
        return np.concatenate([index[:0], *(part[~known(*batch)] for part, batch in loaded)])


def _rows(array: Array, rows: Any) -> Array:
    """Return rows of an array; raise if its mapped file is now shorter, as a read would end the process (SIGBUS)."""
    if isinstance(array, np.memmap):
        path = Path(str(array.filename))
        if not path.exists() or path.stat().st_size < array.offset + array.nbytes:
            raise SourceError(f"{str(path)!r} is missing, or shorter than when it was opened: restore it")
    return cast(Array, array[rows])


def _open_arrays(path: Path, wanted: Mapping[str, str], ids: str | None, offsets: str | None) -> LabelDataset:
    try:
        found_ids = None if ids is None else _open_array(Path(ids)) if ids.endswith(".npy") else _open_array(path, ids)
        if path.suffix == ".npy":
            if offsets is not None or len(wanted) > 1:
                instead = "sequences and their offsets" if offsets is not None else "several inputs"
                raise SettingsError(f"{str(path)!r} contains one array, for one input; {instead} require an .npz file")
            return ArrayData(dict.fromkeys(wanted, _open_array(path)), found_ids)
        arrays = {name: _open_array(path, key) for name, key in wanted.items()}
        checksum = ",".join(f"{name}={_member(path, key).CRC:08x}" for name, key in sorted(wanted.items()))
        if offsets is None:
            return ArrayData(arrays, found_ids, checksum)
        checksum = f"{checksum},{_member(path, offsets).CRC:08x}"
        return RaggedData(arrays, _open_array(path, offsets), found_ids, checksum)
    except SettingsError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as exc:
        raise SettingsError(f"data {str(path)!r} cannot be read: {exc}") from exc


def _member(path: Path, key: str) -> zipfile.ZipInfo:
    """Return the location of an array in an `.npz` file, and its CRC-32."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if key not in members:
        raise SettingsError(f"{str(path)!r} has no array {key!r}, only {', '.join(sorted(members))}")
    return members[key]


def _open_array(path: Path, key: str = "") -> Array:
    """Return the array in an `.npy` file, or the array `key` in an `.npz` file; mapped into memory if possible."""
    if not key:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(found, np.ndarray):
            found.close()
            raise ValueError("this is an .npz archive of arrays: rename it to .npz, and name the array")
        return found
    info = _member(path, key)
    if info.compress_type == zipfile.ZIP_STORED:
        with path.open("rb") as file:
            file.seek(info.header_offset + 26)  # lengths of name and extra field, at the end of the local header
            file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
            version = np.lib.format.read_magic(file)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            if version in readers:
                shape, is_fortran, dtype = readers[version](file)
                if not dtype.hasobject and 0 not in shape:
                    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")
    with np.load(path, allow_pickle=False) as archive:
        return cast(Array, archive[key])


# --- Sequences in files. ---


def _open_sequences(path: Path, wanted: Mapping[str, str], ids: str | None) -> RaggedData:
    """Read sequences from JSON lines such as `{"input_ids": [5, 3]}`, or Parquet list columns; null counts as empty."""
    keys = list(dict.fromkeys([*wanted.values(), *([ids] if ids is not None else [])]))
    parts: dict[str, list[Array]] = {name: [] for name in wanted}
    found_ids = []
    place = ""
    try:
        for where, row in _json_rows(path, keys) if path.suffix == ".jsonl" else _parquet_rows(path, keys):
            place = f", {where}"
            for name, key in wanted.items():
                parts[name].append(_numbers(key, row[key]))
            lengths = {name: len(found[-1]) for name, found in parts.items()}
            if len(set(lengths.values())) > 1:
                raise ValueError(f"each token needs one value of each input, but there are {lengths}")
            if ids is not None:
                if type(row[ids]) not in (int, str):
                    raise ValueError(f"the id {row[ids]!r} is neither an integer nor a string")
                found_ids.append(row[ids])
            place = ""  # an error from here on is in the next row, and names it
        columns = {name: _joined(name, found) for name, found in parts.items()}
    except OSError as exc:
        raise SettingsError(f"data {str(path)!r} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, TypeError, RecursionError) as exc:
        raise SettingsError(f"data {str(path)!r}{place}: {exc}") from exc
    offsets = np.cumsum([0, *map(len, next(iter(parts.values())))])
    if len(offsets) < 2:
        raise SettingsError(f"data {str(path)!r} has no sequences")
    ids_array = None if ids is None else np.array(found_ids, object)  # numpy's own strings lose trailing NULs
    total = zlib.crc32(offsets.tobytes())
    for name, array in sorted(columns.items()):
        total = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(name.encode(), total))
    return RaggedData(columns, offsets, ids_array, f"{total:08x}")


def _json_rows(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its place in the file. Windows line ends, a byte order mark and blank lines are allowed."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                found = json.loads(text)
            except (ValueError, RecursionError) as exc:
                raise ValueError(f"line {number}: {exc}") from exc
            if not isinstance(found, dict):
                kind, example = type(found).__name__, f"{{{keys[0]!r}: …}}"
                raise TypeError(f"line {number}: expected an object such as {example}, not a {kind}")
            if missing := [key for key in keys if key not in found]:
                there = ", ".join(map(repr, found)) or "nothing"
                raise ValueError(f"line {number}: it has no {missing[0]!r}, only {there}")
            yield f"line {number}", found


def _parquet_rows(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    parquet = import_parquet()
    number = 0
    with parquet.ParquetFile(path) as file:  # pyarrow's errors are `OSError` and `ValueError`
        names = file.schema_arrow.names
        if missing := [key for key in keys if key not in names]:
            raise ValueError(f"it has no column {missing[0]!r}, only {', '.join(names)}")
        for batch in file.iter_batches(columns=keys):
            for row in zip(*(batch.column(key) for key in keys), strict=True):
                number += 1
                yield f"row {number}", {key: _plain(value) for key, value in zip(keys, row, strict=True)}


def _plain(value: Any) -> Any:
    """Return a value from a Parquet file as a Python object, or as an array if it is a list of numbers."""
    values = getattr(value, "values", None)
    if values is None or values.null_count:
        return value.as_py()
    return values.to_numpy(zero_copy_only=False)


def _numbers(key: str, found: Any) -> Array:
    if found is None:
        return np.empty(0)
    try:
        array = np.array(found)
    except ValueError as exc:
        raise ValueError(f"{key!r} contains lists of different lengths: {exc}") from exc
    values = [found]
    if isinstance(found, list):
        values = found if array.ndim == 1 else np.array(found, object).ravel().tolist()
    if not isinstance(found, list | np.ndarray) or array.dtype.kind not in "biuf" or _mixes_booleans(values):
        odd = next((value for value in values if type(value) not in (int, float)), found)
        raise TypeError(
            f"{key!r} is not a list of numbers: it contains {quote(odd)}; tokens are numbers, which a tokenizer makes "
            "from text"
        )
    return array


def _mixes_booleans(values: list[Any]) -> bool:
    """Return whether booleans are mixed with other values: numpy converts [1, True] to [1, 1]."""
    kinds = set(map(type, values))
    return bool in kinds and len(kinds) > 1


def _joined(name: str, parts: Sequence[Array]) -> Array:
    full = [part for part in parts if len(part)]
    kinds = {f"{'integers' if part.dtype.kind in 'iu' else part.dtype} {list(part.shape[1:])}" for part in full}
    if len(kinds) > 1:
        raise ValueError(f"{name!r} has values of different shapes or types: {', '.join(sorted(kinds))}")
    array = np.concatenate(full) if full else np.empty(0, np.int32)
    fits = array.dtype == np.int64 and array.size and array.min() >= -(2**31) and array.max() < 2**31
    return array.astype(np.int32) if fits else array


# --- Samples made by the user's code. ---


def _open_samples(name: str, wanted: Mapping[str, str], ids: str | None, workers: int, sequences: bool) -> LabelDataset:
    found = find_factory(name, _EXPECTED)
    data = make_samples(found)
    if type(data).__name__ == "DataLoader":
        raise SettingsError(f"data {quote(name)} is a DataLoader: return the Dataset, and load it with --workers N")
    fields = {}
    for at, (key, part) in enumerate(wanted.items()):
        position = at if part == key else None
        fields[key] = partial(_take_field, key=part, position=position, alone=len(wanted) == 1, sequences=sequences)
    id_field = None if ids is None else partial(_take_field, key=ids)
    if is_indexed(data) and id_field is None:
        return SequenceData(data, fields, workers, sequences=sequences)
    if workers:
        raise SettingsError(f"--workers {workers}: data {quote(name)} must be indexed, and must not have its own ids")
    if is_indexed(data):
        return IterableData(lambda: (data[at] for at in range(len(data))), fields, id_field, sequences=sequences)
    if not hasattr(data, "__iter__"):
        raise SettingsError(f"data {quote(name)} is a {type(data).__name__}: expected samples by index, or an iterable")
    again = itertools.chain([data], (make_samples(found) for _ in itertools.count()))
    return IterableData(lambda: next(again), fields, id_field, sequences=sequences)


def _take_field(
    sample: Any, key: str, position: int | None = None, *, alone: bool = False, sequences: bool = False
) -> Any:
    """Return an input or the id from a sample: by key, by position in a tuple or list, or the sample itself.

    In a tuple or list, `key` is used if it is a number, else `position`. `alone` means that the caller takes nothing
    else from the sample. With `sequences`, a list of numbers (from a tokenizer) is then the input itself.
    """
    if sequences and alone and isinstance(sample, list) and sample and isinstance(sample[0], int | float):
        return sample
    if isinstance(sample, Mapping):
        return sample[key]
    if isinstance(sample, tuple | list):
        position = int(key) if key.isdecimal() else position
        if position is None:
            raise TypeError(f"samples are {type(sample).__name__}s: name a position, not {key!r}")
        return sample[position]
    if not alone:
        raise TypeError(f"a sample is a single {type(sample).__name__}, without parts")
    return sample


@dataclass(frozen=True)
class _Inputs:
    """Creates the inputs of a batch from samples, in the process that loads these samples. Can be pickled."""

    fields: Mapping[str, Callable[[Any], Any]]  # find an input in a sample
    sequences: bool
    samples: Any = ()  # by position

    def __getitem__(self, positions: list[int]) -> dict[str, Any]:
        return self.stack([(at, self.take(at, self.samples[at])) for at in positions])

    def take(self, sample_id: SampleId, sample: Any) -> dict[str, Array]:
        """Return copies of a sample's inputs, because the next sample may be loaded into the same memory."""
        taken = {}
        for name, field in self.fields.items():
            try:
                found = field(sample)
            except (LookupError, TypeError) as exc:
                raise SourceError(f"sample {sample_id!r} has no field for input {name!r}: {exc!r}") from exc
            if isinstance(found, list) and _mixes_booleans(found):
                raise SourceError(
                    f"sample {sample_id!r}, input {name!r} mixes booleans with other values: {quote(found)}"
                )
            taken[name] = np.array(as_array(found, f"sample {sample_id!r}, input {name!r}"))
        return taken

    def stack(self, entries: Sequence[tuple[SampleId, dict[str, Array]]]) -> dict[str, Any]:
        if self.sequences:
            return {name: [taken[name] for _, taken in entries] for name in self.fields}
        stacked = {name: RowBuffer(name, len(entries), "bring all samples to one shape") for name in self.fields}
        for sample_id, taken in entries:
            for name, array in taken.items():
                stacked[name].extend(array[None], f"sample {sample_id!r}")
        return {name: rows.gathered() for name, rows in stacked.items()}


class SequenceData(IndexedData):
    """Samples by position, such as a PyTorch `Dataset`; with `workers`, that many processes load them."""

    def __init__(
        self, samples: Any, fields: Mapping[str, Callable[[Any], Any]], workers: int = 0, *, sequences: bool = False
    ) -> None:
        super().__init__(len(samples), None)
        self.inputs = tuple(fields)
        self.sequences = sequences
        self._loaded = _Inputs(fields, sequences, samples)
        self._workers = workers
        self._parts = _Parts()

    def load(self, parts: Iterable[Array]) -> Iterator[Batch]:
        """See `IndexedData.load`. With worker processes, up to two parts per process are read ahead."""
        if not self._workers:
            for part in parts:
                yield self.ids_of(part), self._loaded[part.tolist()]
            return
        taken = self._parts.begin(parts)
        for batch in self._worker_processes:
            yield self.ids_of(taken.popleft()), batch
        if taken:  # the loader mistakes a worker's StopIteration for its own end
            first = self.ids_of(taken[0])[0]
            raise SourceError(f"the samples from {first!r} on are missing: the data set's code raised StopIteration")

    @functools.cached_property
    def _worker_processes(self) -> Iterable[dict[str, Any]]:
        """The worker processes, which run as long as this object exists: passes follow, and starting is slow."""
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
    """The parts for a loader's next pass. The loader uses this one object in all passes."""

    def begin(self, parts: Iterable[Array]) -> deque[Array]:
        """Begin a pass; return the queue of parts that have been read but not yet yielded."""
        self._parts = parts
        self._taken: deque[Array] = deque()
        return self._taken

    def __iter__(self) -> Iterator[list[int]]:
        for part in self._parts:
            self._taken.append(part)
            yield part.tolist()


def _as_it_is(batch: Any) -> Any:
    return batch


class IterableData(LabelDataset):
    """Samples in order. Each call of `make` returns an iterable that begins with the first sample."""

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
        self._loaded = _Inputs(fields, sequences)
        self._id_field = id_field

    def batches(self, rows: int, known: KnownFilter) -> Iterator[Batch]:
        """See `LabelDataset.batches`."""
        waiting: list[tuple[SampleId, dict[str, Array]]] = []
        samples = ((sample_id, self._loaded.take(sample_id, sample)) for sample_id, sample in self._with_ids())
        while block := list(itertools.islice(samples, rows)):
            new = ~known([sample_id for sample_id, _ in block], None)
            waiting += itertools.compress(block, new)
            if len(waiting) >= rows:
                yield self._batch(waiting[:rows])
                del waiting[:rows]
        if waiting:
            yield self._batch(waiting)

    def _batch(self, entries: list[tuple[SampleId, dict[str, Array]]]) -> Batch:
        return [sample_id for sample_id, _ in entries], self._loaded.stack(entries)

    def _with_ids(self) -> Iterator[tuple[SampleId, Any]]:
        if self._id_field is None:
            yield from enumerate(self._make())
            return
        seen: set[SampleId] = set()  # smaller than the cache's entries for the same ids
        for at, sample in enumerate(self._make()):
            try:
                found = self._id_field(sample)
            except (LookupError, TypeError) as exc:
                raise SourceError(f"sample {at} has no field for its id: {exc!r}") from exc
            sample_id = found.item() if getattr(found, "shape", None) == () else found
            if type(sample_id) not in (int, str):
                raise SourceError(f"sample {at}: its id is {found!r}; an id is an integer or a string")
            if sample_id in seen:  # they would share a label
                raise SourceError(f"sample {at}: an earlier sample also has the id {sample_id!r}; each needs its own")
            seen.add(sample_id)
            yield sample_id, sample
