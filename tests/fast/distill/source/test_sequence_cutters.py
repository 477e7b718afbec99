"""Sequences of any length fill requests, whole and in order."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.source.chunk import Chunk, Item
from edl.distill.source.cutters import Cutter
from edl.distill.source.sequence_cutters import (
    PaddedBatchCutter,
    SequenceCutter,
    sequence_fields,
)
from edl.distill.transport.schema import ModelSpec, TensorMetadata
from edl.errors import SourceError

IDS = {"ids": itemgetter(0)}
LENGTHS = st.lists(st.integers(1, 40), max_size=25)


def spec(*inputs: str, sequences: str = "") -> ModelSpec:
    return ModelSpec("m", "1", {name: TensorMetadata(name, "INT32", ()) for name in inputs}, {}, sequences=sequences)


def sequences(lengths: list[int]) -> list[tuple[np.ndarray, int]]:
    return [(np.arange(length) + 1000 * number, number) for number, length in enumerate(lengths)]


def cut(cutter: Cutter, values: list[Any]) -> tuple[list[Item], list[Chunk]]:
    items, chunks = [], []
    for value in values:
        item, ready = cutter.put(value)
        items.append(item)
        chunks += ready
    return items, chunks + cutter.finish()


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 50), st.integers(0, 60))
def test_sequences_fill_requests_whole(lengths: list[int], tokens: int, max_rows: int) -> None:
    cutter = SequenceCutter(IDS, tokens, 1)
    cutter.max_rows = max_rows
    samples = sequences(lengths)
    items, chunks = cut(cutter, samples)
    budget = min(tokens, max_rows or tokens)
    for item, (ids, _) in zip(items, samples, strict=True):
        ((chunk, start, stop),) = item.parts
        assert chunk.fields["ids"][start:stop].tolist() == ids.tolist(), "another sequence's rows, or not all"
        assert chunk.positions is not None
        assert chunk.positions[start:stop].tolist() == list(range(len(ids)))
        assert chunk.longest_sequence >= len(ids)
    assert sum(chunk.rows for chunk in chunks) == sum(lengths), "rows that belong to no sequence"
    for chunk in chunks:
        assert chunk.positions is not None
        assert chunk.rows <= budget or (chunk.positions == 0).sum() == 1, "only a sequence alone may be larger"
        assert chunk.rows == chunk.left == len(chunk.positions)
    for first, second in itertools.pairwise(chunks):
        assert second.positions is not None
        begins = np.flatnonzero(second.positions == 0)
        head = begins[1] if len(begins) > 1 else second.rows
        assert first.rows + head > budget, "a request was sent with room for the next sequence"


def test_bytes_bound_a_request_too() -> None:
    cutter = SequenceCutter({"x": itemgetter(0)}, None, 1)
    cutter.fit = lambda fields: 400 // (fields["x"].itemsize * fields["x"].shape[1])  # type: ignore[method-assign]
    _, chunks = cut(cutter, [(np.zeros((7, 10), np.float32),), (np.zeros((3, 10), np.float32),)] * 2)
    assert [chunk.rows for chunk in chunks] == [10, 10]
    with pytest.raises(SourceError, match=r"sample 4 is a sequence of 11 tokens.*at most 10 tokens.*cut it"):
        cutter.put((np.zeros((11, 10), np.float32),))


def test_too_long_a_sequence_is_named() -> None:
    cutter = SequenceCutter(IDS, 8, 1)
    cutter.max_sequence = 20
    cutter.put((np.arange(20),))
    with pytest.raises(SourceError, match=r"sample 1 is a sequence of 21 tokens, .* at most 20: cut it"):
        cutter.put((np.arange(21),))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ((np.int32(3),), "sample 0: input 'ids' is one value"),
        ((np.zeros(0, np.int32),), "sample 0 is a sequence without tokens"),
        ((["a", 3],), "sample 0, input 'ids'"),
    ],
)
def test_odd_sequences_are_refused(sample: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        SequenceCutter(IDS, 8, 1).put(sample)


def test_fields_must_be_equally_long() -> None:
    cutter = SequenceCutter({"ids": itemgetter(0), "targets": itemgetter(1)}, 8, 1)
    with pytest.raises(SourceError, match=r"different numbers of tokens: \{'ids': 3, 'targets': 4\}"):
        cutter.put((np.arange(3), np.zeros((4, 2))))
    cutter.put((np.arange(3), np.zeros((3, 2))))
    with pytest.raises(SourceError, match=r"input 'targets' has shape \[5\], samples before it \[2\]"):
        cutter.put((np.arange(3), np.zeros((3, 5))))


def test_own_positions_begin_at_0() -> None:
    """Positions that count the padding on the left, say: a teacher might take two sequences for one."""
    cutter = SequenceCutter({"ids": itemgetter(0), "position": itemgetter(1)}, 100, 1)
    _, (chunk,) = cut(cutter, [(np.arange(2), np.array([0, 1])), (np.arange(2), np.array([2, 3]))])
    with pytest.raises(SourceError, match="input 'position' is 2 where a sequence begins, and must be 0"):
        sequence_fields(spec("ids", "position", sequences="position"), chunk)


@pytest.mark.parametrize("mask", [[1, 1, 2, 2], [0.0, -1e9, -1e9, 0.0], [1, 1, np.nan, 0], [1, -1, 1, 0]])
def test_a_mask_says_yes_or_no(mask: list[float]) -> None:
    """Numbers of packed texts, or terms of attention's scores, would make other texts of the rows, in silence."""
    cutter = PaddedBatchCutter(IDS, itemgetter(1), 100, 1)
    with pytest.raises(SourceError, match=r"batch 0: its mask has .* must be 1 where a token is .*several texts"):
        cutter.put((np.arange(4)[None], np.array([mask])))


@pytest.mark.parametrize(
    ("asked", "max_rows", "most"),
    [(None, 1024, 256), (None, 0, 2048), (None, 1 << 20, 2048), (900, 1024, 900), (None, 3, 1)],
)
def test_requests_leave_room_for_others(asked: int | None, max_rows: int, most: int) -> None:
    """A teacher that lets 1,024 rows wait would refuse the second request of 1,024."""
    cutter = SequenceCutter(IDS, asked, 1)
    cutter.max_rows = max_rows
    _, chunks = cut(cutter, sequences([1] * 5000))
    assert max(chunk.rows for chunk in chunks) == most
