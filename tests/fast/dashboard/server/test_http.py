"""The page's answers over HTTP: state, files, methods and headers."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from edl.cli import main
from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.dashboard.server import server as server_module
from edl.dashboard.server.headers import HEADERS
from edl.dashboard.state.schema import DashboardState
from edl.discovery import Store, open_registry
from edl.discovery.registry import Instance
from edl.http_server import connections
from tests.fast.dashboard.server import ask, now_s, put_job, put_master
from tests.waiting import DEADLINE_S, wait_until

NASTY = '<img src=x onerror=alert(1)>"&'


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
    history = jobs["first"]["history"]  # the ledger says where the time went while no page was open
    assert [point["t"] for point in history] == sorted(point["t"] for point in history)
    assert history[0]["seconds"]["rendezvous"] == 1.0
    assert history[-1]["seconds"]["train"] > 58.0
    (service,) = state["services"]
    assert [(teacher["id"], teacher["model"], teacher["state"]) for teacher in service["teachers"]] == [
        ("t1", "m", "ready")
    ]
    restart = next(event for event in state["events"] if event["kind"] == "restart" and event["job"] == "first")
    assert restart["cause"] == "rank 1 was killed"
    assert restart["decision"]


def test_status_shows_poisoned_shards(url: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a job of which there is nothing but a master's report."""
    put_master(store, "labels")
    assert main(["status", "labels", "--store", url]) == 0
    out = capsys.readouterr().out
    assert "job labels: running" in out
    assert "dataset train: 1 poisoned, 8 shards done, 2 at work, 5 to do, epoch 2 of 3" in out
    assert "poisoned: shard 3 (units 30 to 40): cannot decode <b> (h1)" in out
    put_master(store, "labels", time=now_s() - 600)
    assert main(["status", "labels", "--store", url]) == 0
    assert "silent" in capsys.readouterr().out


def test_every_answer_has_the_headers(page: str, store: Store) -> None:
    """Files are kept by their ETag, a state is compressed where that is asked for, and names with HTML stay text."""
    for path in ("/", "/static/index.html", "/api/state", "/metrics", "/healthz", "/nowhere"):
        answer = ask(page, path)
        for name, value in HEADERS.items():
            assert answer.headers[name.lower()] == value, path
        assert "cache-control" in answer.headers or answer.status == 404
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
    first = ask(page, "/static/index.html")
    assert (first.status, first.headers["cache-control"]) == (200, "no-cache")
    again = ask(page, "/static/index.html", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    assert ask(page, "/").body == first.body
    empty = ask(page, "/api/state").json()
    assert set(empty) == set(DashboardState.__dataclass_fields__)
    assert (empty["jobs"], empty["services"], empty["events"], empty["stale"]) == ([], [], [], "")
    for number in range(20):
        put_job(store, f"{NASTY}{number}")
    wait_until(lambda: len(ask(page, "/api/state").json()["jobs"]) == 20, "the jobs")
    plain, packed = ask(page, "/api/state"), ask(page, "/api/state", headers={"Accept-Encoding": "gzip"})
    assert plain.headers["content-type"].startswith("application/json")
    assert packed.headers["content-encoding"] == "gzip"
    assert len(packed.body) < len(plain.body) / 3
    assert b'job_name="<img src=x onerror=alert(1)>\\"&7"' in ask(page, "/metrics").body


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
        "/static/index.html%00.js",
        "/static/..\\server\\server.py",
        "/..%2f..%2fpyproject.toml",
    ],
)
def test_only_the_page_s_files_are_sent(page: str, path: str) -> None:
    assert ask(page, path).status in (400, 404)


def test_silent_connections_are_closed(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that ask for nothing are refused where they are too many, and closed after a while."""
    monkeypatch.setattr(server_module, "_MOST_CONNECTIONS", 5)
    with DashboardServer(DashboardSettings(url, port=0)) as server, ExitStack() as stack:
        address = (urlsplit(server.url).hostname, urlsplit(server.url).port)
        silent: list[socket.socket] = []

        def is_refused() -> bool:
            silent.append(stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S)))
            return is_closed(silent[-1], 0.05)

        wait_until(is_refused, "a connection too many")
        assert len(silent) > 5
        monkeypatch.setattr(connections, "_SILENCE_S", -1.0)
        assert all(is_closed(connection, DEADLINE_S) for connection in silent[:5])
        monkeypatch.undo()
        assert ask(server.url, "/api/state").status == 200


def is_closed(connection: socket.socket, timeout_s: float) -> bool:
    """Return whether the server closes a connection soon."""
    connection.settimeout(timeout_s)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
