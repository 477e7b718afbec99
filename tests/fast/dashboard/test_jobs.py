"""Jobs are decoded once; a job that has ended costs next to nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.goodput.causes import find_causes
from edl.collective.goodput.codec import Event
from edl.collective.job_records import JobState
from edl.dashboard.state import jobs
from edl.dashboard.state.jobs import JobReader, job_status
from edl.discovery import Store, open_store
from tests.fast.dashboard.server import put_job


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as store:
        yield store


def test_only_changes_are_decoded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_job(store, "first", "ab")
    put_job(store, "ended", "c", state=JobState.DONE)
    decoded: list[str] = []
    joined: list[str] = []
    decode, join = jobs.decode_part, jobs.join_parts
    monkeypatch.setattr(jobs, "decode_part", lambda key, value: (decoded.append(key), decode(key, value))[1])
    monkeypatch.setattr(jobs, "join_parts", lambda job, parts: (joined.append(job), join(job, parts))[1])
    reader = JobReader(store)
    now = time.time()
    summaries, _, _ = reader.read(now)
    assert (len(decoded), sorted(joined)) == (7, ["ended", "first"])
    again, _, _ = reader.read(now + 10)
    assert (len(decoded), sorted(joined)) == (7, ["ended", "first", "first"]), "an ended job is summed up again"
    assert again["ended"].nodes[0].silent_s == pytest.approx(summaries["ended"].nodes[0].silent_s + 10, abs=0.1)
    fresh, _, _ = JobReader(store).read(now + 10)
    assert again == fresh, "what is kept differs from what is read"
    decoded.clear()
    put_job(store, "ended", "d")  # a new job of the same name
    restarted, _, _ = reader.read(time.time())
    assert (len(decoded), restarted["ended"].state) == (3, "running")


def test_job_of_a_master_alone() -> None:
    status = job_status("labels", None, None, None, 50)
    assert (status.state, status.master_only, status.goodput, status.nodes) == ("down", True, None, ())


def test_causes_of_generations() -> None:
    events = [
        Event(1, "a", "kill", "rank 1 got SIGKILL", 3),
        Event(2, "a", "generation", "lost b", 4),
        Event(3, "a", "restart", "rank 0 ended with exit code 1", 4),
        Event(4, "a", "generation", "rank 0 ended with exit code 1", 5),
        Event(5, "a", "join", "ready"),
    ]
    assert find_causes(events) == [
        "",
        "lost b (kill at a: rank 1 got SIGKILL)",
        "rank 0 ended with exit code 1",
        "rank 0 ended with exit code 1",
        "",
    ]
