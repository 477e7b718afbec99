"""How many workers a job should have, from the ledger that its agents write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.cli.scaling.advice import WorkerAdviser
from edl.collective.goodput.codec import encode_record
from edl.collective.goodput.node import NodeRecord, ProgressMark
from edl.collective.goodput.spans import TimeCategory, span_of
from edl.collective.job_records import JobState, Member, World
from edl.discovery import Store, open_store

SECOND = 1_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as found:
        yield found


def run(
    store: Store, workers: int, samples_per_s: float, generation: int = 0, state: JobState = JobState.RUNNING
) -> None:
    """The record of a job of a node that has trained for an hour, after 20 s of pauses a generation."""
    pauses = span_of(TimeCategory.LOAD, (generation + 1) * 20 * SECOND, workers, running=True)
    spans = (pauses, span_of(TimeCategory.TRAIN, 3600 * SECOND, workers, running=True))
    began_us = round(time.time() * 1e6) - sum(span.length_us for span in spans)
    record = NodeRecord(
        "a", began_us, workers, spans, (ProgressMark(0, 5, 0),), generation, 5, 1.0, samples_per_s=samples_per_s
    )
    for entry in store.list("jobs/j/ledger/"):
        store.delete(entry.key)
    store.put(f"jobs/j/ledger/a/{began_us}", encode_record(record))
    store.put("jobs/j/world", World(generation, state, (Member("a", "x", 1, workers, 0),)).encode())


def test_job_that_scales_gets_a_worker_more(store: Store) -> None:
    adviser = WorkerAdviser(store, "j", 1, 8, sample_s=0.0)
    assert adviser() is None, "there is no such job yet"
    run(store, 2, 200.0)
    for _ in range(4):
        advice = adviser()
    assert advice is not None
    assert (advice.job, advice.now, advice.decision.count) == ("j", 2, 3)
    assert "for a pause of 20 s" in advice.decision.reason, "as the ledger has it"


def test_size_before_has_its_own_rate(store: Store) -> None:
    adviser = WorkerAdviser(store, "j", 1, 8, sample_s=0.0)
    for workers, rate in ((2, 200.0), (3, 205.0)):
        run(store, workers, rate, generation=workers)
        for looks in range(4):
            advice = adviser()
            assert advice is not None
            samples = adviser._history.sizes[workers].samples if looks else 0
            assert samples == looks
    assert advice.decision.count == 3, "where a third worker was of little use, a fourth is not tried"


def test_job_that_ended_gets_no_advice(store: Store) -> None:
    adviser = WorkerAdviser(store, "j", 1, 8, sample_s=0.0)
    run(store, 2, 200.0)
    assert adviser() is not None
    run(store, 2, 200.0, state=JobState.DONE)
    assert adviser() is None
    store.put("jobs/j/world", b"another version's")
    assert adviser() is None


def test_store_is_asked_every_ten_seconds(store: Store) -> None:
    adviser = WorkerAdviser(store, "j", 1, 8)
    assert adviser() is None
    run(store, 2, 200.0)
    assert adviser() is None
