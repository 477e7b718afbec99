"""Cutting a user's data into requests loses nothing and names what cannot be sent."""

from __future__ import annotations

import array
from collections import UserDict, deque
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.source.chunk import Chunk, Item
from edl.distill.source.cutters import BatchCutter, Cutter, SampleCutter, SampleListCutter
from edl.errors import SourceError

X: dict[str, Callable[[Any], Any]] = {"x": itemgetter(0)}


def cut(cutter: Cutter, values: list[Any]) -> tuple[list[Item], list[Chunk]]:
    items, chunks = [], []
    for value in values:
        item, ready = cutter.put(value)
        items.append(item)
        chunks += ready
    return items, chunks + cutter.finish()


def rows_of(item: Item) -> list[Any]:
    return [chunk.fields["x"][row] for chunk, start, stop in item.parts for row in range(start, stop)]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 7))
def test_each_row_of_lists_is_in_one_chunk(sizes: list[int], chunk_rows: int) -> None:
    numbers = iter(range(1000))
    lists = [[(next(numbers), "label") for _ in range(size)] for size in sizes]
    items, chunks = cut(SampleListCutter(X, chunk_rows, 1), lists)
    assert [rows_of(item) for item in items] == [[sample[0] for sample in samples] for samples in lists]
    assert [int(row) for chunk in chunks for row in chunk.fields["x"]] == list(range(sum(sizes)))
    assert all(chunk.rows == chunk_rows for chunk in chunks[:-1])
    assert all(chunk.rows == chunk.left for chunk in chunks)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.one_of(st.none(), st.integers(1, 7)))
def test_batches_are_split_and_never_merged(sizes: list[int], chunk_rows: int | None) -> None:
    batches = [(np.arange(size) + 100 * at, None) for at, size in enumerate(sizes)]
    items, chunks = cut(BatchCutter(X, chunk_rows, 1), batches)
    assert [rows_of(item) for item in items] == [batch[0].tolist() for batch in batches]
    assert all(chunk.rows <= (chunk_rows or 20) for chunk in chunks)
    assert sum(chunk.rows for chunk in chunks) == sum(sizes)


@pytest.mark.parametrize(
    ("chunk_rows", "max_rows", "sizes"),
    [
        (None, 0, [256, 256, 88]),
        (None, 1024, [256, 256, 88]),
        (None, 250, [250, 250, 100]),
        (600, 0, [600]),
        (600, 250, [600]),
    ],
)
def test_requests_fit_teachers_by_default(chunk_rows: int | None, max_rows: int, sizes: list[int]) -> None:
    """Where the user does not say, requests are no larger than teachers take."""
    cutter = BatchCutter(X, chunk_rows, 1)
    cutter.max_rows = max_rows
    _, chunks = cut(cutter, [(np.arange(600),)])
    assert [chunk.rows for chunk in chunks] == sizes


@pytest.mark.parametrize(("max_rows", "sizes"), [(0, [32, 8]), (64, [32, 8]), (15, [15, 15, 10])])
def test_gathered_samples_fit_the_teachers(max_rows: int, sizes: list[int]) -> None:
    """Samples are gathered to no more than teachers take."""
    cutter = SampleCutter(X, None, 1)
    cutter.max_rows = max_rows
    _, chunks = cut(cutter, [(number,) for number in range(40)])
    assert [chunk.rows for chunk in chunks] == sizes


def test_samples_are_gathered_in_order() -> None:
    """Samples are gathered in order with the rest at the end."""
    items, chunks = cut(SampleCutter(X, 4, 1), [(np.full(3, i, np.float32), i) for i in range(10)])
    assert [chunk.rows for chunk in chunks] == [4, 4, 2]
    assert [rows_of(item)[0][0] for item in items] == list(range(10))
    assert chunks[0].fields["x"].dtype == np.float32


def test_ids_go_with_their_rows() -> None:
    cutter = BatchCutter(X, 2, 1, ids=itemgetter(1))
    _, chunks = cut(cutter, [(np.zeros((3, 1)), np.array([7, 8, 9]))])
    assert [chunk.ids for chunk in chunks] == [[7, 8], [9]]


