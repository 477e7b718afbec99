"""Readers over sources that wait for the training loop, with real teachers, ensembles and caches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.distill import DistillReader, Teachers
from edl.distill.cache import SoftLabelCache
from tests.fast.distill.conftest import Start
from tests.fast.distill.reading import sample

COUNT, GROUP = 60, 20


class Turns:
    """A source that yields `GROUP` samples, and the next ones when the training loop has got these."""

    def __init__(self, *, lists: bool) -> None:
        self._lists = lists
        self._got = 0
        self._changed = threading.Condition()

    def source(self) -> Iterator[Any]:
        self._got = 0
        for first in range(0, COUNT, GROUP):
            with self._changed:
                assert self._changed.wait_for(lambda first=first: self._got >= first, 20), (  # type: ignore[misc]
                    f"{self._got} of {first} samples were delivered"
                )
            group = [sample(number) for number in range(first, first + GROUP)]
            if self._lists:
                yield group
            else:
                yield from group

    def run(self, reader: DistillReader) -> list[Any]:
        delivered: list[Any] = []
        for item in reader():
            delivered += item if self._lists else [item]
            with self._changed:
                self._got = len(delivered)
                self._changed.notify_all()
        return delivered


def check(delivered: list[Any]) -> None:
    assert [number for _, number, *_ in delivered] == list(range(COUNT))
    for x, number, *labels in delivered:
        assert {float(value[0]) for value in (x, *labels)} == {float(number)}, "a label belongs to another input"


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("kind", ["one", "ensemble", "cache"])
def test_source_that_waits(start: Start, tmp_path: Path, kind: str, lists: bool) -> None:
    endpoint = start("echo").endpoint
    services = [Teachers(endpoints=(endpoint,))] * (2 if kind == "ensemble" else 1)
    turns = Turns(lists=lists)
    options: dict[str, Any] = {}
    with SoftLabelCache(path=tmp_path) as cache:
        if kind == "cache":
            options = {"cache": cache, "id_field": 1, "dataset": "numbers"}
        with DistillReader(["x", None], ["y"], teachers=services, **options) as reader:
            set_source: Callable[..., Any] = reader.set_sample_list_generator if lists else reader.set_sample_generator
            set_source(turns.source)
            check(turns.run(reader))
            check(turns.run(reader))
            if kind == "cache":
                assert reader.stats().rows_cached == COUNT
