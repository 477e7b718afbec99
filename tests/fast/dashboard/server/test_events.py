"""The stream of events, and the page of a store that dies, comes back, or holds garbage; the commands that serve it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from edl.dashboard import streams
from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.dashboard.state.jobs import read_job_status
from edl.dashboard.streams import EventStreams
from edl.discovery import Store, open_store
from edl.errors import SettingsError
from tests.fast.dashboard.server import EventClient, ask, put_job, put_master, samples
from tests.fast.discovery.conformance.backends import ServedBackend
from tests.waiting import DEADLINE_S, wait_until


def test_reconnect_with_last_event_id(page: str, store: Store) -> None:
    """What was missed comes as an update; an unknown id gets the whole state."""
    put_job(store, "resnet")
    with EventClient(page) as client:
        _, event_id, state = client.next()
        known = [point["t"] for point in state["jobs"][0]["history"]]
    new: list[float] = []

    def come_back(headers: Mapping[str, str] | None = None, query: str = "") -> bool:
        """Take the first event; return whether there is something new in it, which takes the page some seconds."""
        nonlocal new
        with EventClient(page, headers, query) as client:
            kind, _, update = client.next()
        assert kind == "update"
        new = [point["t"] for point in update["jobs"][0]["history"]]
        assert not set(new) & set(known), "points that the client has are sent again"
        return bool(new)

    wait_until(lambda: come_back({"Last-Event-ID": event_id}), "what was missed does not come")
    wait_until(lambda: come_back(query=f"?last_event_id={event_id}"), "what was missed does not come")
    for unknown in ("garbage", "ffffffff-1", f"{event_id}000", f"{event_id[:9]}-1", "x" * 5000):
        with EventClient(page, {"Last-Event-ID": unknown}) as client:
            kind, _, state = client.next()
            assert kind == "state", unknown
            assert len(state["jobs"][0]["history"]) > len(new)


def silent_client(page: str) -> socket.socket:
    """A client that asks for events and reads none."""
    parts = urlsplit(page)
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    silent.connect((parts.hostname, parts.port))
    silent.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return silent


def put_much(store: Store) -> None:
    """Records that are cheap to read, and make a state of 600 kB: more than a socket's buffers take."""
    failures = [{"holder": "h", "reason": "cannot be read " * 30, "time": 1.0}] * 10
    poisoned = [{"shard": number, "start": 0, "stop": 1, "failures": failures} for number in range(40)]
    for job in "abc":
        put_master(store, job, datasets=[{"name": "train", "poisoned": poisoned}])


