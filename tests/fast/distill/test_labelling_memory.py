"""What was labelled is let go of, but for the ids that its labels are found by."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from edl.distill.datasets.kinds import Batch, KnownFilter, LabelDataset
from edl.distill.labelling import data_set
from edl.distill.source.chunk import Item


class WatchedData(LabelDataset):
    """Yields batches of a row, and notes how many of their arrays were held at a time."""

    inputs = ("x",)

    def __init__(self) -> None:
        self.most = 0

    def batches(self, rows: int, known: KnownFilter) -> Iterator[Batch]:
        """See `LabelDataset.batches`."""
        made: list[weakref.ref[Any]] = []
        for number in range(20):
            x = np.zeros((1, 4), np.float32)
            made.append(weakref.ref(x))
            self.most = max(self.most, sum(ref() is not None for ref in made))
            yield [number], {"x": x}
            del x


class PassingEpoch:
    """Delivers items as they come."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Item]:
        return (Item(batch, []) for batch in self._batches)

    def taken(self, item: Item) -> None: ...
    def close(self) -> None: ...


def test_inputs_are_let_go_before_a_settle() -> None:
    """They would be held beside `memory_bytes`, which does not see them."""
    found: list[int] = []

    def contains(ids: Any) -> Any:
        found.extend(ids)
        return np.ones(len(ids), bool)

    session: Any = SimpleNamespace(
        labeller=SimpleNamespace(services=1, prepare_epoch=lambda: None),
        start=lambda batches, cutter: PassingEpoch(batches),
        stats=lambda: SimpleNamespace(teachers_live=1),
    )
    data, plan, view = WatchedData(), SimpleNamespace(batch_rows=1), SimpleNamespace(contains=contains)
    run = data_set._Run(data, plan, session, view, lambda _: None)  # type: ignore[arg-type]
    assert run.one_pass(first=True) == 0
    assert found == list(range(20))
    assert data.most <= 3
