"""Defines the key and id under which a label is stored, and its record: the label's outputs encoded as bytes.

An id may come with a fingerprint of the sample's inputs, which reveals that different inputs have the same id. Every
sequence has a fingerprint (`SequenceIds`), but only one row in 16 has one (`RowIds`).

A record is the fingerprint of the sample's inputs (0 if not computed), followed by the sample's rows: a single row, or
all rows of a sequence. A row consists of its columns in order; a `TopK` takes three columns.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from edl.distill.compress import TopK, check_temperature, to_float16
from edl.errors import SettingsError
from edl.protocol.names import top_k_names
from edl.protocol.tensors import Array
from edl.settings import is_count

SampleId: TypeAlias = int | str
Ids: TypeAlias = Sequence[SampleId] | Array
Outputs: TypeAlias = Mapping[str, Array | TopK]
Head: TypeAlias = tuple[int, bytes]  # rows and fingerprint of a sample

FINGERPRINT_NBYTES = 8  # two texts share a fingerprint by chance in 1 of 2**64 cases; no defence against an attacker
UNKNOWN = bytes(FINGERPRINT_NBYTES)  # replaces a fingerprint that was not computed
_FINGERPRINTED_ONE_IN = 16  # hashing all images would take a core; a data set that changed as a whole is noticed


@dataclass(frozen=True)
class CacheKey:
    """Everything that a soft label depends on, except for the sample's id.

    Attributes:
        model: The model's name in requests.
        version: The model's version as stated in the answer, or in the model's metadata if answers do not state it.
            Labels of different versions are kept apart.
        outputs: Names of the outputs that the labels contain.
        top_k: The k of `TopK` labels, None for whole outputs.
        temperature: The temperature of `TopK` labels; without `top_k` it has no effect and becomes 1.
        dtype: "float16" or "float32" if the labels were requested or stored in that type, None for the model's own
            type.
        dataset: The user's tag for what the ids mean: the data set, its version, and how samples are augmented. The id
            of an augmented sample must also identify the augmentation (for example `f"{index}/{seed}"`).
        service: The source of the version: the service's name, or the endpoints of fixed teachers. Version "1" of a
            different service is a different model. Empty if the teachers report that the version is a hash of the
            weights, as `edl serve` does: models with the same version are then the same, wherever they are served.
        inputs: Sorted names of the inputs sent, if the teachers do not say which inputs their model has.

    Raises:
        SettingsError: A value has the wrong type, or no output is named.
    """

    model: str
    version: str
    outputs: tuple[str, ...]
    top_k: int | None = None
    temperature: float = 1.0
    dtype: str | None = None
    dataset: str = ""
    service: str = ""
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.outputs or isinstance(self.outputs, str):
            raise SettingsError(f"cache key with outputs={self.outputs!r}: name at least one output, in a tuple")
        for text in (self.model, self.version, self.dataset, self.service, *self.outputs, *self.inputs):
            if not isinstance(text, str):
                raise SettingsError(f"cache key with {text!r}: names, versions and tags must be strings")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"cache key with top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        check_temperature(self.temperature)
        if self.dtype not in (None, "float16", "float32"):
            raise SettingsError(f"cache key with dtype={self.dtype!r}: must be 'float16', 'float32' or None")
        object.__setattr__(self, "outputs", tuple(self.outputs))  # JSON cannot encode numpy's
        object.__setattr__(self, "inputs", tuple(sorted(self.inputs)))
        object.__setattr__(self, "top_k", int(self.top_k) if self.top_k is not None else None)
        object.__setattr__(self, "temperature", float(self.temperature) if self.top_k is not None else 1.0)

    def to_json(self) -> str:
        """Return the key as JSON, the same text for equal keys. Empty fields that older files lack are omitted."""
        fields = {name: value for name, value in asdict(self).items() if value or name not in ("service", "inputs")}
        return json.dumps(fields, sort_keys=True, ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> CacheKey:
        """Return the key that `to_json` wrote.

        Args:
            text: The text that was written.

        Raises:
            ValueError: The text was not written by `to_json`.
        """
        try:
            fields = json.loads(text)
            key = cls(**fields)
        except (TypeError, KeyError, RecursionError) as exc:
            raise ValueError(f"not a cache key: {exc}") from exc
        if key.to_json() != json.dumps(fields, sort_keys=True):
            raise ValueError("not a cache key: values have wrong types")
        return key


def as_ids(ids: Ids) -> list[SampleId]:
    """Return sample ids as plain Python integers and strings; raise `SettingsError` for anything else."""
    samples = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(samples, list):
        raise SettingsError(f"sample ids {samples!r}: expected a sequence of integers or strings")
    if not {*map(type, samples)} <= {int, str}:
        # numpy scalars, and tensors without dimensions.
        samples = [sample.item() if getattr(sample, "shape", None) == () else sample for sample in samples]
    for sample in samples:
        if type(sample) not in (int, str):
            raise SettingsError(f"sample id {sample!r}: must be an integer or a string")
        try:
            sample.encode() if isinstance(sample, str) else sample.to_bytes(8, "little", signed=True)
        except (OverflowError, UnicodeEncodeError) as exc:
            raise SettingsError(
                f"sample id {sample!r}: an integer must fit in 64 bits, a string must be valid UTF-8: {exc}"
            ) from exc
    return samples


class RowIds(list[SampleId]):
    """Sample ids of rows, with fingerprints of some rows' inputs, to detect that a data set has changed.

    Args:
        ids: The ids, [rows].
        fingerprints: Fingerprints of 8 bytes by id, for any of the ids.
    """

    def __init__(self, ids: Iterable[SampleId], fingerprints: Mapping[SampleId, bytes]) -> None:
        super().__init__(ids)
        self.fingerprints = fingerprints

    @classmethod
    def of(cls, ids: Ids, inputs: Mapping[str, Array]) -> RowIds:
        """Return ids with fingerprints of one row in 16. The choice of rows is the same in every epoch.

        Args:
            ids: The ids, [rows].
            inputs: The rows' inputs, [rows, ...] by name.
        """
        ids = as_ids(ids)
        chosen = [at for at, sample in enumerate(ids) if zlib.crc32(repr(sample).encode()) % _FINGERPRINTED_ONE_IN == 0]
        if not chosen:
            return cls(ids, {})
        rows = {name: array[chosen] for name, array in inputs.items()}
        prints = fingerprints_of(rows, np.ones(len(chosen), np.int64)).astype("<u8")
        return cls(ids, {ids[at]: one.tobytes() for at, one in zip(chosen, prints, strict=True)})


@dataclass(frozen=True, eq=False)
class SequenceIds:
    """Sample ids of sequences.

    Attributes:
        ids: The ids, integers and strings, [sequences].
        lengths: Number of rows in each sequence, int64 [sequences]; None if only the ids are known.
        fingerprints: Fingerprints of the inputs, uint64 [sequences]; None if only the ids are known.
        inputs: Sorted names of the inputs that the fingerprints cover.

    Raises:
        SettingsError: The fields have different lengths.
    """

    ids: Sequence[SampleId]
    lengths: Array | None = None
    fingerprints: Array | None = None
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = {len(part) for part in (self.ids, self.lengths, self.fingerprints) if part is not None}
        if len(counts) > 1:
            raise SettingsError(f"{len(self.ids)} sequence ids, but a different number of lengths or fingerprints")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, places: slice | Array) -> SequenceIds:
        """Return some of the sequences: a slice, or those selected by a bool mask [sequences]."""
        ids = [self.ids[at] for at in np.arange(len(self.ids))[places].tolist()]
        lengths, prints = (part[places] if part is not None else None for part in (self.lengths, self.fingerprints))
        return SequenceIds(ids, lengths, prints, self.inputs)

    @property
    def heads(self) -> list[Head] | None:
        """Number of rows and fingerprint of each sequence; None if unknown."""
        if self.lengths is None or self.fingerprints is None:
            return None
        prints = self.fingerprints.astype("<u8").tobytes()
        size = FINGERPRINT_NBYTES
        return [(rows, prints[size * at : size * (at + 1)]) for at, rows in enumerate(self.lengths.tolist())]


def fingerprints_of(inputs: Mapping[str, Array], lengths: Array, positions: Array | None = None) -> Array:
    """Return fingerprints of the inputs of sequences, uint64 [sequences].

    Only the values of numbers count, not their dtype: the same token ids as int32 and as int64 have the same
    fingerprint.

    Args:
        inputs: The concatenated inputs of all sequences, [rows, ...] by name.
        lengths: Number of rows in each sequence, [sequences].
        positions: Positions of the rows in their sequences, [rows]. They are part of the fingerprint unless they are 0,
            1, 2, ...
    """
    stops = np.cumsum(lengths, dtype=np.int64).tolist()
    places = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    hashes = [hashlib.blake2b(digest_size=FINGERPRINT_NBYTES) for _ in places]
    for name, array in sorted(inputs.items()):
        head = f"{name} {array.dtype.kind in 'biu'} {array.shape[1:]}\0".encode()
        for total, place in zip(hashes, places, strict=True):
            total.update(head)
            total.update(_bytes_of(array[place]))
    if positions is not None:
        for total, place in zip(hashes, places, strict=True):
            own = positions[place]
            if not np.array_equal(own, np.arange(len(own))):
                total.update(b"positions\0" + own.astype("<i8").tobytes())
    return np.frombuffer(b"".join(total.digest() for total in hashes), "<u8").astype(np.uint64)


def _bytes_of(values: Array) -> bytes:
    if values.dtype.kind not in "OSU":
        return values.astype("<i8" if values.dtype.kind in "biu" else "<f8").tobytes()
    texts = [value if isinstance(value, bytes) else str(value).encode() for value in values.reshape(-1).tolist()]
    return b"".join(len(text).to_bytes(8, "little") + text for text in texts)


@dataclass(frozen=True)
class RowLayout:
    """The columns of a row, as a little-endian structured dtype with fields sorted by name.

    `top_k`: the temperature and the number of classes of each `TopK`. `sequence_inputs`: the `inputs` of `SequenceIds`;
    None for rows.
    """

    columns: np.dtype[Any]
    top_k: Mapping[str, tuple[float, int | None]] = field(default_factory=dict)
    sequence_inputs: tuple[str, ...] | None = None

    @property
    def _columns(self) -> list[tuple[str, np.dtype[Any]]]:
        return [(name, self.columns[name]) for name in self.columns.names or ()]

    def merged(self, other: RowLayout) -> RowLayout | None:
        """Return a layout for the records of both layouts; None if the two cannot be combined.

        The numbers of classes are compared only if both are known: an engine behind a gateway does not know its number
        of classes.
        """
        ours, theirs = self.top_k, other.top_k
        if (self.columns, self.sequence_inputs, {*ours}) != (other.columns, other.sequence_inputs, {*theirs}):
            return None
        merged = {name: (temperature, classes or theirs[name][1]) for name, (temperature, classes) in ours.items()}
        fits = all(theirs[name] in (found, (found[0], None)) for name, found in merged.items())
        return replace(self, top_k=merged) if fits else None

    def pack(self, arrays: Mapping[str, Array], heads: Sequence[Head]) -> list[bytes]:
        """Return a record for each head, with the head's number of rows; `arrays` are [total rows, ...] by column."""
        table = np.empty(sum(rows for rows, _ in heads), self.columns)
        for name in self.columns.names or ():
            table[name] = arrays[name]
        data, size = table.view(np.uint8).data, self.columns.itemsize
        stops = itertools.accumulate(rows * size for rows, _ in heads)
        return [
            b"".join([fingerprint, data[stop - rows * size : stop]])
            for (rows, fingerprint), stop in zip(heads, stops, strict=True)
        ]

    def unpack(self, records: Sequence[bytes]) -> dict[str, Array]:
        """Return arrays [total rows, ...] by column."""
        rows = b"".join([memoryview(record)[FINGERPRINT_NBYTES:] for record in records])
        table = np.frombuffer(rows, self.columns)
        return {name: np.ascontiguousarray(table[name]) for name in self.columns.names or ()}

    def rows_of(self, record: bytes) -> int:
        """Return the number of rows in a record."""
        return (len(record) - FINGERPRINT_NBYTES) // self.columns.itemsize

    def head_of(self, record: bytes) -> Head:
        """Return a record's number of rows and its fingerprint."""
        return self.rows_of(record), record[:FINGERPRINT_NBYTES]

    def restore(self, arrays: Mapping[str, Array]) -> dict[str, Array | TopK]:
        """Return outputs from columns, with the arrays of each `TopK` reassembled."""
        outputs: dict[str, Array | TopK] = dict(arrays)
        for name, (temperature, classes) in self.top_k.items():
            ids, values, tail = (arrays[part] for part in top_k_names(name))
            for part in top_k_names(name):
                del outputs[part]
            outputs[name] = TopK(ids, values, tail, temperature, classes)
        return outputs

    def to_json(self) -> str:
        """Return the layout as text, with a checksum."""
        columns = [[name, kind.base.str, kind.shape] for name, kind in self._columns]
        text = json.dumps([columns, dict(self.top_k), self.sequence_inputs], sort_keys=True)
        return f"{zlib.crc32(text.encode()):08x} {text}"

    @classmethod
    def from_json(cls, text: object) -> RowLayout:
        """Return the layout that `to_json` wrote; raise `SettingsError` for any other text."""
        checksum, _, fields = str(text).partition(" ")
        if checksum != f"{zlib.crc32(fields.encode('utf-8', 'replace')):08x}":
            raise SettingsError("the layout of its rows is damaged: delete the folder to request its labels again")
        columns, top_k, inputs = json.loads(fields)
        return cls(
            np.dtype([(name, dtype, tuple(shape)) for name, dtype, shape in columns]),
            {name: (float(temperature), classes) for name, (temperature, classes) in top_k.items()},
            tuple(inputs) if inputs is not None else None,
        )

    def __str__(self) -> str:
        columns = ", ".join(f"{name!r} {kind.base} {list(kind.shape)}" for name, kind in self._columns)
        if self.sequence_inputs is None:
            return columns
        return f"tokens of sequences of {', '.join(map(repr, self.sequence_inputs)) or 'nothing'} with {columns}"


