"""How many workers a job should have, from the ledger that its agents write."""

from __future__ import annotations

import json
from typing import Any

from edl.cli.master import WorkerAdviser
from edl.collective.goodput import NodeRecord, ProgressMark, TimeCategory, span_of
from edl.collective.job_records import JobState, Member, World
from edl.discovery import Store
from edl.master.naming import report_key
from edl.master.scaling.workers import WorkLeft

SECOND = 1_000_000
NOW_S = 1.8e9


def run(
    store: Store, workers: int, samples_per_s: float, generation: int = 0, state: JobState = JobState.RUNNING
) -> None:
    """The record of a job of a node that has trained for an hour, after 20 s of pauses a generation."""
    pauses = span_of(TimeCategory.LOAD, (generation + 1) * 20 * SECOND, workers, running=True)
    spans = (pauses, span_of(TimeCategory.TRAIN, 3600 * SECOND, workers, running=True))
    began_us = round(NOW_S * 1e6) - sum(span.length_us for span in spans)
    record = NodeRecord(
        "a", began_us, workers, spans, (ProgressMark(0, 5, 0),), generation, 5, 1.0, samples_per_s=samples_per_s
    )
    for entry in store.list("jobs/j/ledger/"):
        store.delete(entry.key)
    store.put(f"jobs/j/ledger/a/{began_us}", record.encode())
    store.put("jobs/j/world", World(generation, state, (Member("a", "x", 1, workers, 0),)).encode())


def test_job_that_scales_gets_more_workers(store: Store) -> None:
    adviser = WorkerAdviser(store, "j", 1, 8, sample_s=0.0, clock=lambda: NOW_S)
    assert adviser() is None, "there is no such job yet"
    run(store, 2, 200.0)
    for _ in range(4):
        advice = adviser()
    assert advice is not None
    assert (advice.job, advice.now, advice.decision.count) == ("j", 2, 4)
    assert "for a pause of 20 s" in advice.decision.reason, "as the ledger has it"


def test_job_that_ended_gets_no_advice(store: Store) -> None:
    adviser = WorkerAdviser(store, "j", 1, 8, sample_s=0.0, clock=lambda: NOW_S)
    run(store, 2, 200.0)
    assert adviser() is not None
    run(store, 2, 200.0, state=JobState.DONE)
    assert adviser() is None
    store.put("jobs/j/world", b"another version's")
    assert adviser() is None


def report(store: Store, *datasets: object) -> None:
    store.put(report_key("j"), json.dumps({"job": "j", "datasets": datasets}).encode())


def data(done: float, units: float | None = 10_000, **changes: Any) -> dict[str, Any]:
    return {"name": "data", "units": units, "epochs": 1, "units_done": done, "units_per_s": 10.0, **changes}


def test_nothing_grows_near_the_datas_end(store: Store) -> None:
    """The master's units are files here, and the job's rate is of samples: the time is what they share."""
    run(store, 2, 200.0)
    adviser = WorkerAdviser(store, "j", 1, 8, sample_s=0.0, clock=lambda: NOW_S)
    for done, count, words in ((0, 4, "500 s left"), (9_900, 2, " 5 s left"), (10_000, 2, " 0 s left")):
        report(store, data(0, finished=True, name="other"), data(done))
        adviser._left = WorkLeft()  # else the rate is what was done between two looks of this test
        for _ in range(4):
            advice = adviser()
        assert advice is not None
        assert advice.decision.count == count
        assert words in advice.decision.reason


def test_rate_of_large_shards_is_kept() -> None:
    """A shard takes longer than the master looks back: its own rate is 0 most of the time."""
    left = WorkLeft()
    slow = {"units_per_s": 0.0, "units": 1_000}
    assert left.look([data(0, **slow)], 0.0) is None
    assert left.look([data(0, **slow)], 50.0) is None
    assert left.look([data(500, **slow)], 100.0) == 100.0
    left.resize()
    assert left.look([data(500, **slow)], 110.0) == 100.0, "the last rate, until there is one of this size"
    assert left.look([data(900, **slow)], 120.0) == 2.5
    assert left.look([data(0, **slow)], 130.0) == 25.0, "it was put back"
    assert left.look([data(900, **slow), data(0, epochs=0)], 140.0) is None, "an epoch after another, without an end"


def test_standby_says_nothing_of_workers(store: Store) -> None:
    leads = False
    adviser = WorkerAdviser(store, "j", 1, 8, lambda: leads, sample_s=0.0, clock=lambda: NOW_S)
    run(store, 2, 200.0)
    assert adviser() is None
    leads = True
    assert adviser() is not None
