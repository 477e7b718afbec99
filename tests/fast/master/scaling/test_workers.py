"""Throughput by the number of workers, and how many a job should have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.master.scaling.workers import (
    ThroughputHistory,
    ThroughputModel,
    WorkerObservation,
    compute_realloc_factor,
    decide_workers,
    fit_throughput,
)

LONG = 1e9  # samples left: more than any horizon


def measured(model: ThroughputModel, *sizes: int, samples: int = 3) -> ThroughputHistory:
    history, now = ThroughputHistory(), 0.0
    for size in sizes:
        for _ in range(samples):
            now += 60.0
            history = history.record_rate(size, model.predict_rate(size), now)
    return history


def job(history: ThroughputHistory, workers: int, **others: object) -> WorkerObservation:
    now_s = max((record.at_s for record in history.sizes.values()), default=0.0)
    standard = WorkerObservation(workers, 1, 64, history, now_s, LONG, pause_s=30.0, age_s=3600.0)
    return replace(standard, **others)  # type: ignore[arg-type]


shapes = st.tuples(st.floats(0.01, 10), st.floats(0, 10)).map(lambda pair: ThroughputModel(*pair))


@settings(max_examples=40)
@given(shapes, st.lists(st.integers(1, 200), min_size=2, max_size=6, unique=True))
def test_fit_finds_the_model(model: ThroughputModel, sizes: list[int]) -> None:
    history = measured(model, *sizes, samples=1)
    found = fit_throughput(history, 1000.0)
    for size in (1, *sizes, 300):
        assert math.isclose(found.predict_rate(size), model.predict_rate(size), rel_tol=1e-6)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 1e-320])
def test_useless_rates_are_ignored(rate: float) -> None:
    history = ThroughputHistory().record_rate(4, rate, 0.0)
    assert not history.sizes
    assert fit_throughput(history, 0.0) is None


def test_old_rates_are_forgotten() -> None:
    """After a change of the data, the new rates win; a size that was left long ago is unknown again."""
    slow, fast = ThroughputModel(1.0, 0.1), ThroughputModel(0.5, 0.05)
    history = measured(slow, 2, 4)
    now = 360.0 + 3 * 3600.0
    for size in (2, 4):
        for _ in range(10):
            history = history.record_rate(size, fast.predict_rate(size), now)
    found = fit_throughput(history, now)
    assert found.predict_rate(4) == pytest.approx(fast.predict_rate(4), rel=0.05)
    assert history.list_known_sizes(now) == [2, 4]
    assert history.list_known_sizes(now + 30 * 3600.0) == []
    assert history.record_rate(3, 1.0, now + 30 * 3600.0).sizes.keys() == {3}


def test_one_size_is_explored_by_a_step() -> None:
    decision = decide_workers(job(measured(ThroughputModel(1.0, 0.1), 4), 4))
    assert decision.count == 8
    assert decide_workers(job(measured(ThroughputModel(1.0, 0.1), 1), 1)).count == 2
    assert decision.model.a == pytest.approx(1.4)
    assert decision.model.b == 0
    assert "4 -> 8" in decision.reason


def test_nothing_moves_unmeasured() -> None:
    model = ThroughputModel(1.0, 0.1)
    assert decide_workers(job(ThroughputHistory(), 4)).count == 4
    assert decide_workers(job(measured(model, 4, samples=2), 4)).count == 4
    assert decide_workers(job(measured(model, 4, 5, 3), 4)).count == 4, "back at 4, not measured again yet"
    assert decide_workers(job(measured(model, 4), 4, now_s=1e6)).count == 4, "forgotten"


def test_limits_come_first() -> None:
    history = measured(ThroughputModel(1.0, 0.1), 4)
    assert decide_workers(job(history, 4, min_workers=6)).count == 6
    assert decide_workers(job(history, 4, max_workers=2)).count == 2
    assert decide_workers(job(history, 4, max_workers=4)).count == 4


def test_nothing_grows_near_its_end() -> None:
    model = ThroughputModel(1.0, 0.1)
    history = measured(model, 4, 3, 4)
    ratio = model.predict_rate(5) / model.predict_rate(4) * compute_realloc_factor(3600.0, 0, 30.0)
    just = 30.0 / (ratio - 1) * model.predict_rate(5)
    assert decide_workers(job(history, 4, max_workers=5, remaining=just * 1.001)).count == 5
    assert decide_workers(job(history, 4, max_workers=5, remaining=just * 0.999)).count == 4
    assert decide_workers(job(history, 4, remaining=0.0)).count == 4


@settings(max_examples=40)
@given(shapes, st.integers(1, 30), st.floats(0, 1e6), st.floats(0.1, 1e3), st.floats(0, 1e6), st.integers(0, 50))
def test_a_move_saves_its_pause(
    model: ThroughputModel, workers: int, remaining: float, pause_s: float, age_s: float, moves: int
) -> None:
    """Whatever grows is done sooner, pause and all, by the model it was decided with."""
    history = measured(model, workers + 3, workers)
    seen = job(history, workers, remaining=remaining, pause_s=pause_s, age_s=age_s, moves=moves)
    decision = decide_workers(seen)
    assert decision.model is not None
    assert decision.count <= 2 * (workers + 3)
    assert decide_workers(replace(seen, remaining=0.0)).count <= workers
    assert decide_workers(replace(seen, moves=10**8)).count <= workers, "moved too often"
    if decision.count <= workers:
        return
    stay_s = remaining / decision.model.predict_rate(workers)
    assert remaining / decision.model.predict_rate(decision.count) + pause_s < stay_s * (1 + 1e-9)
