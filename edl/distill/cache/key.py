"""Identity of soft labels: `CacheKey` for all samples of a teacher and data set, and ids for the samples.

Ids are integers or strings. They may come with fingerprints of the inputs, which tell one text from another that comes
under the same id: always for sequences (`SequenceIds`), for one row in 16 otherwise (`RowIds`).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero, is_count

__all__ = [
    "FINGERPRINT_NBYTES",
    "UNKNOWN",
    "CacheKey",
    "Head",
    "Ids",
    "RowIds",
    "SampleId",
    "SequenceIds",
    "as_ids",
    "fingerprints_of",
]

SampleId: TypeAlias = int | str
Ids: TypeAlias = Sequence[SampleId] | Array
Head: TypeAlias = tuple[int, bytes]
"""Rows and fingerprint of a sample."""

FINGERPRINT_NBYTES = 8
"""Two texts share a fingerprint by chance in 1 of 2**64 cases; it does not keep out an attacker."""
UNKNOWN = bytes(FINGERPRINT_NBYTES)
"""In place of a fingerprint that was not computed."""
_FINGERPRINTED_ONE_IN = 16
"""Rows of which one has a fingerprint: hashing every image would take a core, and a data set that has changed as a
whole shows at once."""


@dataclass(frozen=True)
class CacheKey:
    """Everything that a soft label depends on, except for the sample's id.

    Attributes:
        model: The model's name in requests.
        version: The model's version as the answer names it, or the model's metadata where answers name none. Another
            version is another teacher.
        outputs: Names of the outputs kept.
        top_k: The k of `TopK` labels, None for whole outputs.
        temperature: The temperature of `TopK` labels; without `top_k` it plays no part and becomes 1.
        dtype: "float16" or "float32" if the labels were asked for or stored in it, None as the model gives them.
        dataset: The user's tag for what the ids mean: the data set, its version, how samples are augmented. Ids of an
            augmented sample must name the augmentation too (for example `f"{index}/{seed}"`).
        service: Who named the version: the service's name, or the endpoints of fixed teachers. Version "1" of another
            service is another model. Empty where the teachers say that the version is a hash of the weights, as
            `edl serve` does: that is the same model wherever it is served.
        inputs: Names of the inputs sent, where the teachers do not say which inputs their model has; sorted.

    Raises:
        SettingsError: a value of another type, or no output.
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
        texts = (self.model, self.version, self.dataset, self.service, *self.outputs, *self.inputs)
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            raise SettingsError(f"cache key with {wrong!r}: names, versions and tags must be strings")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"cache key with top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        if not is_above_zero(self.temperature) or self.temperature == float("inf"):
            raise SettingsError(f"cache key with temperature={self.temperature!r}: must be a finite number above 0")
        if self.dtype not in (None, "float16", "float32"):
            raise SettingsError(f"cache key with dtype={self.dtype!r}: must be 'float16', 'float32' or None")
        plain = {  # JSON does not know numpy's numbers
            "outputs": tuple(self.outputs),
            "inputs": tuple(sorted(self.inputs)),
            "top_k": int(self.top_k) if self.top_k is not None else None,
            "temperature": float(self.temperature) if self.top_k is not None else 1.0,
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def to_json(self) -> str:
        """Return the same text for equal keys. Fields that older files do not have are left out if empty."""
        fields = asdict(self)
        for name in ("service", "inputs"):
            if not fields[name]:
                del fields[name]
        return json.dumps(fields, sort_keys=True, ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> CacheKey:
        """Return the key that `to_json` wrote.

        Args:
            text: The text as it was written.

        Raises:
            ValueError: `to_json` did not write this.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            for name in ("outputs", "inputs"):
                if name in fields:
                    fields[name] = tuple(fields[name])
            key = cls(**fields)
        except (TypeError, KeyError, RecursionError) as exc:
            raise ValueError(f"not a cache key: {exc}") from exc
        if key.to_json() != json.dumps(fields, sort_keys=True):
            raise ValueError("not a cache key: values of other types")
        return key


def as_ids(ids: Ids) -> list[SampleId]:
    """Return sample ids as plain Python integers and strings.

    Raises:
        SettingsError: something else is among them, or an id that cannot be stored.
    """
    samples = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(samples, list):
        raise SettingsError(f"sample ids {samples!r}: expected a sequence of integers or strings")
    if not {*map(type, samples)} <= {int, str}:
        # Scalars of numpy, and tensors without a dimension.
        samples = [sample.item() if getattr(sample, "shape", None) == () else sample for sample in samples]
        strange = [sample for sample in samples if type(sample) not in (int, str)]
        if strange:
            raise SettingsError(f"sample id {strange[0]!r}: must be an integer or a string")
    numbers = [sample for sample in samples if type(sample) is int]
    if numbers and not -(2**63) <= min(numbers) <= max(numbers) < 2**63:
        raise SettingsError(f"sample ids from {min(numbers)} to {max(numbers)}: integers must fit 64 bits")
    if len(numbers) < len(samples):
        try:
            "".join(sample for sample in samples if type(sample) is str).encode()
        except UnicodeEncodeError as exc:
            raise SettingsError(f"a sample id cannot be encoded: {exc}") from exc
    return samples


class RowIds(list[SampleId]):
    """Sample ids of rows, with the fingerprints of the inputs of some of them, to notice that a data set has changed.

    Args:
        ids: The ids, [rows].
        fingerprints: 8 bytes by id, of as many ids as wanted.
    """

    def __init__(self, ids: Iterable[SampleId], fingerprints: Mapping[SampleId, bytes]) -> None:
        super().__init__(ids)
        self.fingerprints = fingerprints

    @classmethod
    def of(cls, ids: Ids, inputs: Mapping[str, Array]) -> RowIds:
        """Return ids with the fingerprints of one row in 16, the same rows in every epoch.

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
        lengths: int64 [sequences], rows of each; None where only the ids are known.
        fingerprints: uint64 [sequences], of the inputs; None where only the ids are known.
        inputs: Names of the inputs that the fingerprints are of, sorted.

    Raises:
        SettingsError: these do not have the same length.
    """

    ids: Sequence[SampleId]
    lengths: Array | None = None
    fingerprints: Array | None = None
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = {len(part) for part in (self.ids, self.lengths, self.fingerprints) if part is not None}
        if len(counts) > 1:
            raise SettingsError(f"{len(self.ids)} ids of sequences, with lengths or fingerprints of another number")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, places: slice) -> SequenceIds:
        """Return some that lie behind one another."""
        return self._part(self.ids[places], places)

    def select(self, mask: Array) -> SequenceIds:
        """Return some of them.

        Args:
            mask: Which of them, bool [sequences].
        """
        return self._part([sample for sample, wanted in zip(self.ids, mask, strict=True) if wanted], mask)

    def _part(self, ids: Sequence[SampleId], index: slice | Array) -> SequenceIds:
        lengths, prints = (part[index] if part is not None else None for part in (self.lengths, self.fingerprints))
        return SequenceIds(ids, lengths, prints, self.inputs)

    @property
    def rows(self) -> int:
        """Rows of all sequences, 0 where they are not known."""
        return int(self.lengths.sum()) if self.lengths is not None else 0

    @property
    def heads(self) -> list[Head] | None:
        """Rows and fingerprint of each sequence; None where they are not known."""
        if self.lengths is None or self.fingerprints is None:
            return None
        prints = self.fingerprints.astype("<u8").tobytes()
        size = FINGERPRINT_NBYTES
        return [(rows, prints[size * at : size * (at + 1)]) for at, rows in enumerate(self.lengths.tolist())]

    def rows_of(self, mask: Array) -> Array:
        """Return which rows belong to some sequences, bool [rows].

        Args:
            mask: Which sequences, bool [sequences].
        """
        assert self.lengths is not None
        found: Array = np.repeat(mask, self.lengths)
        return found


def fingerprints_of(inputs: Mapping[str, Array], lengths: Array, positions: Array | None = None) -> Array:
    """Return fingerprints of the inputs of sequences, uint64 [sequences].

    Numbers count by their value: token ids as int32 and as int64 have the same fingerprint.

    Args:
        inputs: The inputs of all sequences behind one another, [rows, ...] by name.
        lengths: Rows of each sequence, [sequences].
        positions: Positions of the rows in their sequences, [rows]. They count where they are not those from 0 on.
    """
    stops = np.cumsum(lengths, dtype=np.int64).tolist()
    places = list(zip([0, *stops], stops, strict=False))
    hashes = [hashlib.blake2b(digest_size=FINGERPRINT_NBYTES) for _ in places]
    for name, array in sorted(inputs.items()):
        head = f"{name} {array.dtype.kind in 'biu'} {array.shape[1:]}\0".encode()
        for total, part in zip(hashes, _bytes_by_place(array, places), strict=True):
            total.update(head)
            total.update(part)
    if positions is not None:
        for total, (start, stop) in zip(hashes, places, strict=True):
            own = positions[start:stop]
            if not np.array_equal(own, np.arange(stop - start)):
                total.update(b"positions\0" + own.astype("<i8").tobytes())
    return np.frombuffer(b"".join(total.digest() for total in hashes), "<u8").astype(np.uint64)


def _bytes_by_place(array: Array, places: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    if array.dtype.kind in "OSU":
        for start, stop in places:
            yield b"".join(_framed(value) for value in array[start:stop].reshape(-1).tolist())
        return
    values = array.astype("<i8" if array.dtype.kind in "biu" else "<f8")
    for start, stop in places:
        yield values[start:stop].tobytes()


def _framed(value: object) -> bytes:
    found = value if isinstance(value, bytes) else str(value).encode()
    return len(found).to_bytes(8, "little") + found
