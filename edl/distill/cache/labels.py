"""Reads a whole folder of labels as arrays, for programs that train without a reader."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from edl.distill.cache.folder import SegmentFolder
from edl.distill.cache.key import CacheKey
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


def load_labels(path: str | os.PathLike[str], key: CacheKey | None = None) -> LabelSet:
    """Read the labels that `edl label` or a `SoftLabelCache` wrote to the folder `path`.

    ::

        labels = load_labels("labels")
        logits = labels.rows(range(len(dataset)))["logits"]

    Args:
        path: of the folder.
        key: wanted if the folder has labels of several teachers or data sets.

    Returns:
        All labels of the key, in memory.

    Raises:
        SettingsError: there are no labels, or several keys to choose from, or a file that cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        raise SettingsError(f"{str(path)!r} is no folder: name the one that `edl label --output` wrote to")
    key = key if key is not None else _only(SegmentFolder(root, None).keys(), root)
    handles = FileHandles()
    namespace = Namespace(root, key, handles)
    namespace.scan(force=True)
    if not len(namespace):
        raise SettingsError(f"{str(path)!r} has no labels of {key}")
    found: dict[SampleId, int] = {}
    parts: list[dict[str, Array]] = []
    rows = damaged = 0
    layout = namespace.layout
    assert layout is not None
    for segment in namespace.segments():
        try:
            records = segment.read(handles, 0, len(segment.ids))
        except BadSegmentError as exc:
            raise SettingsError(f"{segment.path} cannot be read: {exc}") from exc
        there = [(sample, record) for sample, record in zip(segment.ids, records, strict=True) if record is not None]
        damaged += len(records) - len(there)
        if not there:
            continue
        parts.append(layout.unpack(b"".join(record for _, record in there), len(there)))
        found.update((sample, rows + row) for row, (sample, _) in enumerate(there))  # of several the newest counts
        rows += len(there)
    if damaged:
        logger.warning("soft-label cache: %d rows in %s are damaged; `edl label` asks for them again", damaged, root)
    if not parts:
        raise SettingsError(f"{str(path)!r} has no labels of {key} that are whole")
    ids = sorted(found, key=lambda sample: (isinstance(sample, str), sample))
    order = np.fromiter((found[sample] for sample in ids), np.intp, len(ids))
    arrays = {column.name: np.concatenate([part[column.name] for part in parts])[order] for column in layout.columns}
    return LabelSet(key, tuple(ids), layout.restore(arrays))


def _only(keys: list[CacheKey], root: Path) -> CacheKey:
    if len(keys) == 1:
        return keys[0]
    if not keys:
        raise SettingsError(f"{str(root)!r} has no labels: `edl label --output {root}` writes some")
    listing = "\n".join(f"  {key}" for key in keys)
    raise SettingsError(f"{str(root)!r} has labels of several keys; pass key=, one of\n{listing}")
