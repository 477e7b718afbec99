"""History is bounded and keeps its amounts; a job's past comes from its ledger."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.goodput.node import NodeRecord
from edl.collective.goodput.records import JobRecord
from edl.collective.goodput.spans import TimeCategory, span_of
from edl.collective.goodput.summary import summarize
from edl.dashboard.state.history import History, points_of_ledger
from edl.dashboard.state.schema import JobPoint, as_json


@dataclass(frozen=True)
class Point:
    t: float


@given(st.integers(4, 50), st.lists(st.floats(0, 1e6), max_size=300))
def test_any_points_stay_in_order(limit: int, times: list[float]) -> None:
    history: History[Point] = History(limit)
    history.extend(map(Point, times))
    kept = [point.t for point in history.points]
    assert kept == sorted(set(kept))
    assert len(kept) <= limit
    if times:
        assert kept[-1] == max(kept)
        assert kept[0] == times[0], "the beginning is kept"


def test_long_history_thins_its_past() -> None:
    history: History[Point] = History(100)
    history.extend(Point(float(t)) for t in range(100_000))
    kept = [point.t for point in history.points]
    assert len(kept) <= 100
    assert (kept[0], kept[-1]) == (0.0, 99_999.0)
    assert kept[-1] - kept[-10] < 20, "what is new is fine"


def test_points_of_a_ledger_sum_to_it() -> None:
    spans = [span_of(TimeCategory(number % 3), 1_000_000 + number, 2, running=True) for number in range(500)]
    summary = summarize(JobRecord("j", None, (NodeRecord("a", 5_000_000, 2, tuple(spans), step=3),), ()), 0)
    points = points_of_ledger(summary, 0.0, 1e12, 7)
    assert len(points) <= 300
    total = {state.name.lower(): amount / 1e6 for state, amount in summary.ledger.amounts.items()}
    assert points[-1].seconds == total
    assert points[-1].t == pytest.approx(5.0 + sum(total.values()))
    assert points[-1].goodput == pytest.approx(summary.ledger.goodput)
    later = points_of_ledger(summary, points[-2].t, 1e12, 7)
    assert [point.t for point in later][-1] == points[-1].t
    assert all(point.t > points[-2].t for point in later)
    assert points_of_ledger(summary, 0.0, 5.5, 7) == [], "a clock that goes before this machine's"


def test_json_has_no_nan_and_no_looks() -> None:
    point = JobPoint(1.0, {"train": float("inf")}, float("nan"), look=3)
    assert as_json(point) == {"t": 1.0, "seconds": {"train": None}, "goodput": None}
    assert as_json([point], 3) == []
    assert as_json([point], 2) == [as_json(point)]
