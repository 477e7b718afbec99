"""What a wait of the training loop was for, and that none counts twice."""

from __future__ import annotations

import pytest

from edl.distill.pipeline import waiting as module
from edl.distill.pipeline.waiting import SourceClock, source_wait_s
from edl.distill.source.chunk import Chunk


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def chunk(source_s: float, *, sent: bool = True) -> Chunk:
    made = Chunk(1)
    made.source_s = source_s
    made.sent = sent
    return made


def test_clock_adds_up_what_the_source_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    time, clock = Clock(monkeypatch), SourceClock()
    assert clock.read() == 0.0
    clock.begin(time.now)
    time.now += 3
    assert clock.read() == 3.0, "while it makes a value"
    clock.end()
    time.now += 5
    clock.end()
    assert clock.read() == 3.0
    clock.begin(time.now)
    time.now += 1
    assert clock.read() == 4.0


@pytest.mark.parametrize(
    ("waited_s", "began_at", "chunks", "expected"),
    [
        (10.0, 4.0, [chunk(1.0)], 0.0),  # sent before the wait began: a wait for labels
        (10.0, 4.0, [chunk(9.0)], 5.0),  # sent when the source had taken five seconds more
        (10.0, 4.0, [chunk(2.0), chunk(7.0)], 3.0),
        (10.0, 4.0, [chunk(2.0), chunk(0.0, sent=False)], 2.0),  # the clock shows 6
        (10.0, 4.0, [], 2.0),
        (1.0, 4.0, [chunk(9.0)], 1.0),  # never more than was waited
    ],
)
def test_wait_for_source_ends_when_sent(waited_s: float, began_at: float, chunks: list[Chunk], expected: float) -> None:
    clock = SourceClock()
    clock._drawing = (6.0, None)
    assert source_wait_s(waited_s, began_at, clock, chunks) == expected
