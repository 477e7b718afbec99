"""Cutting a user's data into requests loses nothing, names what cannot be sent, and knows what it weighs."""

from __future__ import annotations

import array
import enum
import itertools
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.loader import input_getters
from edl.distill.pipeline.chunk_labeller import sequence_fields
from edl.distill.source.chunk import Chunk, Item
from edl.distill.source.cutters import (
    BatchCutter,
    Cutter,
    PaddedBatchCutter,
    Router,
    SampleCutter,
    SampleListCutter,
    SequenceCutter,
)
from edl.distill.transport.schema import ModelSpec, TensorMetadata
from edl.errors import SourceError

X: dict[str, Callable[[Any], Any]] = {"x": itemgetter(0)}


def cut(cutter: Cutter, values: list[Any]) -> tuple[list[Item], list[Chunk]]:
    items, chunks = [], []
    for value in values:
        item, ready = cutter.put(value)
        items.append(item)
        chunks += ready
    return items, chunks + cutter.finish()


@pytest.mark.parametrize(
    ("cutter", "max_rows", "sizes"),
    [
        (BatchCutter(X, None, 1), 0, [256, 256, 88]),
        (BatchCutter(X, None, 1), 1024, [256, 256, 88]),
        (BatchCutter(X, None, 1), 250, [250, 250, 100]),
        (BatchCutter(X, 600, 1), 250, [600]),
        (SampleCutter(X, None, 1), 0, [32] * 18 + [24]),
        (SampleCutter(X, None, 1), 250, [32] * 18 + [24]),
        (SampleCutter(X, None, 1), 15, [15] * 40),
    ],
)
def test_requests_fit_teachers_by_default(cutter: Cutter, max_rows: int, sizes: list[int]) -> None:
    cutter.routes[None].max_rows = max_rows
    whole = isinstance(cutter, BatchCutter)
    _, chunks = cut(cutter, [(np.arange(600),)] if whole else [(number,) for number in range(600)])
    assert [chunk.rows for chunk in chunks] == sizes


