"""A ledger through real stores: what an agent wrote is read back, also after it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.collective.goodput.codec import encode_record
from edl.collective.goodput.job import join_ledgers
from edl.collective.goodput.node import AgentState, Ledger, NodeRecord, ProgressMark
from edl.collective.goodput.records import (
    MAX_EVENTS,
    LedgerWriter,
    delete_ledgers,
    last_step_before,
    list_jobs,
    read_job,
)
from edl.collective.goodput.spans import MAX_SPANS, TimeCategory, span_of
from edl.collective.job_records import World
from edl.discovery import Store, open_store
from edl.discovery.keys import MAX_VALUE_BYTES
from edl.errors import ProtocolError, SettingsError

# Beats every 20 ms until it is killed.
AGENT = """\
import sys, time
from edl.collective.goodput.node import AgentState, Ledger
from edl.collective.goodput.records import LedgerWriter
from edl.discovery import open_store

with open_store(sys.argv[1]) as store:
    ledger = Ledger("killed", 1, time.monotonic(), time.time())
    writer = LedgerWriter(store, "job", ledger)
    ledger.observe(time.monotonic(), AgentState.IDLE, ())
    while True:
        time.sleep(0.02)
        ledger.observe(time.monotonic(), AgentState.IDLE, ())
        writer.write_record()
