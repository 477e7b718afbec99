"""Cutting a user's data into requests loses nothing and names what cannot be sent."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
    "array.array": array.array("B", bytes(MIB)),
    "a dictionary": {"a": {"b": np.ones(MIB, np.uint8)}},
    "a list of bytes": [bytes(MIB // 2), bytes(MIB // 2 + 1)],
    "deque": deque([np.ones(MIB, np.uint8)]),
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