def test_slow_client_is_let_go(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_much(store)
    write, late = EventStreams._write, threading.Event()

    async def note_late(self: EventStreams, *arguments: Any) -> bool:
        taken = await write(self, *arguments)
        if not taken:
            late.set()
        return taken

    monkeypatch.setattr(EventStreams, "_write", note_late)
    monkeypatch.setattr(streams, "_WRITE_S", 0.5)
    with DashboardServer(DashboardSettings(url, port=0)) as server, silent_client(server.url):
        assert late.wait(DEADLINE_S)
        wait_until(lambda: server._looks.clients == 0, "it is still counted")


def test_clients_share_looks(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clients cost one look a pause, and there is none when they are gone; heartbeats have no id."""
    monkeypatch.setattr(streams, "INTERVAL_S", 600.0)
    monkeypatch.setattr(streams, "_HEARTBEAT_S", 0.02)
    with DashboardServer(DashboardSettings(url, port=0)) as server, ExitStack() as stack:
        clients = [stack.enter_context(EventClient(server.url)) for _ in range(5)]
        assert len({client.next("state")[1] for client in clients}) == 1
        assert server._looks.clients == 5
        kind, event_id, data = clients[0].next("heartbeat")
        assert (kind, event_id) == ("heartbeat", "")
        assert data["time"] > 1e9
        assert server._reader.looks == 1
    monkeypatch.setattr(streams, "INTERVAL_S", 0.05)
    with DashboardServer(DashboardSettings(url, port=0)) as server:
        with EventClient(server.url) as client:
            client.next("update")
        wait_until(lambda: server._looks.clients == 0, "clients that went are still counted")
        before = server._reader.looks
        with DashboardServer(DashboardSettings(url, port=0)) as other, EventClient(other.url) as client:
            for _ in range(5):  # a page that has a client looks as often meanwhile
                client.next("update")
        assert server._reader.looks <= before + 1, "the store is asked for no client"
    monkeypatch.setattr(streams, "_IDLE_S", 0.01)
    with DashboardServer(DashboardSettings(url, port=0)) as server:
        wait_until(lambda: server._reader.looks > 2, "nobody records history while no page is open")


@pytest.fixture
def served(stack: contextlib.ExitStack, tmp_path: Path) -> ServedBackend:
    backend = ServedBackend(tmp_path / "served.sqlite")
    stack.callback(backend.stop)
    return backend


def test_store_that_dies_and_comes_back(served: ServedBackend) -> None:
    """The page stays, says why its figures are old, and goes on by itself; its metrics are a gap."""
    with open_store(served.url) as store:
        put_job(store, "resnet")
    with DashboardServer(DashboardSettings(served.url, port=0)) as server, EventClient(server.url) as client:
        assert client.next("state")[2]["stale"] == ""
        served.stop()
        wait_until(lambda: client.next()[2].get("stale", "") != "", "the page does not say that the store is away")
        state = ask(server.url, "/api/state").json()
        assert state["stale"].startswith("last known state: ")
        assert [job["job"] for job in state["jobs"]] == ["resnet"], "what was known is gone"
        assert state["looked"] < state["time"]
        figures = samples(ask(server.url, "/metrics").body.decode())
        assert figures["edl_dashboard_store_up"] == 0
        assert not [series for series in figures if series.startswith("edl_job")]
        assert [ask(server.url, path).status for path in ("/", "/healthz", "/readyz")] == [200] * 3
        served.start()
        wait_until(lambda: client.next()[2].get("stale", "x") == "", "the store is back")
        assert samples(ask(server.url, "/metrics").body.decode())["edl_dashboard_store_up"] == 1


def test_garbage_takes_nothing_else_away(page: str, store: Store) -> None:
    """A record that cannot be read is listed; what can be read is shown."""
    put_job(store, "good")
    put_master(store, "good")
    put_job(store, "half")
    garbage = {
        "jobs/half/world": b"\xff\xfe",
        "jobs/half/ledger/x/1": b"[" * 100_000,
        "jobs/half/events/x/1": b'{"version": 1, "events": 7}',
        "jobs/wild/world": b'{"generation": "x", "state": "running", "nodes": [], "message": 3}',
        "jobs/wild2/world": json.dumps(
            {"generation": 1, "state": "running", "nodes": [{"id": 5, "addr": 1, "port": "x", "local_world_size": "y",
             "first_rank": None}], "message": ["m"]}
        ).encode(),
        "jobs/flat": b"x",
        "master_reports/broken": b"{",
        "master_reports/list": b"[]",
        "master_reports/odd/name": b"{}",
        "wanted/teachers/x": b"nonsense",
        "load/digits/students/x": b"nonsense",
    }  # fmt: skip
    for key, value in garbage.items():
        store.put(key, value)
    put_master(store, "wrong", time="yesterday", term=-1, datasets=[3, {"name": ["x"], "shards": [1], "eta_s": 1e999},
               {"name": "a", "shards": {"todo": 10**400, "done": True}, "poisoned": "x", "holders": [[]]}])  # fmt: skip
    put_master(store, "lone", datasets=[{"name": "\ud800", "kind": 7}], events=[{"time": float("nan")}, 5])
    state = ask(page, "/api/state").json()
    assert state["stale"] == ""
    jobs = {job["job"]: job for job in state["jobs"]}
    assert {"good", "half", "wild", "wild2", "wrong", "lone"} <= set(jobs)
    assert jobs["good"]["state"] == "running"
    assert jobs["half"]["nodes"], "what can be read of a job is shown"
    listed = {record["key"] for record in state["unreadable"]}
    assert {"jobs/half/world", "jobs/half/ledger/x/1", "jobs/half/events/x/1", "jobs/wild/world", "jobs/flat"} <= listed
    assert {"master_reports/broken", "master_reports/list"} <= listed
    assert jobs["wrong"]["master"]["datasets"][0]["shards"] == {"todo": 0, "doing": 0, "done": 0, "poisoned": 0}
    assert b"edl_job_state" in ask(page, "/metrics").body
    with EventClient(page) as client:
        assert client.next("state")[2]["jobs"]


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that serves a page, and the page's URL."""
    command = [sys.executable, "-m", "edl", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            output = []
            for line in process.stdout:
                output.append(line)
                found = re.search(r"is at (http://127\.0\.0\.1:\d+/)", line)
                if found:
                    yield process, found[1]
                    return
            raise AssertionError(f"no page: {output}")
        finally:
            process.kill()


def test_commands_serve_and_end(url: str, store: Store) -> None:
    """A master serves its own job only, with the metrics that only the master has."""
    put_job(store, "other")
    data = ("--data", "range:100", "--shard-size", "10")
    put_job(store, "resnet")
    with running("dashboard", "--store", url, "--port", "0") as (process, page), EventClient(page) as client:
        assert client.next("state")[2]["jobs"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, "an open page keeps the command from ending"
    with running("master", "labels", "--store", url, *data, "--http-port", "0") as (process, page):
        wait_until(lambda: bool(ask(page, "/api/state").json()["jobs"]), "the master's report is not there")
        state = ask(page, "/api/state").json()
        assert state["job"] == "labels"
        (job,) = state["jobs"]
        assert (job["job"], job["state"], job["master_only"]) == ("labels", "running", True)
        todo = 'edl_master_shards{dataset="data",job_name="labels",state="todo"}'
        wait_until(lambda: todo in samples(ask(page, "/metrics").body.decode()), "the shards are no metric")
        figures = samples(ask(page, "/metrics").body.decode())
        assert figures[todo] == 10
        assert figures["edl_master_journal_commit_seconds_count"] >= 1
        assert figures['edl_master_up{job_name="labels"}'] == 1
        with pytest.raises(SettingsError, match="no job 'label' in this store; did you mean 'labels'"):
            read_job_status(store, "label", 0)
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)
