"""Sample ids: of rows, and of sequences, with what tells one text from another that comes under the same id.

A sequence of T tokens has T rows and one record: the fingerprint of its inputs, then each column [T, ...] in turn.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["Ids", "RowIds", "SampleId", "SequenceIds", "as_ids", "fingerprints_of"]

SampleId: TypeAlias = int | str
Ids: TypeAlias = Sequence[SampleId] | Array

_NBYTES = 8
"""Bytes of a fingerprint. It tells an edited text from the one before: two texts share one by chance in 1 of 2**64
cases, and on purpose if somebody tries."""
_FINGERPRINTED_ONE_IN = 16
"""Rows of which one has a fingerprint: hashing every image would take a core, and a data set that has changed as a
whole shows at once."""


def as_ids(ids: Ids) -> list[SampleId]:
    """Return sample ids as plain Python integers and strings.

    Args:
        ids: [rows], a sequence or an array.

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
            ids: [rows].
            inputs: [rows, ...] by name.
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
        ids: [sequences], integers and strings.
        lengths: int64 [sequences], rows of each; None where only the ids are known.
        fingerprints: uint64 [sequences], of the inputs; None where only the ids are known.
        inputs: names of the inputs that the fingerprints are of, sorted.

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
        return SequenceIds(
            self.ids[places],
            self.lengths[places] if self.lengths is not None else None,
            self.fingerprints[places] if self.fingerprints is not None else None,
            self.inputs,
        )

    @property
    def rows(self) -> int:
        """Rows of all sequences, 0 where they are not known."""
        return int(self.lengths.sum()) if self.lengths is not None else 0

    @property
    def heads(self) -> list[tuple[int, bytes]] | None:
        """Return of each sequence the rows, and the first bytes of its record; None where they are not known."""
        if self.lengths is None or self.fingerprints is None:
            return None
        prints = self.fingerprints.astype("<u8").tobytes()
        return [(rows, prints[8 * at : 8 * at + 8]) for at, rows in enumerate(self.lengths.tolist())]

    def select(self, mask: Array) -> SequenceIds:
        """Return some of them.

        Args:
            mask: Which of them, bool [sequences].
        """
        return SequenceIds(
            [sample for sample, wanted in zip(self.ids, mask, strict=True) if wanted],
            self.lengths[mask] if self.lengths is not None else None,
            self.fingerprints[mask] if self.fingerprints is not None else None,
            self.inputs,
        )

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
        inputs: [rows, ...] by name.
        lengths: [sequences], rows of each.
        positions: [rows], of rows in their sequences. They count where they are not those from 0 on.
    """
    stops = np.cumsum(lengths, dtype=np.int64).tolist()
    places = list(zip([0, *stops], stops, strict=False))
    hashes = [hashlib.blake2b(digest_size=_NBYTES) for _ in places]
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
