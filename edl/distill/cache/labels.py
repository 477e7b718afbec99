"""Loads all labels of a folder as arrays, for programs that train without a reader."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from edl.distill.cache.folder import LabelFolder, Namespace, folder_path
from edl.distill.cache.records import CacheKey, Ids, RowLayout, SampleId, SequenceIds, as_ids, fingerprints_of
from edl.distill.compress import TopK
from edl.distill.padding import as_token_mask, padded
from edl.errors import SettingsError, SourceError
from edl.protocol.tensors import Array


@dataclass(frozen=True, eq=False)
class LabelSet:
    """All labels of a key, in memory: either for rows, or for sequences with varying numbers of rows.

    Attributes:
        key: The teacher and the data set of the labels.
        ids: Sample ids, sorted, integers before strings; [rows] or [sequences].
        outputs: Arrays [rows, ...] or `TopK`, in the order of `ids`; for sequences, the concatenated rows of all
            sequences.
        sequences: Ids, lengths and fingerprints of the sequences, in the order of `ids`; None if the labels are for
            rows.
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
            SettingsError: Some samples have no label, or the labels are for sequences.
        """
        if self.sequences is not None:
            raise SettingsError("these are labels of sequences: read them with of_sequences(ids) or padded(ids, mask)")
        index = np.array(self._places(ids), np.intp)
        return {name: output[index] for name, output in self.outputs.items()}

    def of_sequences(self, ids: Ids, inputs: Mapping[str, Sequence[Any]] | None = None) -> list[dict[str, Any]]:
        """Return the outputs of each of these sequences as an array [tokens, ...] or a `TopK`.

        Args:
            ids: Ids of the sequences.
            inputs: The texts, to check that they are the ones that were labelled: for each input name, an array
                [tokens, ...] for each sequence. None to trust the ids.

        Raises:
            SettingsError: A sequence has no label or another text's label, or the labels are for rows.
            SourceError: A text is a tensor that cannot be read as an array.
        """
        texts = {name: [_array_of(text, f"input {name!r}") for text in texts] for name, texts in (inputs or {}).items()}
        index = self._rows_of_texts(ids, texts if inputs is not None else None)
        return [{name: output[rows] for name, output in self.outputs.items()} for rows in index]

    def padded(self, ids: Ids, mask: Any, inputs: Mapping[str, Any] | None = None) -> dict[str, Array | TopK]:
        """Return the outputs for a batch of padded sequences, [sequences, length, ...], with 0 in the padding.

        Args:
            ids: Ids of the sequences; sequences without tokens are not looked up.
            mask: Token mask, 0 and 1 [sequences, length], such as a collator's `attention_mask`; an array or a tensor.
                A sequence must have as many tokens as it had when it was labelled.
            inputs: The texts themselves, as for `of_sequences`: [sequences, length, ...] by input name.

        Raises:
            SettingsError: A sequence has no label or another text's label, or the labels are for rows.
            SourceError: The mask is invalid, or the mask or a text is a tensor that cannot be read as an array.
        """
        kept = as_token_mask(_array_of(mask, "the batch: its mask"), "the batch")
        samples = as_ids(ids)
        if len(kept) != len(samples):
            raise SettingsError(f"a mask {list(kept.shape)} for {len(samples)} ids: expected [sequences, length]")
        texts = None
        rows = np.flatnonzero(kept.any(axis=1)).tolist()
        if inputs is not None:
            arrays = {name: _array_of(array, f"the batch: input {name!r}") for name, array in inputs.items()}
            texts = {name: [array[row][kept[row]] for row in rows] for name, array in arrays.items()}
        found = self._rows_of_texts([samples[row] for row in rows], texts)
        for row, labelled in zip(rows, found, strict=True):
            if len(labelled) != kept[row].sum():
                raise SettingsError(
                    f"sample {samples[row]!r} has {kept[row].sum()} tokens, but the labelled text has {len(labelled)}"
                )
        index = np.concatenate([np.empty(0, np.intp), *found])
        return {name: padded(output[index], kept) for name, output in self.outputs.items()}

    def _rows_of_texts(self, ids: Ids, texts: Mapping[str, Sequence[Array]] | None) -> list[Array]:
        sequences = self.sequences
        if sequences is None:
            raise SettingsError("these are labels of rows: read them with rows(ids)")
        places = self._places(ids)
        if texts is not None and places:
            missing = sorted({*sequences.inputs} - {*texts})
            if missing:
                raise SettingsError(
                    f"texts were labelled with inputs {list(sequences.inputs)}: {missing[0]!r} is missing"
                )
            lengths = {name: [len(part) for part in texts[name]] for name in sequences.inputs}
            own, *others = lengths.values()
            if any(other != own for other in others):
                raise SettingsError("the inputs of a sequence have different numbers of tokens")
            columns = {name: np.concatenate(texts[name]) for name in sequences.inputs}
            assert sequences.fingerprints is not None
            same = fingerprints_of(columns, np.array(own, np.int64)) == sequences.fingerprints[places]
            for place in np.array(places)[~same][:1]:
                raise SettingsError(f"sample {self.ids[place]!r} is not the text labelled under this id")
        return [np.arange(self._stops[place], self._stops[place + 1]) for place in places]

    def _places(self, ids: Ids) -> list[int]:
        samples = as_ids(ids)
        missing = [sample for sample in samples if sample not in self._where]
        if missing:
            raise SettingsError(
                f"no label for sample {missing[0]!r} ({len(missing)} of {len(samples)} are missing): "
                "run `edl label` on the whole data set"
            )
        return [self._where[sample] for sample in samples]

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
    """Read the labels that `edl label` or a `SoftLabelCache` wrote to a folder.

    ::

        labels = load_labels("labels")
        logits = labels.rows(range(len(dataset)))["logits"]

    For sequences::

        top_k = labels.padded(batch["id"], batch["attention_mask"])["logprobs"]  # TopK of [sequences, length, k]

    Args:
        path: A folder, or several folders if each machine wrote to its own folder. If several folders have a label for
            the same sample, the label in the last folder counts.
        key: Which labels to read, if the folders have labels from several teachers or for several data sets.

    Returns:
        All labels of the key, in memory.

    Raises:
        SettingsError: The folders contain no labels, labels of several keys, or labels that cannot be combined.
    """
    paths: list[Any] = [*path] if isinstance(path, Iterable) and not isinstance(path, str) else [path]
    roots = [folder_path(part) for part in paths]
    if not roots:
        raise SettingsError("no folder of labels: name at least one")
    for root in roots:
        if not root.is_dir():
            raise SettingsError(f"{str(root)!r} is not a folder: pass the one that `edl label --output` wrote to")
    name = ", ".join(repr(str(root)) for root in roots)
    layout: RowLayout | None = None
    records: dict[SampleId, bytes] = {}
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(contextlib.closing(LabelFolder(root, read_only=True))) for root in roots]
        keys = [key] if key is not None else [*dict.fromkeys(itertools.chain(*(folder.keys() for folder in folders)))]
        if len(keys) > 1:
            listing = "\n".join(f"  {key}" for key in keys)
            raise SettingsError(f"{name} has labels of several keys; pass key=, one of\n{listing}")
        for space, folder in ((Namespace(key), folder) for key in keys for folder in folders):
            for part in folder.read_all(space):
                records.update(part)
            merged = layout.merged(space.layout) if layout is not None and space.layout is not None else space.layout
            if merged is None and space.layout is not None:
                raise SettingsError(
                    f"labels in {str(folder.path)!r} are {space.layout}, but those in earlier folders are {layout}: "
                    "they cannot be combined"
                )
            layout = merged or layout
        if layout is None or not records:
            why = "".join(f"; they cannot be read: {folder.unreadable}" for folder in folders if folder.unreadable)
            what = "no labels" if key is None else f"no intact labels of {key}"
            raise SettingsError(f"{name} has {what}: `edl label --output` writes some{why}")
    ids = sorted(records, key=lambda sample: (isinstance(sample, str), sample))
    packed = [records[sample] for sample in ids]
    sequences = None
    if layout.sequence_inputs is not None:
        lengths, prints = zip(*map(layout.head_of, packed), strict=True)
        fingerprints = np.frombuffer(b"".join(prints), "<u8").astype(np.uint64)
        sequences = SequenceIds(ids, np.array(lengths, np.int64), fingerprints, layout.sequence_inputs)
    return LabelSet(keys[0], tuple(ids), layout.restore(layout.unpack(packed)), sequences)


def _array_of(value: Any, what: str) -> Array:
    try:
        return np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as exc:  # a tensor that requires grad, is on a GPU, is sparse, ...
        raise SourceError(f"{what}: cannot be converted to an array: {exc}") from exc
