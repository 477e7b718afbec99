"""The page's answers over HTTP: state, files, methods and headers."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from edl.cli import main
from edl.dashboard.server.headers import HEADERS
from edl.dashboard.state.schema import DashboardState, JobStatus
from edl.discovery import Store, open_registry
from edl.discovery.registry import Instance
from tests.fast.dashboard.server import ask, put_job, put_master, until

NASTY = '<img src=x onerror=alert(1)>"&'


def test_empty_store_has_a_state(page: str) -> None:
    state = ask(page, "/api/state").json()
    assert set(state) == set(DashboardState.__dataclass_fields__)
    assert (state["jobs"], state["services"], state["events"], state["stale"]) == ([], [], [], "")
    assert state["store"].startswith("sqlite:///")


def test_two_jobs_and_a_service(page: str, url: str, store: Store) -> None:
    put_job(store, "first", "ab")
    put_job(store, "second", "c", step=3)
    put_master(store, "first")
    with open_registry(url) as registry, registry.register(Instance("digits", "t1", "127.0.0.1", 1, model="m")):
        state = ask(page, "/api/state").json()
    jobs = {job["job"]: job for job in state["jobs"]}
    assert set(jobs) == {"first", "second"}
    assert [node["ranks"] for node in jobs["first"]["nodes"]] == [[0], [1]]
    assert (jobs["first"]["step"], jobs["second"]["step"]) == (9, 3)
    assert jobs["first"]["goodput"] == pytest.approx(59 / 60, abs=0.02)
    assert jobs["first"]["master"]["datasets"][0]["shards"]["poisoned"] == 1
    assert jobs["second"]["master"] is None
    (service,) = state["services"]
    assert [(teacher["id"], teacher["model"], teacher["state"]) for teacher in service["teachers"]] == [
        ("t1", "m", "ready")
    ]
    restart = next(event for event in state["events"] if event["kind"] == "restart" and event["job"] == "first")
    assert restart["cause"] == "rank 1 was killed"
    assert restart["decision"]


def test_status_json_is_the_page_s_entry(page: str, url: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """One format: what differs between two looks is time alone."""
    put_job(store, "resnet", "ab")
    put_master(store, "resnet")
    (shown,) = ask(page, "/api/state").json()["jobs"]
    assert main(["status", "resnet", "--json", "--events", "50", "--store", url]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(shown) == set(JobStatus.__dataclass_fields__)
    assert printed.keys() == shown.keys() - {"history"}
    moving = {"elapsed_s", "seconds", "goodput", "worker_goodput", "nodes", "master", "history"}
    assert {name: printed[name] for name in printed if name not in moving} == {
        name: shown[name] for name in shown if name not in moving
    }
    for name in ("elapsed_s", "goodput", "worker_goodput"):
        assert printed[name] == pytest.approx(shown[name], rel=0.2)
    assert [sorted(node) for node in printed["nodes"]] == [sorted(node) for node in shown["nodes"]]
    assert printed["master"]["datasets"] == shown["master"]["datasets"]


def test_status_shows_poisoned_shards(url: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a job of which there is nothing but a master's report."""
    put_master(store, "labels")
    assert main(["status", "labels", "--store", url]) == 0
    out = capsys.readouterr().out
    assert "job labels: running" in out
    assert "dataset train: 1 poisoned, 8 shards done, 2 at work, 5 to do, epoch 2 of 3" in out
    assert "poisoned: shard 3 (units 30 to 40): cannot decode <b> (h1)" in out
    put_master(store, "labels", time=time.time() - 600)
    assert main(["status", "labels", "--store", url]) == 0
    assert "silent" in capsys.readouterr().out


def test_history_is_there_at_once(page: str, store: Store) -> None:
    """The ledger says where the time went while no page was open."""
    put_job(store, "resnet")
    (job,) = ask(page, "/api/state").json()["jobs"]
    assert len(job["history"]) >= 2
    assert [point["t"] for point in job["history"]] == sorted(point["t"] for point in job["history"])
    assert job["history"][0]["seconds"]["rendezvous"] == 1.0
    assert job["history"][-1]["seconds"]["train"] == pytest.approx(59.0, abs=1.0)


def test_names_with_html_stay_text(page: str, store: Store) -> None:
    put_job(store, NASTY)
    answer = ask(page, "/api/state")
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["jobs"][0]["job"] == NASTY
    assert b'job_name="<img src=x onerror=alert(1)>\\"&"' in ask(page, "/metrics").body


@pytest.mark.parametrize("path", ["/", "/static/index.html", "/api/state", "/metrics", "/healthz", "/nowhere"])
def test_every_answer_has_the_headers(page: str, path: str) -> None:
    answer = ask(page, path)
    for name, value in HEADERS.items():
        assert answer.headers[name.lower()] == value, path
    assert "cache-control" in answer.headers or answer.status == 404
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")


def test_head_and_wrong_methods(page: str) -> None:
    for path in ("/", "/api/state", "/api/events", "/metrics", "/healthz"):
        head = ask(page, path, "HEAD")
        assert (head.status, head.body) == (200, b""), path
        for method in ("POST", "PUT", "DELETE"):
            assert ask(page, path, method).status == 405, (path, method)
    assert ask(page, "/api").status == 404
    assert ask(page, "/static/").status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server/server.py",
        "/static/..%2fserver%2fserver.py",
        "/static/%2e%2e/%2e%2e/__init__.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/index.html%00.js",
        "/static/..\\server\\server.py",
        "/..%2f..%2fpyproject.toml",
    ],
)
def test_only_the_page_s_files_are_sent(page: str, path: str) -> None:
    assert ask(page, path).status in (400, 404)


def test_nonsense_is_refused_in_silence(page: str, caplog: pytest.LogCaptureFixture) -> None:
    """A scanner fills no log, and the page lives on."""
    parts = urlsplit(page)
    for nonsense in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x7f HTTP/1.1\r\nHost: \x00\r\n\r\n",
    ):
        with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
            connection.sendall(nonsense + b"\r\n\r\n")
            assert connection.recv(1000).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/9.9 4"))
    assert ask(page, "/healthz").body == b"ok\n"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.slow
def test_silent_connections_are_closed(page: str, caplog: pytest.LogCaptureFixture) -> None:
    """Connections that ask for nothing are too many at some time, and are closed then and after a while."""
    parts = urlsplit(page)
    address = (parts.hostname, parts.port)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(500)]
        for connection in silent:
            connection.setblocking(False)

        def closed() -> int:
            return sum(is_closed(connection) for connection in silent)

        until(lambda: closed() >= 80, "connections have no bound")
        until(lambda: closed() == len(silent), "silent connections stay for ever")
        assert ask(page, "/api/state").status == 200
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_files_are_kept_by_their_etag(page: str) -> None:
    first = ask(page, "/static/index.html")
    assert (first.status, first.headers["cache-control"]) == (200, "no-cache")
    again = ask(page, "/static/index.html", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert ask(page, "/").body == first.body


def test_state_is_compressed_where_asked(page: str, store: Store) -> None:
    for number in range(20):
        put_job(store, f"job{number}")
    plain = ask(page, "/api/state")
    packed = ask(page, "/api/state", headers={"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert len(packed.body) < len(plain.body) / 3
