"""Reads a whole folder of labels as arrays, for programs that train without a reader."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edl.distill.cache.folder import LabelFolder, Namespace
from edl.distill.cache.key import CacheKey, Ids, SampleId, SequenceIds, as_ids, fingerprints_of
from edl.distill.cache.records import RowLayout
from edl.distill.cache.store import check_path
from edl.distill.compress import TopK
from edl.distill.padding import as_token_mask, padded
from edl.errors import SettingsError, SourceError
from edl.protocol.tensors import Array

__all__ = ["LabelSet", "load_labels"]

logger = logging.getLogger("edl.distill")


@dataclass(frozen=True, eq=False)
class LabelSet:
    """All labels of a key, in memory: of rows, or of sequences with rows of their own number.

    Attributes:
        key: The teacher and the data set that they are of.
        ids: Integers sorted by value before strings sorted likewise; [rows] or [sequences].
        outputs: Arrays [rows, ...] or `TopK`, in the order of `ids`; of sequences the rows of all, behind one another.
        sequences: Ids, lengths and fingerprints of the sequences, in the order of `ids`; None for labels of rows.
    """

    key: CacheKey
    ids: tuple[SampleId, ...]
    outputs: Mapping[str, Array | TopK]
    sequences: SequenceIds | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, ids: Ids) -> dict[str, Array | TopK]:
        """Return the outputs of these samples, in this order, as new arrays.

        Args:
            ids: Ids of the samples, [rows], a sequence or an integer array.

        Raises:
            SettingsError: some of them lack a label, or the labels are of sequences.
        """
        if self.sequences is not None:
            raise SettingsError("these are labels of sequences: read them with of_sequences(ids) or padded(ids, mask)")
        index = np.array(self._places(ids), np.intp)
        return {name: output[index] for name, output in self.outputs.items()}

    def of_sequences(self, ids: Ids, inputs: Mapping[str, Sequence[Any]] | None = None) -> list[dict[str, Any]]:
        """Return the outputs of each of these sequences, arrays [tokens, ...] or `TopK` of its own.

        Args:
            ids: Ids of the sequences.
            inputs: The texts themselves, to see that they are those which were labelled: by the name of the teachers'
                input, [tokens, ...] for each sequence. None to trust the ids.

        Raises:
            SettingsError: some of them lack a label, or have that of another text; or labels are of rows.
            SourceError: a text is a tensor that cannot be read as it is.
        """
        places = self._checked_places(ids)
        if inputs is not None:
            texts = {name: [_array_of(text, f"input {name!r}") for text in texts] for name, texts in inputs.items()}
            self._check_texts(places, texts)
        index = [self._rows_at(place) for place in places]
        return [{name: output[rows] for name, output in self.outputs.items()} for rows in index]

    def padded(self, ids: Ids, mask: Any, inputs: Mapping[str, Any] | None = None) -> dict[str, Array | TopK]:
        """Return the outputs of a batch of padded sequences, [sequences, length, ...], 0 where nothing is a token.

        Args:
            ids: Ids of the sequences; that of a sequence without tokens is not looked up.
            mask: Which elements are tokens, 0 and 1 [sequences, length], such as a collator's `attention_mask`; an
                array or a tensor. A sequence must have as many tokens as when it was labelled.
            inputs: The texts themselves, as for `of_sequences`: [sequences, length, ...] by the name of the input.

        Raises:
            SettingsError: some of them lack a label, or have that of another text; or labels are of rows.
            SourceError: the mask is none, or it or a text is a tensor that cannot be read as it is.
        """
        kept = as_token_mask(_array_of(mask, "the batch: its mask"), "the batch")
        samples = as_ids(ids)
        if len(kept) != len(samples):
            raise SettingsError(f"a mask {list(kept.shape)} for {len(samples)} ids: expected [sequences, length]")
        counts = kept.sum(axis=1)
        places = self._checked_places([sample for sample, count in zip(samples, counts, strict=True) if count])
        assert self.sequences is not None
        assert self.sequences.lengths is not None
        for place, count in zip(places, counts[counts > 0].tolist(), strict=True):
            labelled = int(self.sequences.lengths[place])
            if count != labelled:
                raise SettingsError(
                    f"sample {self.ids[place]!r} has {count} tokens, and the text that was labelled {labelled}"
                )
        if inputs is not None:
            arrays = {name: _array_of(array, f"the batch: input {name!r}") for name, array in inputs.items()}
            rows = [row for row, count in enumerate(counts) if count]
            self._check_texts(places, {name: [a[row][kept[row]] for row in rows] for name, a in arrays.items()})
        index = np.concatenate([self._rows_at(place) for place in places]) if places else np.empty(0, np.intp)
        return {name: padded(output[index], kept) for name, output in self.outputs.items()}

    def _rows_at(self, place: int) -> Array:
        return np.arange(self._stops[place], self._stops[place + 1])

    def _checked_places(self, ids: Ids) -> list[int]:
        if self.sequences is None:
            raise SettingsError("these are labels of rows: read them with rows(ids)")
        return self._places(ids)

    def _check_texts(self, places: Sequence[int], inputs: Mapping[str, Sequence[Array]]) -> None:
        sequences = self.sequences
        assert sequences is not None
        assert sequences.fingerprints is not None
        missing = sorted({*sequences.inputs} - {*inputs})
        if missing:
            raise SettingsError(
                f"texts were labelled by their inputs {list(sequences.inputs)}: {missing[0]!r} is missing"
            )
        if not places:
            return
        columns = {name: inputs[name] for name in sequences.inputs}
        lengths = np.array([len(part) for part in next(iter(columns.values()))], np.int64)
        if any([len(part) for part in column] != lengths.tolist() for column in columns.values()):
            raise SettingsError("the inputs of a sequence have different numbers of tokens")
        found = fingerprints_of({name: np.concatenate(column) for name, column in columns.items()}, lengths)
        for place, fingerprint in zip(places, found.tolist(), strict=True):
            if fingerprint != int(sequences.fingerprints[place]):
                raise SettingsError(f"sample {self.ids[place]!r} is not the text that was labelled under this id")

    def _places(self, ids: Ids) -> list[int]:
        where = self._where
        samples = as_ids(ids)
        try:
            return [where[sample] for sample in samples]
        except KeyError as exc:
            missing = sum(sample not in where for sample in samples)
            raise SettingsError(
                f"no label for sample {exc.args[0]!r} ({missing} of {len(samples)} are missing): "
                "run `edl label` on the whole data set"
            ) from exc

    @cached_property
    def _where(self) -> dict[SampleId, int]:
        return {sample: row for row, sample in enumerate(self.ids)}

    @cached_property
    def _stops(self) -> list[int]:
        assert self.sequences is not None
        assert self.sequences.lengths is not None
        return [0, *np.cumsum(self.sequences.lengths, dtype=np.int64).tolist()]


def load_labels(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], key: CacheKey | None = None
) -> LabelSet:
    """Read the labels that `edl label` or a `SoftLabelCache` wrote to the folder `path`.

    ::

        labels = load_labels("labels")
        logits = labels.rows(range(len(dataset)))["logits"]

    Of sequences::

        top_k = labels.padded(batch["id"], batch["attention_mask"])["logprobs"]  # TopK of [sequences, length, k]

    Args:
        path: A folder; or several, where machines wrote to folders of their own. If several have a label of one
            sample, that of the last folder counts.
        key: Which labels, if the folders have those of several teachers or data sets.

    Returns:
        All labels of the key, in memory.

    Raises:
        SettingsError: the folders hold nothing, several keys to choose from, or labels that do not fit together.
    """
    paths: list[Any] = [*path] if isinstance(path, Iterable) and not isinstance(path, str) else [path]
    for part in paths:
        check_path(part)
    roots = [Path(part) for part in paths]
    name = ", ".join(repr(str(root)) for root in roots)
    if not roots:
        raise SettingsError("no folder of labels: name at least one")
    for root in roots:
        if not root.is_dir():
            raise SettingsError(f"{str(root)!r} is not a folder: name the one that `edl label --output` wrote to")
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(contextlib.closing(LabelFolder(root, read_only=True))) for root in roots]
        if key is None:
            keys = [key for folder in folders for key in folder.keys()]  # noqa: SIM118 - not a mapping
            if not keys:
                _raise_unreadable(folders)
            key = _only(keys, name)
        return _labels(key, folders, name)


def _labels(key: CacheKey, folders: Sequence[LabelFolder], name: str) -> LabelSet:
    layout: RowLayout | None = None
    records: dict[SampleId, bytes] = {}
    first = None
    for folder in folders:
        space = Namespace(key)
        damaged = 0
        for ids, found in folder.read_all(space):
            there = {sample: record for sample, record in zip(ids, found, strict=True) if record is not None}
            records.update(there)
            damaged += len(ids) - len(there)
        if space.layout is None:
            continue
        merged = space.layout if layout is None else layout.merged(space.layout)
        if merged is None:
            raise SettingsError(
                f"labels in {str(folder.path)!r} are {space.layout}, in {first!r} {layout}: they do not go together"
            )
        layout, first = merged, first or str(folder.path)
        if damaged:
            logger.warning(
                "soft-label cache %s: %d labels are damaged; `edl label` asks for them again", folder.path, damaged
            )
    if layout is None or not records:
        _raise_unreadable(folders)
        raise SettingsError(f"{name} has no labels of {key}" + (" that are whole" if layout is not None else ""))
    ids = sorted(records, key=lambda sample: (isinstance(sample, str), sample))
    arrays, lengths, prints = layout.unpack([records.pop(sample) for sample in ids])
    sequences = None
    if layout.sequence_inputs is not None:
        sequences = SequenceIds(ids, lengths, prints, layout.sequence_inputs)
    return LabelSet(key, tuple(ids), layout.restore(arrays), sequences)


def _raise_unreadable(folders: Sequence[LabelFolder]) -> None:
    for folder in folders:
        if folder.unreadable:
            raise SettingsError(f"labels in {str(folder.path)!r} cannot be read: {folder.unreadable}")


def _array_of(value: Any, what: str) -> Array:
    try:
        return np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as exc:  # a tensor that requires grad, lies on a GPU, is sparse, ...
        raise SourceError(f"{what}: cannot be made an array: {exc}") from exc


def _only(found: list[CacheKey], name: str) -> CacheKey:
    keys = [*dict.fromkeys(found)]
    if len(keys) == 1:
        return keys[0]
    if not keys:
        raise SettingsError(f"{name} has no labels: `edl label --output` writes some")
    listing = "\n".join(f"  {key}" for key in keys)
    raise SettingsError(f"{name} has labels of several keys; pass key=, one of\n{listing}")