def flatten(outputs: Outputs, rows: int, *, half: bool = False) -> tuple[dict[str, Array], RowLayout]:
    """Return outputs [rows, ...] as plain arrays by column, and their layout.

    With `half`, floating-point values become float16, except for the tail's mass of `TopK`.
    """
    arrays: dict[str, Array] = {}
    top_k: dict[str, tuple[float, int | None]] = {}
    for name, output in outputs.items():
        if isinstance(output, TopK):
            ids, values, tail = top_k_names(name)
            arrays[ids], arrays[values], arrays[tail] = output.ids, _half(output.values, half), output.tail_lse
            top_k[name] = (float(output.temperature), int(output.classes) if output.classes is not None else None)
        else:
            arrays[name] = _half(np.asarray(output), half)
    if not arrays:
        raise SettingsError("no outputs to keep")
    for name, array in arrays.items():
        if array.ndim < 1 or len(array) != rows:
            raise SettingsError(f"output {name!r} has shape {list(array.shape)}: expected {rows} rows, one for each id")
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise SettingsError(f"output {name!r} is {array.dtype}: the cache keeps numbers and booleans only")
        if 0 in array.shape[1:]:
            raise SettingsError(f"output {name!r} has rows of shape {list(array.shape[1:])}, which have no elements")
    columns = [(name, array.dtype.newbyteorder("<"), array.shape[1:]) for name, array in sorted(arrays.items())]
    return arrays, RowLayout(np.dtype(columns), top_k)


