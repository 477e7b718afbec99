"""The page of a store that dies, comes back, or holds garbage; and the commands that serve it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import Store, open_store
from tests.fast.dashboard.server import EventClient, ask, put_job, put_master, samples
from tests.fast.discovery.conformance.backends import ServedBackend
from tests.waiting import DEADLINE_S, wait_until


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedBackend]:
    backend = ServedBackend(tmp_path / "served.sqlite")
    yield backend
    backend.stop()


def test_store_that_dies_and_comes_back(served: ServedBackend) -> None:
    """The page stays, says why its figures are old, and goes on by itself; its metrics are a gap."""
    with open_store(served.url) as store:
        put_job(store, "resnet")
    with DashboardServer(DashboardSettings(served.url, port=0)) as server, EventClient(server.url) as client:
        assert client.next("state")[2]["stale"] == ""
        served.stop()
        wait_until(lambda: client.next()[2].get("stale", "") != "", "the page does not say that the store is away")
        state = ask(server.url, "/api/state").json()
        assert state["stale"].startswith("as known last: ")
        assert [job["job"] for job in state["jobs"]] == ["resnet"], "what was known is gone"
        assert state["looked"] < state["time"]
        figures = samples(ask(server.url, "/metrics").body.decode())
        assert figures["edl_dashboard_store_up"] == 0
        assert not [series for series in figures if series.startswith("edl_job")]
        assert (
            ask(server.url, "/").status
            == ask(server.url, "/healthz").status
            == ask(server.url, "/readyz").status
            == 200
        )
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
            assert process.stdout is not None
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
        wait_until(
            lambda: (
                'edl_master_shards{dataset="data",job_name="labels",state="todo"}'
                in samples(ask(page, "/metrics").body.decode())
            ),
            "the shards are no metric",
        )
        figures = samples(ask(page, "/metrics").body.decode())
        assert figures['edl_master_shards{dataset="data",job_name="labels",state="todo"}'] == 10
        assert figures["edl_master_journal_commit_seconds_count"] >= 1
        assert figures['edl_master_up{job_name="labels"}'] == 1
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)
