"""Cuts sequences of any length into requests. Several sequences fill a request, and no sequence is split.

A sequence of T tokens is T rows. Row t holds token t and the teacher's prediction of token t + 1; the last row predicts
what would follow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.distill.padding import as_token_mask
from edl.distill.source.chunk import Chunk, Item, Reading
from edl.distill.source.cutters import Gatherer, Getter
from edl.distill.source.fingerprint import ItemFingerprint
from edl.distill.transport.schema import ModelSpec
from edl.errors import SourceError
from edl.protocol.arrays import RowBuffer, as_array
from edl.protocol.names import POSITION, SEQUENCES
from edl.protocol.tensors import Array

__all__ = [
    "PaddedBatchCutter",
    "PaddedReading",
    "SequenceColumnsCutter",
    "SequenceCutter",
    "SequenceListCutter",
    "SequenceReading",
    "sequence_fields",
]

_MASK = "tokens"  # the user's name for the mask
_REQUESTS_WAITING = 4  # requests that a teacher's queue should hold, so that the next one is ready when it needs it
_OTHER_SHAPE = "the rows of all sequences must have one shape; only the number of rows may differ"


def sequence_fields(spec: ModelSpec, chunk: Chunk) -> Mapping[str, Array]:
    """Return a chunk's fields, with the positions of its rows where the source has none.

    Raises:
        SourceError: The chunk holds sequences but the model's rows are not declared as tokens of sequences; or they
            are, but the chunk's rows do not start one.
    """
    name = spec.sequences
    if chunk.positions is not None:
        if not name:
            raise SourceError(
                f"the teachers' model {spec.name!r} does not say that its rows are tokens of sequences ({SEQUENCES}), "
                "so it may answer pieces of a sequence, or several as if they were one: serve it with edl serve --hf, "
                "by edl register vllm:// or sglang://, or as a function (--callable, --factory) with the attribute "
                f"sequence_input = {POSITION!r}, its INT32 input that is 0 where a sequence begins. Models of "
                "--torchscript, --torch-export, --torch-factory and --paddle, and servers other than EDL's, cannot say "
                "so"
            )
        if name in spec.inputs and name not in chunk.fields:
            return {**chunk.fields, name: chunk.positions}
        begins = chunk.fields[name][chunk.positions == 0] if name in chunk.fields else chunk.positions[:0]
        if begins.any():  # else a teacher might take two sequences for one
            raise SourceError(
                f"input {name!r} is {begins[begins != 0][0]} where a sequence begins, and must be 0 there and rise by "
                "1 (positions of a batch padded on the left often count its padding): leave it out of the inputs, and "
                "each sequence gets positions of its own"
            )
    if name and (name not in chunk.fields or chunk.fields[name].flat[0] != 0):
        raise SourceError(
            f"rows of the teachers' model {spec.name!r} belong to sequences, and a request holds whole ones: set the "
            "source with set_sequence_generator or set_sequence_list_generator, or give distill tokens="
        )
    return chunk.fields


@dataclass(frozen=True)
class SequenceReading:
    """A sequence that was read."""

    what: str  # its place in the source, for messages
    arrays: Mapping[str, Array]  # by input [tokens, ...]
    rows: int  # its tokens
    sample_id: Any = None  # None without a cache
    rest_nbytes: int = 0  # bytes of its item that are not sent
    # detects changes; None if the whole batch has one, or nothing is checked
    fingerprint: ItemFingerprint | None = None


@dataclass(frozen=True)
class PaddedReading:
    """A batch of padded sequences that was read."""

    texts: Mapping[int, SequenceReading]  # by row, the sequences that have tokens
    mask: Array  # bool [sequences, length], what is a token
    fingerprint: ItemFingerprint  # what tells whether the batch changes


class SequenceCutter(Gatherer):
    """Gathers sequences: samples whose fields are arrays [tokens, ...], of as many tokens as a sample has."""

    usual_rows = 2048  # tokens, which keep an accelerator busy; their top-64 labels take 1 MB

    def __init__(
        self, getters: Mapping[str, Getter], chunk_rows: int | None, services: int, ids: Getter | None = None
    ) -> None:
        super().__init__(getters, chunk_rows, services, ids)
        self._lengths: list[int] = []

    @property
    def wants_limits(self) -> bool:
        """Whether `max_rows` and `max_sequence` must be set before the next item."""
        return True

    def read(self, value: Any) -> Reading:
        """Look at a sequence."""
        return _reading(value, [self._read_sequence(value, self.seen)])

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in what was read: each sequence is a part of the item."""
        ready: list[Chunk] = []
        texts: Sequence[SequenceReading] = reading.found
        parts = [self.add(text, ready) for text in texts]
        self.seen += len(texts)
        return Item(reading.value, parts, tuple(text.fingerprint for text in texts if text.fingerprint)), ready

    def _read_sequence(self, sample: Any, number: int) -> SequenceReading:
        what = f"sample {number}"
        fingerprint, arrays = self._read_fields(sample, what)
        sample_id = self._get_ids(self.ids, sample, what) if self.ids is not None else None
        rows = _sequence_rows(arrays, what)
        return SequenceReading(what, arrays, rows, sample_id, fingerprint.rest_nbytes, fingerprint)

    def add(self, text: SequenceReading, ready: list[Chunk]) -> tuple[Chunk, int, int]:
        """Add a sequence to the open request; return where its rows are."""
        rows = text.rows
        budget = self._budget(text.arrays, rows, text.what)
        if self._open.rows and self._open.rows + rows > budget:
            ready.append(self._sealed())
        for name, array in text.arrays.items():
            if name not in self._rows:
                self._rows[name] = RowBuffer(name, max(budget, rows), _OTHER_SHAPE)
            self._rows[name].extend(array, text.what)
        self._lengths.append(rows)
        self._ids.append(text.sample_id)
        chunk = self._open
        start = chunk.rows
        chunk.rows += rows
        chunk.rest_nbytes += text.rest_nbytes
        if chunk.rows >= budget:
            ready.append(self._sealed())
        return chunk, start, start + rows

    def _budget(self, arrays: Mapping[str, Array], rows: int, what: str) -> int:
        """Return how many rows fill a request."""
        if self.max_sequence and rows > self.max_sequence:
            raise SourceError(
                f"{what} is a sequence of {rows} tokens, and teachers take at most {self.max_sequence}: cut it in your "
                "source, or serve the model with a larger --max-tokens"
            )
        fitting = self.fit({POSITION: np.broadcast_to(np.int32(0), (rows,)), **arrays})
        if fitting and rows > fitting:
            raise SourceError(
                f"{what} is a sequence of {rows} tokens, and teachers take messages of at most {fitting} tokens like "
                "these: cut it in your source, or serve the model with a larger --max-message"
            )
        # A teacher's largest request fills its whole queue, so it would refuse every second request of that size.
        usual = min(self.usual_rows, max(self.max_rows // _REQUESTS_WAITING, 1) if self.max_rows else self.usual_rows)
        return min(filter(None, (self._chunk_rows or usual, self.max_rows, fitting)))

    def _sealed(self) -> Chunk:
        lengths, self._lengths = self._lengths, []
        chunk = super()._sealed()
        chunk.lengths = np.array(lengths, np.int64)
        chunk.positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        chunk.nbytes += chunk.positions.nbytes
        chunk.longest_sequence = max(lengths)
        return chunk


class SequenceListCutter(SequenceCutter):
    """Gathers lists of sequences; a request may hold sequences of several lists."""

    def read(self, value: Any) -> Reading:
        """Look at a list of sequences."""
        if not isinstance(value, Collection):  # also a generator, which could not be gone through again at the end
            raise SourceError(
                f"after {self.seen} sequences the source yielded {type(value).__name__}, which is no list of samples"
            )
        value = list(value)  # the source may put other sequences into its own
        return _reading(value, [self._read_sequence(sample, self.seen + at) for at, sample in enumerate(value)])


class PaddedBatchCutter(SequenceCutter):
    """Gathers sequences out of batches that are padded to one length; a request may hold sequences of several batches.

    Args:
        mask: Function that finds a batch's token mask, [sequences, length], of any type: 1 for tokens, else 0.
        ids: Function that finds the ids of a batch's sequences; None without a cache.

    Attributes:
        whole_batches: Whether a request holds sequences of a single batch only, because the next one may come late.
    """

    whole_batches = False

    def __init__(
        self,
        getters: Mapping[str, Getter],
        mask: Getter,
        chunk_rows: int | None,
        services: int,
        ids: Getter | None = None,
    ) -> None:
        super().__init__(getters, chunk_rows, services, ids)
        self._mask = mask

    def read(self, value: Any) -> Reading:
        """Look at a batch."""
        batch = self.sequences_of(value)
        return Reading(value, {None: max((text.rows for text in batch.texts.values()), default=0)}, batch)

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a batch; each sequence of it that has tokens is a part of the item."""
        ready: list[Chunk] = []
        batch: PaddedReading = reading.found
        parts = [self.add(text, ready) for text in batch.texts.values()]
        if self.whole_batches:
            ready += self.finish()
        self.seen += 1
        return Item(reading.value, parts, (batch.fingerprint,), batch.mask), ready

    def sequences_of(self, value: Any) -> PaddedReading:
        """Return the sequences of a batch that have tokens."""
        what = f"batch {self.seen}"
        mask_name = _MASK if _MASK not in self.getters else f"{_MASK} (the mask)"  # an input may be called so, too
        fingerprint, arrays = self._read_fields(value, what, {**self.getters, mask_name: self._mask})
        mask = as_token_mask(arrays.pop(mask_name), what)
        _check_padded(arrays, mask, what)
        ids = self._ids_of_batch(value, what, len(mask), "sequences") or [None] * len(mask)
        texts: dict[int, SequenceReading] = {}
        for row, kept in enumerate(mask):
            if kept.any():
                own = {name: array[row][kept] for name, array in arrays.items()}
                rest_nbytes = 0 if texts else fingerprint.rest_nbytes
                texts[row] = SequenceReading(f"{what}, sequence {row}", own, int(kept.sum()), ids[row], rest_nbytes)
        return PaddedReading(texts, mask.copy(), fingerprint)


class SequenceColumnsCutter(SequenceCutter):
    """Gathers sequences out of batches that have, of each input, a list with an array [tokens, ...] for each sequence.

    For data sets whose arrays stay as they are: they are not looked at again.
    """

    def read(self, value: Any) -> Reading:
        """Look at a batch."""
        batch = f"batch {self.seen}"
        columns = {name: self._get(name, getter, value, batch) for name, getter in self.getters.items()}
        ids = self._get_ids(self.ids, value, batch) if self.ids is not None else None
        texts = []
        for row, found in enumerate(zip(*columns.values(), strict=True)):
            sample_id = ids[row] if ids is not None else None
            what = f"sample {sample_id!r}" if ids is not None else f"{batch}, sequence {row}"
            arrays = {name: as_array(part, what) for name, part in zip(columns, found, strict=True)}
            texts.append(SequenceReading(what, arrays, _sequence_rows(arrays, what), sample_id))
        return _reading(value, texts)

    def cut(self, reading: Reading) -> tuple[Item, list[Chunk]]:
        """Take in a batch, each sequence of it a part of the item."""
        batches = self.seen + 1
        cut = super().cut(reading)
        self.seen = batches
        return cut


def _reading(value: Any, texts: Sequence[SequenceReading]) -> Reading:
    return Reading(value, {None: max((text.rows for text in texts), default=0)}, texts)


def _check_padded(arrays: Mapping[str, Array], mask: Array, what: str) -> None:
    for name, array in arrays.items():
        if array.shape[:2] != mask.shape:
            raise SourceError(
                f"{what}: input {name!r} has shape {list(array.shape)}, its mask {list(mask.shape)}: a batch of padded "
                "sequences has inputs [sequences, length, ...]"
            )


def _sequence_rows(arrays: Mapping[str, Array], what: str) -> int:
    scalar = next((name for name, array in arrays.items() if not array.ndim), None)
    if scalar is not None:
        raise SourceError(f"{what}: input {scalar!r} is one value, where a sequence has an array [tokens, ...]")
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise SourceError(f"{what}: the inputs of a sequence have different numbers of tokens: {counts}")
    rows = next(iter(counts.values()))
    if not rows:
        raise SourceError(f"{what} is a sequence without tokens: leave it out in your source")
    return rows
