"""Tells whether two processes, or two runs, have the same data, by a few of their rows."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from edl.datasets.rows import Batch, IndexedData, LabelDataset
from edl.protocol.tensors import Array

__all__ = ["DataFingerprint"]

_ROWS = 16
"""Rows that are looked at: image files take 0.2 s, and of data that differ in every tenth row four in five are seen."""


@dataclass(frozen=True)
class DataFingerprint:
    """What two processes compare before they share a data set.

    Attributes:
        rows: how many samples; 0 where that is not known.
        inputs: names, dtypes and shapes, such as `image float32[3,224,224]`; shapes of the first row.
        rows_checksum: of a few rows with their ids, spread over the data set. Empty where these rows are not the same
            when they are loaded twice, as with random augmentation: then nothing can be said.
        file_checksum: of all rows, where the file's own directory has it (`.npz`); else empty.
    """

    rows: int
    inputs: tuple[str, ...]
    rows_checksum: str
    file_checksum: str = ""

    @classmethod
    def of(cls, data: LabelDataset, rows: int | None = None) -> DataFingerprint:
        """Look at a few rows of a data set; of one that is read in sequence, at the first.

        Args:
            data: The data set. A row that cannot be loaded counts as such a row, and is no error here.
            rows: Look at this many of the first rows only. Default: at all.
        """
        if not isinstance(data, IndexedData):
            found, again = (_first_checksum(data) for _ in range(2))
            return cls(0, tuple(sorted(data.inputs)), found if found == again else "")
        rows = data.rows if rows is None else rows
        index = [np.array([at]) for at in sorted({*np.linspace(0, rows - 1, _ROWS).astype(np.int64).tolist()})]
        found, again = (_checksum_of(data, index) for _ in range(2))
        checksum = data.checksum if rows == data.rows else ""
        return cls(rows, _inputs_of(data), found if found == again else "", checksum)

    def to_json(self) -> str:
        """Return the same text for equal fingerprints."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> DataFingerprint:
        """Return what `to_json` was called on.

        Raises:
            ValueError: this is no such text.
        """
        try:
            fields = json.loads(text)
            return cls(**{**fields, "inputs": tuple(fields["inputs"])})
        except (TypeError, KeyError) as exc:
            raise ValueError(f"no fingerprint of data: {exc}") from exc

    def differences(self, there: DataFingerprint, where: str) -> list[str]:
        """Return in words how these data differ from others.

        Args:
            there: The others.
            where: What to call them, such as "in the job".
        """
        found = []
        if self.rows != there.rows:
            found.append(f"{self.rows:,} rows here, {there.rows:,} {where}")
        if self.inputs != there.inputs:
            here, others = (", ".join(inputs) or "none" for inputs in (self.inputs, there.inputs))
            found.append(f"inputs {here} here, {others} {where}")
        if found:
            return found
        if self.rows_checksum and there.rows_checksum and self.rows_checksum != there.rows_checksum:
            return [f"rows or their ids have another content here than {where}"]
        if self.file_checksum and there.file_checksum and self.file_checksum != there.file_checksum:
            return [f"some rows have another content here than {where}"]
        return []


def _inputs_of(data: IndexedData) -> tuple[str, ...]:
    try:
        _, fields = next(iter(data.load([np.array([0])])))
    except Exception:  # noqa: BLE001 - the data set's own code; what is wrong with a row is its shard's matter
        return tuple(sorted(data.inputs))
    return tuple(f"{name} {_shape_of(found)}" for name, found in sorted(fields.items()))


def _shape_of(found: Array | list[Array]) -> str:
    if isinstance(found, list):
        sizes = ",".join(map(str, ("tokens", *found[0].shape[1:])))
        return f"{found[0].dtype}[{sizes}]"
    return f"{found.dtype}{list(found.shape[1:])}"


def _first_checksum(data: LabelDataset) -> str:
    batches = data.batches(_ROWS, lambda ids, _: np.zeros(len(ids), np.bool_))
    try:
        rows = [_digest(batch) for batch in itertools.islice(batches, 1)]
    except Exception as exc:  # noqa: BLE001 - as above
        rows = [f"not loaded: {type(exc).__name__}".encode()]
    return hashlib.blake2b(b"".join(rows), digest_size=16).hexdigest()


def _checksum_of(data: IndexedData, index: Sequence[Array]) -> str:
    try:
        rows = [_digest(batch) for batch in data.load(index)]  # a single pass: processes that load take long to begin
    except Exception:  # noqa: BLE001 - as above
        rows = [_row_checksum(data, part) for part in index]
    return hashlib.blake2b(b"".join(rows), digest_size=16).hexdigest()


def _row_checksum(data: IndexedData, part: Array) -> bytes:
    try:
        ids, fields = next(iter(data.load([part])))
    except Exception as exc:  # noqa: BLE001 - as above
        return f"not loaded: {type(exc).__name__}".encode()
    return _digest((ids, fields))


def _digest(batch: Batch) -> bytes:
    ids, fields = batch
    total = hashlib.blake2b(repr(ids).encode(), digest_size=16)
    columns = [(name, found if isinstance(found, list) else [found]) for name, found in sorted(fields.items())]
    for name, array in ((name, array) for name, column in columns for array in column):
        total.update(f"{name} {array.dtype.str} {array.shape}".encode())
        total.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes())
    return total.digest()
