"""An epoch that is closed before each line of its own functions: by signal handlers, and by the garbage collector."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from edl.distill.pipeline.epoch import Epoch
from edl.distill.source.cutters import SampleCutter
from edl.errors import ClosedError
from tests.fast.distill.pipeline.test_epoch import Labels, batches
from tests.interrupting import InterruptAt, deadline

ROWS = 7


def epoch_of() -> Epoch:
    source = iter([(np.int64(number),) for number in range(ROWS)])
    return Epoch(Labels(), source, batches(SampleCutter, 2))


def take_all(epoch: Epoch) -> list[Any]:
    found = []
    try:
        for item in epoch:
            found += [row for c, a, b in item.parts for row in c.outputs[0]["y"][a:b].tolist()]  # type: ignore[index,union-attr]
            epoch.taken(item)
    except ClosedError:
        pass
    return found


@pytest.mark.parametrize("thread", ["MainThread", "edl-feed", "answer"])
def test_closed_before_any_line(thread: str) -> None:
    """Closed in the thread that is there, whatever it holds: the loop ends, and so does the feeding thread."""
    for number in itertools.count(1):
        made: list[Epoch] = []
        with deadline(10, f"closed before line {number} of {thread}"):
            with InterruptAt(number, lambda made=made: made and made[0].close(), "edl/distill/", thread) as interrupt:  # type: ignore[misc]
                made.append(epoch_of())
                found = take_all(made[0])
            made[0].close()
            assert made[0].join(10), "the feeding thread has not ended"
        assert found == list(range(len(found))), "an item was lost, repeated or overtaken"
        if not interrupt.reached:
            assert number > 20, "nothing was interrupted"
            break