@pytest.mark.parametrize(
    ("cutter", "value", "words"),
    [
        (BatchCutter(X, 2, 1), (np.zeros((0, 2)),), "batch 0 has no rows"),
        (BatchCutter(X, 2, 1), (np.float32(1),), "single number"),
        (BatchCutter(X, 2, 1), (), "no field for input 'x'"),
        (BatchCutter({**X, "y": itemgetter(1)}, 2, 1), (np.zeros(2), np.zeros(3)), "different numbers of rows"),
        (BatchCutter(X, 2, 1), ([object()],), "Python objects"),
        (BatchCutter(X, 2, 1), (np.array(["a"] * 70 + [None], object),), r"input 'x'.*element 70 is NoneType"),
        (BatchCutter(X, 2, 1), (np.array([1 + 2j]),), "complex128"),
        (BatchCutter(X, 2, 1), ([[1, 2], [3]],), "cannot be made an array"),
        (BatchCutter(X, 2, 1, ids=itemgetter(1)), (np.zeros(2), [1]), "1 sample ids for 2 rows"),
    ],
)
def test_what_cannot_be_sent_is_named(cutter: Cutter, value: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        cutter.put(value)


def test_misshapen_samples_are_named() -> None:
    """Samples of different shapes are named by their number."""
    cutter = SampleCutter(X, 3, 1)
    cut_two = [cutter.put((np.zeros(shape), 0)) for shape in (4, 4)]
    assert len(cut_two) == 2
    with pytest.raises(SourceError, match=r"sample 2: input 'x' has shape \[5\], samples before it \[4\]"):
        cutter.put((np.zeros(5), 0))


MIB = 1 << 20
REST: dict[str, Any] = {
    "ndarray": np.ones(MIB, np.uint8),
    "bytes": bytes(MIB),
    "str": "a" * MIB,
    "bytearray": bytearray(MIB),
    "array.array": array.array("B", bytes(MIB)),
    "a dictionary": {"a": {"b": np.ones(MIB, np.uint8)}},
    "a list of bytes": [bytes(MIB // 2), bytes(MIB // 2 + 1)],
    "deque": deque([np.ones(MIB, np.uint8)]),
    "UserDict": UserDict(a=np.ones(MIB, np.uint8)),
    "object": SimpleNamespace(a=np.ones(MIB, np.uint8)),
    "object array": np.array([np.ones(MIB, np.uint8), None], object),
}
GETTERS = {"x": itemgetter(0)}


@pytest.mark.parametrize("kind", REST)
def test_what_is_passed_through_counts(kind: str) -> None:
    x = np.ones((3, 5), np.float32)
    (chunk,) = BatchCutter(GETTERS, None, 1).put((x, REST[kind]))[1]
    assert MIB <= chunk.weight - x.nbytes <= 1.01 * MIB, "the rest of a batch, once"
    cutter = SampleCutter(GETTERS, 4, 1)
    (chunk,) = [chunk for _ in range(4) for chunk in cutter.put((x, REST[kind]))[1]]
    assert 4 * MIB <= chunk.weight - 4 * x.nbytes <= 4.04 * MIB, "the rest of each sample"
    (chunk,) = SampleListCutter(GETTERS, 2, 1).put([(x, REST[kind])] * 2)[1]
    assert 2 * MIB <= chunk.weight - 2 * x.nbytes <= 2.02 * MIB, "the rest of each sample of a list"


@pytest.mark.parametrize("x", [np.ones((4, MIB), np.uint8), [[1.5] * 9] * 4, ["a" * MIB, "b" * MIB]])
@pytest.mark.parametrize("cutter", [BatchCutter, SampleCutter])
def test_inputs_count_once(x: Any, cutter: type[Cutter]) -> None:
    (chunk,) = cutter(GETTERS, 1 if cutter is SampleCutter else None, 1).put((x, 7))[1]
    assert chunk.weight == chunk.nbytes


def test_tensors_and_pictures_count() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for rest in (torch.ones(MIB, dtype=torch.uint8), image.new("RGB", (1024, 1024))):
        (chunk,) = BatchCutter(GETTERS, None, 1).put((np.ones((3, 5)), rest))[1]
        assert MIB <= chunk.rest_nbytes <= 3 * MIB
