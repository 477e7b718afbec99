"""Reads a whole folder of labels as arrays, for programs that train without a reader."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from edl.distill.cache.folder import SegmentFolder
from edl.distill.cache.key import CacheKey
from edl.distill.cache.layout import RowLayout
from edl.distill.cache.memory import SampleId
from edl.distill.cache.namespace import Namespace
from edl.distill.cache.segment import BadSegmentError, FileHandles
from edl.distill.cache.view import Ids, as_ids
from edl.distill.compress import TopK
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["LabelSet", "load_labels"]

logger = logging.getLogger("edl.distill")


@dataclass(frozen=True, eq=False)
class LabelSet:
    """All labels of a key, in memory.

    Attributes:
        key: the teacher and the data set that they are of.
        ids: [rows], integers sorted by value before strings sorted likewise.
        outputs: arrays [rows, ...] or `TopK`, in the order of `ids`.
    """

    key: CacheKey
    ids: tuple[SampleId, ...]
    outputs: Mapping[str, Array | TopK]

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, ids: Ids) -> dict[str, Array | TopK]:
        """Return the outputs of these samples, in this order, as new arrays.

        Args:
            ids: [rows], a sequence or an integer array.

        Raises:
            SettingsError: there is no label for some of them.
        """
        where = self._where
        samples = as_ids(ids)
        try:
            index = np.fromiter((where[sample] for sample in samples), np.intp, len(samples))
        except KeyError as exc:
            missing = sum(sample not in where for sample in samples)
            raise SettingsError(
                f"no label for sample {exc.args[0]!r} ({missing} of {len(samples)} are missing): "
                "run `edl label` on the whole data set"
            ) from exc
        return {name: output[index] for name, output in self.outputs.items()}

    @cached_property
    def _where(self) -> dict[SampleId, int]:
        return {sample: row for row, sample in enumerate(self.ids)}


def load_labels(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], key: CacheKey | None = None
) -> LabelSet:
    """Read the labels that `edl label` or a `SoftLabelCache` wrote to the folder `path`.

    ::

        labels = load_labels("labels")
        logits = labels.rows(range(len(dataset)))["logits"]

    Args:
        path: of the folder; or of several, where machines wrote to folders of their own. Of labels of the same sample
            the newest counts, in whichever folder.
        key: wanted if the folders have labels of several teachers or data sets.

    Returns:
        All labels of the key, in memory.

    Raises:
        SettingsError: there are no labels, or several keys to choose from, or a file that cannot be read, or folders
            have labels of different shapes or dtypes.
    """
    roots = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(part) for part in path]
    name = ", ".join(repr(str(root)) for root in roots)
    if not roots:
        raise SettingsError("no folder of labels: name at least one")
    for root in roots:
        if not root.is_dir():
            raise SettingsError(f"{str(root)!r} is no folder: name the one that `edl label --output` wrote to")
    if key is None:
        key = _only([key for root in roots for key in SegmentFolder(root, None).keys()], name)  # noqa: SIM118
    reading = _Reading()
    for root in roots:
        reading.add_folder(root, key)
    return reading.labels(key, name)


class _Reading:
    """Rows that were read from folders so far."""

    def __init__(self) -> None:
        self._where: dict[SampleId, tuple[str, int]] = {}  # the file's name, which begins with the time, and the row
        self._parts: list[dict[str, Array]] = []
        self._rows = 0
        self._layout: RowLayout | None = None
        self._first: Path | None = None

    def add_folder(self, root: Path, key: CacheKey) -> None:
        handles = FileHandles()
        namespace = Namespace(root, key, handles)
        namespace.scan(force=True)
        if not len(namespace):
            return
        assert namespace.layout is not None
        if self._layout is None:
            self._layout = namespace.layout
            self._first = root
        elif self._layout != namespace.layout:
            raise SettingsError(
                f"labels in {str(root)!r} are {namespace.layout}, in {str(self._first)!r} {self._layout}: they cannot "
                "be read together"
            )
        damaged = 0
        for segment in namespace.segments():
            try:
                records = segment.read(handles, 0, len(segment.ids))
            except BadSegmentError as exc:
                raise SettingsError(f"{segment.path} cannot be read: {exc}") from exc
            damaged += self._add_rows(segment.path.name, segment.ids, records)
        if damaged:
            logger.warning(
                "soft-label cache: %d rows in %s are damaged; `edl label` asks for them again", damaged, root
            )

    def _add_rows(self, name: str, ids: list[SampleId], records: list[bytes | None]) -> int:
        """Take in the rows of a file; return how many are damaged."""
        assert self._layout is not None
        there = [(sample, record) for sample, record in zip(ids, records, strict=True) if record is not None]
        if there:
            self._parts.append(self._layout.unpack(b"".join(record for _, record in there), len(there)))
            for row, (sample, _) in enumerate(there, self._rows):
                if name >= self._where.get(sample, ("", 0))[0]:  # of several the newest counts
                    self._where[sample] = (name, row)
            self._rows += len(there)
        return len(records) - len(there)

    def labels(self, key: CacheKey, name: str) -> LabelSet:
        if self._layout is None:
            raise SettingsError(f"{name} has no labels of {key}")
        if not self._parts:
            raise SettingsError(f"{name} has no labels of {key} that are whole")
        ids = sorted(self._where, key=lambda sample: (isinstance(sample, str), sample))
        order = np.fromiter((self._where[sample][1] for sample in ids), np.intp, len(ids))
        arrays = {
            column.name: np.concatenate([part[column.name] for part in self._parts])[order]
            for column in self._layout.columns
        }
        return LabelSet(key, tuple(ids), self._layout.restore(arrays))


def _only(found: list[CacheKey], name: str) -> CacheKey:
    keys = [*dict.fromkeys(found)]
    if len(keys) == 1:
        return keys[0]
    if not keys:
        raise SettingsError(f"{name} has no labels: `edl label --output` writes some")
    listing = "\n".join(f"  {key}" for key in keys)
    raise SettingsError(f"{name} has labels of several keys; pass key=, one of\n{listing}")