def _half(array: Array, half: bool) -> Array:
    return to_float16(array) if half and array.dtype.kind == "f" else array


@dataclass(frozen=True, eq=False)
class Found:
    """Rows, or sequences, found by a look-up.

    Attributes:
        mask: Which of the ids were found, bool [ids].
        outputs: Arrays [rows found, ...] or `TopK`, in the order of the ids; empty if none was found. Arrays may be
            read-only.
        lengths: For sequences, the number of rows of each (0 if unknown), int64 [ids]; None if each id stands for one
            row.
    """

    mask: Array
    outputs: dict[str, Array | TopK]
    lengths: Array | None = None

    @property
    def row_mask(self) -> Array:
        """Which rows were found, bool [rows]."""
        found: Array = self.mask if self.lengths is None else np.repeat(self.mask, self.lengths)
        return found

    @property
    def complete(self) -> bool:
        """Whether every id was found."""
        return bool(self.mask.all())

    def filled(self, rest: Outputs) -> dict[str, Array | TopK]:
        """Return the outputs of all rows, found and missing, in the cache's dtypes.

        Args:
            rest: Outputs of the missing rows, in their order.

        Raises:
            SettingsError: `rest` has different outputs or shapes from the cache's rows.
        """
        if not self.outputs:
            return dict(rest)
        mask = self.row_mask
        have, layout = flatten(self.outputs, int(mask.sum()))
        new, other = flatten(rest, int((~mask).sum()))
        shapes, other_shapes = ({name: array.shape[1:] for name, array in arrays.items()} for arrays in (have, new))
        merged = layout.merged(replace(other, columns=layout.columns)) if shapes == other_shapes else None
        if merged is None:
            remedy = "rows of several shapes cannot be cached: pad them to one shape, or use no cache"
            raise SettingsError(f"rows in the cache are {layout}, but the other rows are {other}; {remedy}")
        arrays = {}
        for name, found in have.items():
            arrays[name] = array = np.empty((len(mask), *found.shape[1:]), found.dtype)
            array[mask] = found
            array[~mask] = _half(new[name], found.dtype == np.float16)
        return merged.restore(arrays)
