"""Tests of the page's server: what they share."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from edl.collective.goodput import Event, NodeRecord, ProgressMark, TimeCategory, encode_events, span_of
from edl.collective.job_records import JobState, Member, World
from edl.discovery import Store
from tests.waiting import DEADLINE_S


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    url: str, path: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> Answer:
    """Send a request as it is: nothing of the path is changed, and no redirection is followed."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


class EventClient(AbstractContextManager["EventClient"]):
    """A client of `/api/events`."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, query: str = "") -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=DEADLINE_S)
        self._connection.request("GET", f"/api/events{query}", headers=dict(headers or {}))
        self.answer = self._connection.getresponse()

    def __exit__(self, *_: object) -> None:
        self.answer.close()
        self._connection.close()

    def next(self, kind: str = "") -> tuple[str, str, Any]:
        """The next event, of a kind if that is given: its kind, its id and its data."""
        for _ in range(10_000):
            fields = self._block()
            if "event" in fields and kind in ("", fields["event"]):
                return fields["event"], fields.get("id", ""), json.loads(fields["data"])
        raise AssertionError(f"no event {kind!r} among 10,000")

    def _block(self) -> dict[str, str]:
        fields = {}
        while line := self.answer.readline():
            text = line.decode().rstrip("\n")
            if not text:
                return fields
            name, _, value = text.partition(": ")
            fields[name] = value
        raise AssertionError("the stream has ended")


def now_s() -> float:
    """Return the time that a record of this moment has."""
    return datetime.now(timezone.utc).timestamp()


def put_job(store: Store, job: str, nodes: str = "a", step: int = 9, state: JobState = JobState.RUNNING) -> None:
    """A job whose nodes began 60 s ago, met for a second, and have trained since; one of them has an event."""
    now_us = round(now_s() * 1e6)
    spans = (
        span_of(TimeCategory.RENDEZVOUS, 1_000_000),
        span_of(TimeCategory.TRAIN, 59_000_000, 1, running=True),
    )
    for node in nodes:
        record = NodeRecord(
            node, now_us - 60_000_000, 1, spans, (ProgressMark(60_000_000, step, 640),), 2, step, 1.5, 96.0
        )
        store.put(f"jobs/{job}/ledger/{node}/{record.began_us}", record.encode())
    event = Event(now_us / 1e6, nodes[0], "restart", "rank 1 was killed", 1)
    store.put(f"jobs/{job}/events/{nodes[0]}/1", encode_events([event]))
    members = tuple(Member(node, "10.0.0.1", 29400, 1, place) for place, node in enumerate(nodes))
    store.put(f"jobs/{job}/world", World(2, state, members, "b joined").encode())


def put_master(store: Store, job: str, units_done: int = 80, **changes: Any) -> None:
    """A master's report, with a poisoned shard."""
    failure = {"holder": "h1", "reason": "cannot decode <b>", "time": now_s()}
    dataset = {
        "name": "train", "kind": "range", "epoch": 1, "epochs": 3, "units": 1000, "units_per_s": 12.5, "eta_s": 60.0,
        "units_done": units_done, "shards": {"todo": 5, "doing": 2, "done": 8, "poisoned": 1},
        "poisoned": [{"shard": 3, "start": 30, "stop": 40, "failures": [failure]}],
        "holders": [{"holder": "h1", "leases": 2, "units_done": 80, "units_per_s": 12.5, "seen_s": 0.5}],
    }  # fmt: skip
    report = {
        "job": job, "endpoint": "127.0.0.1:1", "term": 2, "time": now_s(), "state": "leading", "commands": 17,
        "datasets": [dataset], "events": [{"time": now_s(), "kind": "poisoned", "text": "shard 3 of train"}],
    }  # fmt: skip
    store.put(f"master_reports/{job}", json.dumps({**report, **changes}).encode())


def put_teacher(store: Store, age_s: float = 20.0, service: str = "digits") -> None:
    """A teacher's record, of a process that lives for `age_s` seconds, and computes 100 rows in each."""
    counters = [{"t": t, "rows": int(100 * t), "compute_s": 0.5 * t} for t in (age_s, age_s - 10)]
    record = {
        "v": 1, "id": "t-1", "teacher": "t1", "model": "m", "version": "1", "endpoint": "127.0.0.1:1",
        "state": "ready", "workers": 1, "queue_rows": 3, "note": "", **counters[0], "since": counters[1],
    }  # fmt: skip
    store.put(f"load/{service}/teachers/t-1", json.dumps(record).encode())


def put_wanted(store: Store, of: str, count: int, reason: str) -> None:
    """How many are wanted of `teachers/SERVICE` or `workers/JOB`."""
    now = now_s()
    record = {
        "v": 1, "count": count, "now": 3, "reason": reason, "since": now, "time": now,
        "decisions": [{"time": now, "from": 3, "count": count, "reason": reason}],
    }  # fmt: skip
    store.put(f"wanted/{of}", json.dumps(record).encode())


def samples(text: str) -> dict[str, float]:
    """Prometheus's text format: what stands before the value, to the value."""

    def lines() -> Iterator[tuple[str, float]]:
        for line in text.splitlines():
            if line and not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                yield series, float(value)

    return dict(lines())