@pytest.mark.parametrize(
    ("cutter", "value", "words"),
    [
        (BatchCutter(X, 2, 1), (np.zeros((0, 2)),), "batch 0 is a batch without rows"),
        (BatchCutter(X, 2, 1), (np.float32(1),), "single number"),
        (BatchCutter(X, 2, 1), (), "no field for input 'x'"),
        (BatchCutter({**X, "y": itemgetter(1)}, 2, 1), (np.zeros(2), np.zeros(3)), "different numbers of rows"),
        (
            BatchCutter(input_getters(["x", None, None]), 2, 1),
            (np.zeros(2), 0),
            "has only 2 of the 3 named fields",
        ),
        (BatchCutter(X, 2, 1), ([object()],), "Python objects"),
        (BatchCutter(X, 2, 1), (np.array(["a"] * 70 + [None], object),), r"input 'x'.*element 70 is NoneType"),
        (BatchCutter(X, 2, 1), (np.array([1 + 2j]),), "complex128"),
        (BatchCutter(X, 2, 1), ([[1, 2], [3]],), "cannot be converted to an array"),
        (BatchCutter(X, 2, 1), ([[1, 2], [3, True]],), "input 'x': a mix of booleans and numbers"),
        (BatchCutter(X, 2, 1, ids=itemgetter(7)), (np.zeros(2),), "batch 0 of the source has no field for the id"),
        (BatchCutter(X, 2, 1, ids=itemgetter(1)), (np.zeros(2), [1]), "1 sample ids for 2 rows"),
    ],
)
def test_what_cannot_be_sent_is_named(cutter: Cutter, value: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        cutter.put(value)


MIB = 1 << 20
REST: dict[str, Any] = {
    "ndarray": np.ones(MIB, np.uint8),
    "bytes": bytes(MIB),
    "array.array": array.array("B", bytes(MIB)),
    "a dictionary": {"a": {"b": np.ones(MIB, np.uint8)}},
    "a list of bytes": [bytes(MIB // 2), bytes(MIB // 2 + 1)],
    "deque": deque([np.ones(MIB, np.uint8)]),
    "object": SimpleNamespace(a=np.ones(MIB, np.uint8)),
    "object array": np.array([np.ones(MIB, np.uint8), None], object),
}


@pytest.mark.parametrize("kind", REST)
def test_what_is_passed_through_counts(kind: str) -> None:
    x = np.ones((3, 5), np.float32)
    (chunk,) = BatchCutter(X, None, 1).put((x, REST[kind]))[1]
    assert MIB <= chunk.weight - x.nbytes <= 1.01 * MIB, "the rest of a batch, once"
    cutter = SampleCutter(X, 4, 1)
    (chunk,) = [chunk for _ in range(4) for chunk in cutter.put((x, REST[kind]))[1]]
    assert 4 * MIB <= chunk.weight - 4 * x.nbytes <= 4.04 * MIB, "the rest of each sample"
    (chunk,) = SampleListCutter(X, 2, 1).put([(x, REST[kind])] * 2)[1]
    assert 2 * MIB <= chunk.weight - 2 * x.nbytes <= 2.02 * MIB, "the rest of each sample of a list"


@pytest.mark.parametrize("x", [np.ones((4, MIB), np.uint8), [[1.5] * 9] * 4, ["a" * MIB, "b" * MIB]])
@pytest.mark.parametrize("cutter", [BatchCutter, SampleCutter])
def test_inputs_count_once(x: Any, cutter: type[Cutter]) -> None:
    (chunk,) = cutter(X, 1 if cutter is SampleCutter else None, 1).put((x, 7))[1]
    assert chunk.weight == chunk.nbytes


# Sequences of any length fill requests, whole and in order.

IDS = {"ids": itemgetter(0)}
LENGTHS = st.lists(st.integers(1, 40), max_size=25)


def sequences(lengths: list[int]) -> list[tuple[np.ndarray, int]]:
    return [(np.arange(length) + 1000 * number, number) for number, length in enumerate(lengths)]


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 50), st.integers(0, 60))
def test_sequences_fill_requests_whole(lengths: list[int], tokens: int, max_rows: int) -> None:
    cutter = SequenceCutter(IDS, tokens, 1)
    cutter.routes[None].max_rows = max_rows
    samples = sequences(lengths)
    items, chunks = cut(cutter, samples)
    budget = min(tokens, max_rows or tokens)
    for item, (ids, _) in zip(items, samples, strict=True):
        ((chunk, start, stop),) = item.parts
        assert chunk.fields["ids"][start:stop].tolist() == ids.tolist(), "another sequence's rows, or not all"
        assert chunk.positions[start:stop].tolist() == list(range(len(ids)))
        assert chunk.longest_sequence >= len(ids)
    assert sum(chunk.rows for chunk in chunks) == sum(lengths), "rows that belong to no sequence"
    for chunk in chunks:
        assert chunk.rows <= budget or (chunk.positions == 0).sum() == 1, "only a sequence alone may be larger"
        assert chunk.rows == chunk.left == len(chunk.positions)
    for first, second in itertools.pairwise(chunks):
        begins = np.flatnonzero(second.positions == 0)
        head = begins[1] if len(begins) > 1 else second.rows
        assert first.rows + head > budget, "a request was sent with room for the next sequence"


def test_bytes_bound_a_request_too() -> None:
    cutter = SequenceCutter({"x": itemgetter(0)}, None, 1)
    cutter.routes[None].fit = lambda fields: 400 // (fields["x"].itemsize * fields["x"].shape[1])  # type: ignore[method-assign]
    _, chunks = cut(cutter, [(np.zeros((7, 10), np.float32),), (np.zeros((3, 10), np.float32),)] * 2)
    assert [chunk.rows for chunk in chunks] == [10, 10]
    with pytest.raises(SourceError, match=r"sample 4 is a sequence of 11 tokens.*at most 10 tokens.*cut it"):
        cutter.put((np.zeros((11, 10), np.float32),))


@pytest.mark.parametrize(
    ("before", "sample", "words"),
    [
        ([], (np.int32(3), []), "sample 0: input 'ids' is a single number"),
        ([], (np.zeros(0, np.int32), []), "sample 0 is a sequence without tokens"),
        ([], (["a", 3], []), "sample 0, input 'ids'"),
        ([20], (np.arange(21), np.zeros(21)), r"sample 1 is a sequence of 21 tokens, .* at most 20: cut it"),
        ([], (np.arange(3), np.zeros(4)), r"different numbers of tokens: \{'ids': 3, 'targets': 4\}"),
        ([3], (np.arange(3), np.zeros((3, 5))), r"input 'targets' has shape \[5\], but earlier samples have \[\]"),
    ],
)
def test_odd_sequences_are_refused(before: list[int], sample: Any, words: str) -> None:
    cutter = SequenceCutter({**IDS, "targets": itemgetter(1)}, 8, 1)
    cutter.routes[None].max_sequence = 20
    for length in before:
        cutter.put((np.arange(length), np.zeros(length)))
    with pytest.raises(SourceError, match=words):
        cutter.put(sample)


def test_own_positions_begin_at_0() -> None:
    """Positions that count the padding on the left, say: a teacher might take two sequences for one."""
    cutter = SequenceCutter({"ids": itemgetter(0), "position": itemgetter(1)}, 100, 1)
    _, (chunk,) = cut(cutter, [(np.arange(2), np.array([0, 1])), (np.arange(2), np.array([2, 3]))])
    inputs = {name: TensorMetadata(name, "INT32", ()) for name in ("ids", "position")}
    with pytest.raises(SourceError, match="input 'position' is 2 where a sequence begins: it must be 0"):
        sequence_fields(ModelSpec("m", "1", inputs, {}, sequences="position"), chunk)


@pytest.mark.parametrize("mask", [[1, 1, 2, 2], [0.0, -1e9, -1e9, 0.0], [1, 1, np.nan, 0], [1, -1, 1, 0]])
def test_a_mask_says_yes_or_no(mask: list[float]) -> None:
    """Numbers of packed texts, or terms of attention's scores, would make other texts of the rows, in silence."""
    cutter = PaddedBatchCutter(IDS, itemgetter(1), 100, 1)
    with pytest.raises(SourceError, match=r"batch 0: its mask contains .* must be 1 for tokens .*several texts"):
        cutter.put((np.arange(4)[None], np.array([mask])))


@pytest.mark.parametrize(
    ("asked", "max_rows", "most"),
    [(None, 1024, 256), (None, 0, 2048), (None, 1 << 20, 2048), (900, 1024, 900), (None, 3, 1)],
)
def test_requests_leave_room_for_others(asked: int | None, max_rows: int, most: int) -> None:
    """A teacher that lets 1,024 rows wait would refuse the second request of 1,024."""
    cutter = SequenceCutter(IDS, asked, 1)
    cutter.routes[None].max_rows = max_rows
    _, chunks = cut(cutter, sequences([1] * 5000))
    assert max(chunk.rows for chunk in chunks) == most


# A row goes to the service of its value, and what is no value goes nowhere.


class Domain(enum.Enum):
    """A type of the user's own."""

    CODE = 1
    LAW = 2


def router(*values: Any) -> Router:
    return Router(lambda batch: batch, {value: at for at, value in enumerate(values)})


@pytest.mark.parametrize(
    "found",
    [map(str, ["code", "law"]), {"code": 1}.values(), deque(["code", "law"]), {"code"}, frozenset({"code"}), object()],
)
def test_containers_are_no_single_value(found: Any) -> None:
    """They would send all rows to the teachers of all other values."""
    with pytest.raises(SourceError, match="expected a list, an array or a tensor"):
        router("code", None).of_batch(found, 2, "batch 3")


@pytest.mark.parametrize("value", [float("nan"), np.float32("nan"), ["code"], object(), map(str, ["code"])])
def test_what_is_no_value_has_no_route(value: Any) -> None:
    with pytest.raises(SourceError, match="sample 3 has route"):
        router("code", None).of_sample(value, "sample 3")
    with pytest.raises(SourceError, match="batch 3, row 1 has route"):
        router("code", None).of_batch(["code", value], 2, "batch 3")


def test_values_of_the_keys_types_are_values() -> None:
    """Bytes are the string that they hold."""
    column = np.array(["code", "law", "code"], dtype="S4")
    assert router("code", None).of_batch(column, 3, "batch 0") == [0, 1, 0]
    assert router("code", None).of_batch(b"code", 2, "batch 0") == [0, 0]
    assert router(b"code", "code").of_sample(np.bytes_("code"), "sample 0") == 0
    assert router(Domain.CODE, None).of_batch([Domain.CODE, Domain.LAW], 2, "batch 0") == [0, 1]
    assert router("code", None).of_batch([None, 3, True, 0.5], 4, "batch 0") == [1] * 4
