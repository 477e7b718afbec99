"""Detects which data set a folder has labels for, and whether the data set changes while it is being labelled.

Labels are stored by sample id, which is usually a position, so labels of an edited file look like those of the
original. A folder and a job therefore remember a `DataFingerprint` of a few rows. During a run, the size, modification
time and inode of local files are compared too. For sequences, each label contains a fingerprint of its text instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from edl.datasets.rows import Batch, IndexedData, LabelDataset, SampleId
from edl.distill.cache import CacheView
from edl.distill.cache.folder import LabelFolder, Namespace
from edl.errors import ConflictError
from edl.protocol.tensors import Array

logger = logging.getLogger("edl.distill")

_ROWS = 16  # to compare: 16 image files take 0.2 s, and show a change of every tenth row in four of five cases
_MIXED = "changed while it was labelled"  # replaces a checksum if labels may be of two versions of the data
FileStates: TypeAlias = Mapping[str, os.stat_result]


@dataclass(frozen=True)
class DataFingerprint:
    """The properties of a data set that two processes compare before they share its labelling.

    Attributes:
        rows: Number of samples; 0 if unknown.
        inputs: Names, dtypes and shapes of the inputs in the first row, such as `image float32[3,224,224]`.
        rows_checksum: Checksum of 16 rows and their ids, spread over the data set. Empty if these rows cannot be
            compared, because loading them twice gives different values, as with random augmentation.
        file_checksum: Checksum of all rows, if the file format stores one (`.npz`); else empty.
    """

    rows: int
    inputs: tuple[str, ...]
    rows_checksum: str
    file_checksum: str = ""

    @classmethod
    def of(cls, data: LabelDataset, rows: int | None = None) -> DataFingerprint:
        """Load a few of the first `rows` rows (the first 16 if not indexed). The checksum includes failures to load."""
        if not isinstance(data, IndexedData):
            first = (itertools.islice(data.batches(_ROWS, _none_known), 1) for _ in range(2))
            found, again = (_checksum([load]) for load in first)
            return cls(0, tuple(sorted(data.inputs)), found if found == again else "")
        rows = data.rows if rows is None else rows
        index = sorted({*np.linspace(0, rows - 1, _ROWS).astype(np.int64).tolist()})
        found, again = (_checksum(data.load([np.array([at])]) for at in index) for _ in range(2))
        checksum = data.checksum if rows == data.rows else ""
        return cls(rows, _inputs_of(data), found if found == again else "", checksum)

    def to_json(self) -> str:
        """Return the same text for equal fingerprints."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> DataFingerprint:
        """Parse the text of `to_json`; raise `ValueError` for any other text."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "inputs": tuple(fields["inputs"])})
        except (TypeError, KeyError) as exc:
            raise ValueError(f"not a fingerprint of data: {exc}") from exc

    def differences(self, there: DataFingerprint, where: str) -> list[str]:
        """Return how these data differ from `there`; `where` says where `there` comes from, such as "in the job"."""
        found = []
        if self.rows != there.rows:
            found.append(f"{self.rows:,} rows here, {there.rows:,} {where}")
        if self.inputs != there.inputs:
            here, others = (", ".join(inputs) or "none" for inputs in (self.inputs, there.inputs))
            found.append(f"inputs {here} here, {others} {where}")
        if found:
            return found
        if self.rows_checksum and there.rows_checksum and self.rows_checksum != there.rows_checksum:
            return [f"rows or their ids have different content here than {where}"]
        if self.file_checksum and there.file_checksum and self.file_checksum != there.file_checksum:
            return [f"some rows have different content here than {where}"]
        return []


def note_files(*names: str | None) -> FileStates:
    """Return the state of the local files among `names`, for `DataGuard`. Call this before opening the files."""
    states = {}
    for name in names:
        if name is not None and Path(name).is_file():
            with contextlib.suppress(OSError):  # opening the data set raises a better error
                states[name] = _state_of(name)
    return states


def _changes(files: FileStates) -> list[str]:
    found = []
    for name, before in files.items():
        try:
            now = _state_of(name)
        except OSError as exc:
            found.append(f"{name}: {exc.strerror or exc}")
            continue
        if any(getattr(now, part) != getattr(before, part) for part in ("st_size", "st_mtime_ns", "st_dev", "st_ino")):
            found.append(f"{name} was rewritten or replaced (it had {before.st_size:,} bytes, now {now.st_size:,})")
    return found


def _state_of(name: str) -> os.stat_result:
    with Path(name).open("rb") as file:  # NFS may answer `stat` from a cache, but asks the server at `open`
        return os.fstat(file.fileno())


class DataGuard:
    """Prevents a folder or a run from mixing labels of different data. `fingerprint` is that of the run's start.

    `files` is the result of `note_files`. Without `compare_rows`, only the number, types and shapes of the rows are
    compared, not their content.
    """

    def __init__(self, data: LabelDataset, files: FileStates | None = None, *, compare_rows: bool = True) -> None:
        self.data = data
        self._files = files or {}
        self.fingerprint = DataFingerprint.of(data)
        if not compare_rows:
            self.fingerprint = replace(self.fingerprint, rows_checksum="", file_checksum="")

    def admit(self, view: CacheView, *, relabel: bool = False) -> None:
        """Record in a folder which data its labels are for; raise `ConflictError` if they are for other or mixed data.

        Data to which rows were added at the end count as the same data. With `relabel`, labels of other data are
        deleted. A folder without labels, for example after a mistaken command, accepts any data.
        """
        if self.data.sequences:
            return
        folder, space = _on_disk(view)
        text, here = folder.data_set(space), self.fingerprint
        try:
            there = DataFingerprint.from_json(text) if text else here
        except ValueError:
            there = here
        grown = isinstance(self.data, IndexedData) and 0 < there.rows < here.rows
        if grown:
            here = DataFingerprint.of(self.data, there.rows)
            if not self.fingerprint.rows_checksum:
                here = replace(here, rows_checksum="", file_checksum="")
        if there.rows_checksum == _MIXED:
            problem = "the data changed while they were labelled, so the folder may have labels of both versions"
        else:
            problem = "; ".join(here.differences(there, "where they were labelled"))
        if problem and not relabel and folder.ids(space):
            raise ConflictError(
                f"the folder has labels of other data: {problem}. Use a new folder or --dataset, or pass --relabel "
                "to label all rows again"
            )
        if grown and not problem:
            logger.warning(
                "the data grew from %d rows to %d; of the earlier rows, %d were compared. If you edited other rows, "
                "use a new folder or --dataset",
                there.rows,
                self.fingerprint.rows,
                min(_ROWS, there.rows) if here.rows_checksum and there.rows_checksum else 0,
            )
        if problem or text != self.fingerprint.to_json():
            folder.note_data_set(space, self.fingerprint.to_json(), relabel=bool(problem))

    def check_unchanged(self, view: CacheView, *, in_job: bool, at_end: bool = False) -> None:
        """Raise `ConflictError` if the data changed during this run, or another run uses the folder for other data.

        A folder that may have labels of two versions is marked. At the end, the fingerprint's rows are loaded again, to
        find changes that the state of the files does not show. Changed sequences raise the error only at the end,
        because each label has the fingerprint of the text for which it is valid. `in_job` selects the remedy in the
        error message.
        """
        folder, space = _on_disk(view)
        folder.check_data_set(space)
        sequences = self.data.sequences
        if sequences and not at_end:
            return
        found = _changes(self._files)
        if at_end and not found and not sequences:
            found = DataFingerprint.of(self.data).differences(self.fingerprint, "when this run began")
        if not found:
            return
        if sequences:
            again = "Run the command again under a new --job name" if in_job else "Run the command again"
            remedy = f"{again}: this labels the sequences that have changed"
        else:
            folder.note_data_set(space, replace(self.fingerprint, rows_checksum=_MIXED).to_json())
            remedy = "This folder may have labels of both versions: " + (
                "delete it, and run under a new --job name" if in_job else "pass --relabel to label all rows again"
            )
        raise ConflictError(f"the data changed while they were labelled: {'; '.join(found)}. {remedy}")

    def fits(self, noted: str) -> bool:
        """Return whether a folder's labels may be for these data, given the `data_set` recorded in the folder."""
        if self.data.sequences or not noted:
            return True
        there = DataFingerprint.from_json(noted)
        # If rows were added at the end, the earlier rows still have the same labels.
        return there.rows != self.fingerprint.rows or not self.fingerprint.differences(there, "there")


