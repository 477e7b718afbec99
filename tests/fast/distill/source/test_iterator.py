"""A `StopIteration` on the way through the user's data is an error, and never the end of an epoch."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from edl.distill.source.cutters import BatchCutter, SampleCutter, SampleListCutter
from edl.distill.source.iterator import SourceIterator
from edl.errors import SourceError


def stop(*_: Any) -> Any:
    return next(iter(()))


class Squares:
    """A map-style data set whose sample 7 asks an iterator that has no more to give."""

    def __init__(self, error: Callable[..., Any] = stop) -> None:
        self.error = error

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> Any:
        return np.full(3, at if at != 7 else self.error(at), np.float32)


def test_an_error_in_getitem_is_no_end() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(SourceIterator(Squares()))  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"has 10 items, but raised IndexError at 7: list index"):
        list(SourceIterator(Squares(lambda at: [][at])))  # type: ignore[arg-type]


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stop_in_a_torch_dataset(workers: int, chained: bool) -> None:
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(Squares(), batch_size=2, num_workers=workers)
    with pytest.raises(SourceError, match=r"after 3 batches .* raised StopIteration"):
        list(SourceIterator(itertools.chain(loader, [1]) if chained else loader))
    for rows in (2, None):
        with pytest.raises(SourceError, match="collate function raised StopIteration"):
            list(SourceIterator(data.DataLoader(range(4), batch_size=rows, collate_fn=stop)))


@pytest.mark.parametrize("rows", [2, None])
def test_iterable_torch_datasets_end(rows: int | None) -> None:
    data = pytest.importorskip("torch.utils.data")

    class Stream(data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Any:
            return iter(range(4))

        def __len__(self) -> int:
            return 100  # a guess

    assert len(list(SourceIterator(data.DataLoader(Stream(), batch_size=rows)))) == (2 if rows else 4)
    Stream.__iter__ = lambda _: map(lambda at: at if at != 3 else stop(), range(9))  # noqa: C417
    with pytest.raises(SourceError, match="a function that it applies"):
        list(SourceIterator(data.DataLoader(Stream(), batch_size=rows)))


class Mapped(map):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "source",
    [
        lambda: map(stop, [1]),
        lambda: Mapped(stop, [1]),
        lambda: itertools.chain([0], iter(lambda: stop(), None)),
        lambda: filter(stop, [1]),
        lambda: itertools.starmap(stop, [(1,)]),
        lambda: zip([1], map(stop, [1]), strict=False),
        lambda: enumerate(map(stop, [1])),
        lambda: itertools.chain([0], map(stop, [1]), [2]),
        lambda: itertools.chain.from_iterable(map(stop, [1])),
    ],
)
def test_a_stop_in_an_applied_function(source: Callable[[], Any]) -> None:
    with pytest.raises((SourceError, RuntimeError), match=r"raised StopIteration"):
        list(SourceIterator(source()))
    assert list(SourceIterator(iter(iter([1, 2, 0, 3]).__next__, 0))) == [1, 2]
    rows = csv.DictReader(["a", "1"])  # an iterator with a `__next__` of Python's, whose end is an end
    assert list(SourceIterator(map(str, rows))) == ["{'a': '1'}"]
    begun = itertools.chain([1, 2], iter([3]), [])
    assert next(begun) == 1
    assert list(SourceIterator(begun)) == [2, 3]
    assert list(SourceIterator(begun)) == []


@pytest.mark.parametrize("cutter", [BatchCutter, SampleCutter, SampleListCutter])
def test_a_stop_in_a_getter_is_an_error(cutter: Any) -> None:
    value = [np.zeros(3)] if cutter is not SampleListCutter else [[np.zeros(3)]]
    with pytest.raises(SourceError, match=r"the function that finds input 'x' in .* raised StopIteration"):
        cutter({"x": stop}, 2, 1).put(value)
    with pytest.raises(SourceError, match=r"the function that finds the sample ids in .* raised StopIteration"):
        cutter({"x": itemgetter(0)}, 2, 1, ids=stop).put(value)