"""


@pytest.fixture(params=["sqlite", pytest.param("consul", marks=pytest.mark.consul)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/discovery.sqlite"
    return str(request.getfixturevalue("consul_agent").url)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store


@pytest.fixture
def job() -> str:
    """A job that nobody else has: the Consul agent serves all tests."""
    return f"job-{uuid.uuid4().hex[:12]}"


def ledger_of(node: str, began_s: float = 1_700_000_000.0) -> Ledger:
    ledger = Ledger(node, 2, 100.0, began_s)
    ledger.observe(101.5, AgentState.IDLE, ())
    return ledger


def test_what_was_written_is_read_back(store: Store, job: str) -> None:
    ledger = ledger_of("host:1/a b")
    writer = LedgerWriter(store, job, ledger)
    writer.write_record()
    writer.record_event("join", "2 workers", generation=3)
    writer.record_event("kill", "rank 1 by SIGKILL", generation=3, node="other")
    ledger.observe(103.0, AgentState.RENDEZVOUS, ())
    writer.write_record()
    back = read_job(store, job)
    assert back.nodes == (ledger.record(),)
    assert [(event.node, event.kind, event.text) for event in back.events] == [
        ("host:1/a b", "join", "2 workers"),
        ("other", "kill", "rank 1 by SIGKILL"),
    ]
    assert back.world is None
    store.put(f"jobs/{job}/world", World(generation=3).encode())
    again = read_job(store, job)
    assert again.world == World(generation=3)
    assert job in list_jobs(store)


def test_returning_agent_keeps_its_past(store: Store, job: str) -> None:
    """An agent that comes back leaves its former life as it was."""
    first, second = ledger_of("a"), ledger_of("a", 1_700_000_060.0)
    for ledger in (second, first):
        LedgerWriter(store, job, ledger).write_record()
    assert read_job(store, job).nodes == (first.record(), second.record())
    delete_ledgers(store, job)
    with pytest.raises(SettingsError, match="there is no job"):
        read_job(store, job)


def test_last_step_counts_all_lives(store: Store, job: str) -> None:
    """The last step before a generation is that of all lives."""
    assert last_step_before(store, job, 5) == -1
    lives = [
        NodeRecord("far", 1, 1, generation=2, step=100),
        NodeRecord("killed while it repeated them", 2, 1, generation=3, step=80, reached=99),
        NodeRecord("at work already", 3, 1, generation=4, step=120, reached=70),
        NodeRecord("has no workers", 4, 1),
    ]
    for life in lives:
        store.put(f"jobs/{job}/ledger/{life.node}/{life.began_us}", encode_record(life))
    store.put(f"jobs/{job}/ledger/of another version/5", b'{"version": 99}')
    assert [last_step_before(store, job, generation) for generation in (5, 4, 3, 2)] == [120, 100, 100, 99]


def test_old_ledger_can_be_read(store: Store, job: str) -> None:
    """A ledger from before the last step was kept can be read."""
    fields = json.loads(encode_record(NodeRecord("a", 1, 1, generation=0, step=7, reached=3)))
    del fields["reached"]
    store.put(f"jobs/{job}/ledger/a/1", json.dumps(fields).encode())
    assert [(one.step, one.reached) for one in read_job(store, job).nodes] == [(7, -1)]


def test_missing_job_names_known_ones(store: Store, job: str) -> None:
    """A job that is not there names those that are."""
    LedgerWriter(store, job, ledger_of("a")).write_record()
    with pytest.raises(SettingsError, match=f"there is no job 'other' in this store; there is .*{job}"):
        read_job(store, "other")


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\n"])
def test_names_that_are_no_keys(name: str, tmp_path: Path) -> None:
    """Names that cannot be keys are refused."""
    with open_store(f"sqlite:///{tmp_path}/discovery.sqlite") as store, pytest.raises(SettingsError, match="job"):
        read_job(store, name)


def test_largest_ledger_and_events_fit(store: Store, job: str) -> None:
    """The largest ledger and list of events fit."""
    spans = tuple(span_of(TimeCategory(index % 2), 2**42 + index, 4096, running=True) for index in range(MAX_SPANS))
    marks = tuple(ProgressMark(2**48 + index, 2**40, 2**50) for index in range(300))
    assert len(encode_record(NodeRecord("a", 2**50, 4096, spans, marks))) < 60_000
    writer = LedgerWriter(store, job, ledger_of("a"))
    for _ in range(3):
        writer.record_event("error", "x" * 1000)
    ((entry),) = store.list(f"jobs/{job}/events/")
    assert len(entry.value) / 3 * MAX_EVENTS < MAX_VALUE_BYTES


def test_killed_agents_time_ends(tmp_path: Path) -> None:
    """A killed agents time ends at its last sign of life."""
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    began_s = time.time()
    agent = subprocess.Popen([sys.executable, "-c", AGENT, url])
    try:
        with open_store(url) as store:
            deadline = time.monotonic() + 30
            while not any(entry.value for entry in store.list("jobs/job/")):
                assert time.monotonic() < deadline, "the agent wrote nothing"
                time.sleep(0.01)
            os.kill(agent.pid, signal.SIGKILL)
            agent.wait()
            (node,) = read_job(store, "job").nodes
            killed_us = round(time.time() * 1e6)
    finally:
        agent.kill()
        agent.wait()
    assert not node.ended
    assert began_s * 1e6 <= node.began_us < node.until_us <= killed_us
    assert join_ledgers([node], killed_us + 60_000_000).amounts[TimeCategory.DOWN] >= 60_000_000


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\xff", "not JSON"),
        (b"[1]", "no version"),
        (b'{"version": 99}', "version 99"),
        (b'{"version": 1}', "not a ledger"),
    ],
)
def test_bytes_that_are_no_ledger_are_named(value: bytes, words: str, tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/discovery.sqlite") as store:
        store.put("jobs/j/ledger/a/1", value)
        with pytest.raises(ProtocolError, match=words) as caught:
            read_job(store, "j")
        assert "jobs/j/ledger/a/1" in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        {"spans": [[1, 1, 2]]},
        {"spans": [[1, 1, -5, 0, 0, 0, 0, 0, 0]]},
        {"spans": [[1, 1, 1e300, 0, 0, 0, 0, 0, 0]]},
        {"marks": [[1]]},
        {"steps_per_s": float("nan")},
        {"node": 7},
        {"began_us": True},
        {"step": -2},
        {"reached": 1.5},
    ],
)
def test_damaged_ledger_is_an_error(damage: dict[str, object], tmp_path: Path) -> None:
    """A damaged ledger is an error and never a number."""
    good = json.loads(encode_record(ledger_of("a").record()))
    with open_store(f"sqlite:///{tmp_path}/discovery.sqlite") as store:
        store.put("jobs/j/ledger/a/1", json.dumps({**good, **damage}).encode())
        with pytest.raises(ProtocolError, match="not a ledger"):
            read_job(store, "j")