def _on_disk(view: CacheView) -> tuple[LabelFolder, Namespace]:
    assert view.folder is not None  # labels are always written to a folder
    return view.folder, view.space


def _none_known(ids: list[SampleId], _: object) -> Array:
    return np.zeros(len(ids), np.bool_)


def _inputs_of(data: IndexedData) -> tuple[str, ...]:
    try:
        _, fields = next(iter(data.load([np.array([0])])))
    except Exception:  # noqa: BLE001 - code of the user's data set; a bad row is reported when it is labelled
        return tuple(sorted(data.inputs))
    return tuple(f"{name} {_shape_of(found)}" for name, found in sorted(fields.items()))


def _shape_of(found: Array | list[Array]) -> str:
    if isinstance(found, list):
        sizes = ",".join(map(str, ("tokens", *found[0].shape[1:])))
        return f"{found[0].dtype}[{sizes}]"
    return f"{found.dtype}{list(found.shape[1:])}"


def _checksum(loads: Iterable[Iterable[Batch]]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for load in loads:
        try:
            for batch in load:
                total.update(_digest(batch))
        except Exception as exc:  # noqa: BLE001 - as above
            total.update(f"not loaded: {type(exc).__name__}".encode())
    return total.hexdigest()


def _digest(batch: Batch) -> bytes:
    ids, fields = batch
    total = hashlib.blake2b(repr(ids).encode(), digest_size=16)
    columns = [(name, found if isinstance(found, list) else [found]) for name, found in sorted(fields.items())]
    for name, array in ((name, array) for name, column in columns for array in column):
        total.update(f"{name} {array.dtype.str} {array.shape}".encode())
        total.update(repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes())
    return total.digest()
