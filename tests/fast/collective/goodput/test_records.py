"""Ledgers in a store: what an agent wrote is read back, and what is no ledger is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from edl.collective.agent import status_publisher
from edl.collective.agent.status_publisher import StatusPublisher
from edl.collective.agent.workers.worker_group import WorkerGroup
from edl.collective.goodput.codec import encode_record
from edl.collective.goodput.node import AgentState, Ledger, NodeRecord, ProgressMark
from edl.collective.goodput.records import MAX_EVENTS, LedgerWriter, delete_ledgers, list_jobs, read_job
from edl.collective.goodput.spans import MAX_SPANS, TimeCategory, span_of
from edl.collective.job_records import World
from edl.collective.worker_status import WorkerStatus
from edl.discovery import Store, open_store
from edl.discovery.keys import MAX_VALUE_BYTES
from edl.discovery.sqlite.store import SqliteStore
from edl.discovery.store import Entry
from edl.errors import DiscoveryError, ProtocolError, SettingsError
from tests.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/discovery.sqlite") as store:
        yield store


def ledger_of(node: str, began_s: float = 1_700_000_000.0) -> Ledger:
    ledger = Ledger(node, 2, 100.0, began_s)
    ledger.observe(101.5, AgentState.IDLE, ())
    return ledger


def test_what_was_written_is_read_back(store: Store) -> None:
    """Also of a node that comes back, whose former life stays as it was."""
    later, ledger = ledger_of("host:1/a b", 1_700_000_060.0), ledger_of("host:1/a b")
    LedgerWriter(store, "job", later).write_record()
    writer = LedgerWriter(store, "job", ledger)
    writer.write_record()
    writer.record_event("join", "2 workers", generation=3)
    writer.record_event("kill", "rank 1 by SIGKILL", generation=3, node="other")
    ledger.observe(103.0, AgentState.RENDEZVOUS, ())
    writer.write_record()
    back = read_job(store, "job")
    assert back.nodes == (ledger.record(), later.record())
    assert [(event.node, event.kind, event.text) for event in back.events] == [
        ("host:1/a b", "join", "2 workers"),
        ("other", "kill", "rank 1 by SIGKILL"),
    ]
    assert back.world is None
    store.put("jobs/job/world", World(generation=3).encode())
    assert read_job(store, "job").world == World(generation=3)
    assert list(list_jobs(store)) == ["job"]
    with pytest.raises(SettingsError, match="there is no job 'other' in this store; there is job"):
        read_job(store, "other")
    delete_ledgers(store, "job")
    assert read_job(store, "job").nodes == ()


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\n"])
def test_names_that_are_no_keys(name: str, store: Store) -> None:
    with pytest.raises(SettingsError, match="job"):
        read_job(store, name)


def test_largest_ledger_and_events_fit(store: Store) -> None:
    spans = tuple(span_of(TimeCategory(index % 2), 2**42 + index, 4096, running=True) for index in range(MAX_SPANS))
    marks = tuple(ProgressMark(2**48 + index, 2**40, 2**50) for index in range(300))
    assert len(encode_record(NodeRecord("a", 2**50, 4096, spans, marks))) < 60_000
    writer = LedgerWriter(store, "job", ledger_of("a"))
    for _ in range(3):
        writer.record_event("error", "x" * 1000)
    (entry,) = store.list("jobs/job/events/")
    assert len(entry.value) / 3 * MAX_EVENTS < MAX_VALUE_BYTES


GOOD = json.loads(encode_record(ledger_of("a").record()))

DAMAGES: list[dict[str, object]] = [
    {"spans": [[1, 1, 2]]},
    {"spans": [[1, 1, -5, 0, 0, 0, 0, 0, 0]]},
    {"spans": [[1, 1, 1e300, 0, 0, 0, 0, 0, 0]]},
    {"marks": [[1]]},
    {"steps_per_s": float("nan")},
    {"node": 7},
    {"began_us": True},
    {"step": -2},
    {"reached": 1.5},
]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\xff", "not JSON"),
        (b"[1]", "no version"),
        (b'{"version": 99}', "version 99"),
        (b'{"version": 1}', "not a ledger"),
        *((json.dumps({**GOOD, **damage}).encode(), "not a ledger") for damage in DAMAGES),
    ],
)
def test_what_is_no_ledger_is_named(value: bytes, words: str, store: Store) -> None:
    store.put("jobs/j/ledger/a/1", value)
    with pytest.raises(ProtocolError, match=words) as caught:
        read_job(store, "j")
    assert "jobs/j/ledger/a/1" in str(caught.value)


class _Refusing(SqliteStore):
    """Lists nothing the first times that it is asked."""

    refusals = 2

    def list(self, prefix: str) -> list[Entry]:
        if self.refusals:
            self.refusals -= 1
            raise DiscoveryError("no leader")
        return super().list(prefix)


@dataclass
class _CameLate:
    """What a publisher reads of a worker group, whose workers are of a generation that is new to this node."""

    generation: int = 5
    workers: dict[int, WorkerStatus] = field(default_factory=dict)

    def read_statuses(self) -> dict[int, WorkerStatus]:
        return self.workers


def test_unanswered_question_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_publisher, "_WRITE_EVERY_S", 0.01)
    with _Refusing(str(tmp_path / "discovery.sqlite")) as store:
        before = NodeRecord("before", 1, 1, generation=3, step=7)
        LedgerWriter(store, "job", Ledger("before", 1, 0.0, 1.0)).write_record(before)
        publisher = StatusPublisher(store, "job", "late", 1)
        publisher.follow_workers(cast(WorkerGroup, _CameLate()))

        def known() -> list[int]:
            publisher.charge_time(AgentState.RUNNING)
            return [] if store.refusals else [one.reached for one in read_job(store, "job").nodes if one.reached >= 0]

        wait_until(lambda: known() == [7], "steps that were finished before are charged as new ones")
        publisher.close()
