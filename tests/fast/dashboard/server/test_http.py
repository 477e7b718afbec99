"""The page over HTTP: state, files, methods and headers; and who gets it: names of the server, tokens, TLS."""

from __future__ import annotations

import base64
import json
import logging
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from edl.cli import main
from edl.dashboard import server as server_module
from edl.dashboard.server import HEADERS, DashboardServer, DashboardSettings
from edl.dashboard.state.schema import DashboardState
from edl.discovery import Instance, Registry, Store
from edl.errors import SettingsError
from edl.http_server import server as connections
from edl.settings import Credentials
from tests.certificates import Authority, put
from tests.fast.dashboard.server import EventClient, ask, now_s, put_job, put_master
from tests.waiting import DEADLINE_S, wait_until

NASTY = '<img src=x onerror=alert(1)>"&'


def test_two_jobs_and_a_service(page: str, registry: Registry, store: Store) -> None:
    put_job(store, "first", "ab")
    put_job(store, "second", "c", step=3)
    put_master(store, "first")
    with registry.register(Instance("digits", "t1", "127.0.0.1", 1, model="m")):
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


def test_wrong_methods_and_paths(page: str) -> None:
    for path in ("/", "/api/state", "/api/events", "/metrics", "/healthz"):
        head = ask(page, path, "HEAD")
        assert (head.status, head.body) == (200, b""), path
        for method in ("POST", "PUT", "DELETE"):
            assert ask(page, path, method).status == 405, (path, method)
    assert ask(page, "/api").status == 404
    assert ask(page, "/static/").status == 404
    for path in (
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/%2e%2e/__init__.py",
        "/static/index.html%00.js",
        "/static/..\\server.py",
        "/..%2f..%2fpyproject.toml",
    ):
        assert ask(page, path).status in (400, 404), path


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


TOKEN = "a-token-that-nobody-guesses"


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return put(tmp_path / "tokens", f"{TOKEN}\nanother-long-enough-token\n")


@pytest.fixture
def closed(url: str, store: Store, token_file: str) -> Iterator[str]:
    """The URL of a page that asks for a token."""
    put_job(store, "resnet")
    with DashboardServer(DashboardSettings(url, port=0, credentials=Credentials(token_file=token_file))) as server:
        yield server.url


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:9", 200),  # another port: a tunnel's
        ("localhost", 200),
        ("[::1]:8650", 200),
        ("", 403),
        ("evil.example", 403),
        ("localhost.evil.example:8650", 403),
        ("10.0.0.7", 403),  # no way to reach 127.0.0.1
        ("[", 403),
    ],
)
def test_rebound_names_get_nothing(page: str, store: Store, host: str, status: int) -> None:
    """A stranger's page may have its name mean 127.0.0.1, and ask then."""
    put_job(store, "resnet")
    for path in ("/", "/api/state", "/api/events" if status != 200 else "/metrics", "/static/index.html"):
        answer = ask(page, path, headers={"Host": host})
        assert answer.status == status, path
        if status != 200:
            assert b"resnet" not in answer.body
    for path in ("/healthz", "/livez", "/readyz"):
        assert ask(page, path, headers={"Host": host}).body == b"ok\n", path


def test_open_page_for_others_warns(url: str, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Addresses are no names that could be rebound, so a page for others answers to all of them."""
    with caplog.at_level(logging.WARNING), DashboardServer(DashboardSettings(url, host="0.0.0.0", port=0)) as server:
        assert "without a token" in caplog.text
        assert ask(server.url, "/api/state", headers={"Host": "10.0.0.7:8650"}).status == 200
        assert ask(server.url, "/api/state", headers={"Host": "evil.example"}).status == 403
    settings = DashboardSettings(url, port=0, allowed_hosts=("dash.example.com",))
    with DashboardServer(settings) as server:
        assert ask(server.url, "/", headers={"Host": "dash.example.com"}).status == 200
        assert ask(server.url, "/", headers={"Host": "other.example.com"}).status == 403


def basic(token: str) -> dict[str, str]:
    """What a browser sends whose user gave a name and this password."""
    return {"Authorization": f"Basic {base64.b64encode(f'me:{token}'.encode()).decode()}"}


def test_nothing_without_a_token(closed: str, token_file: str, caplog: pytest.LogCaptureFixture) -> None:
    """A browser asks for a password, which is the token, and is worth nothing when the token is taken back."""
    wrong = {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Basic x"}, basic("wrong")
    for path in ("/", "/api/state", "/api/events", "/metrics", "/static/index.html"):
        for headers in ({}, *wrong):
            answer = ask(closed, path, headers=headers)
            assert (answer.status, answer.headers["www-authenticate"][:12]) == (401, "Basic realm="), (path, headers)
            assert b"resnet" not in answer.body
    for path in ("/healthz", "/livez", "/readyz"):
        assert ask(closed, path).status == 200, path
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(closed, "/api/state", headers=bearer).json()["jobs"]
    assert ask(closed, "/api/state", headers={"Authorization": "bearer another-long-enough-token"}).status == 200
    assert ask(closed, "/", headers=basic(TOKEN)).status == 200
    with EventClient(closed, basic(TOKEN)) as client:
        assert client.next()[0] == "state"
    assert TOKEN not in caplog.text
    put(Path(token_file), "a-new-token-of-good-length\n")
    wait_until(lambda: ask(closed, "/api/state", headers=basic(TOKEN)).status == 401, "the token is still good")
    assert ask(closed, "/api/state", headers=bearer).status == 401


def test_page_over_tls(url: str, store: Store, tmp_path: Path, token_file: str) -> None:
    """Certificates that are replaced are taken up; programs show a token."""
    authority = Authority()
    authority.save(tmp_path)
    credentials = Credentials(**authority.issue().save(tmp_path), token_file=token_file)
    with DashboardServer(DashboardSettings(url, host="127.0.0.1", port=0, credentials=credentials)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cadata=authority.pem.decode())
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        request = urllib.request.Request(f"{server.url}api/state", headers={"Authorization": f"Bearer {TOKEN}"})
        with opener.open(request, timeout=30) as answer:
            assert json.load(answer)["stale"] == ""
        before = certificate(server.url)
        authority.issue().save(tmp_path)
        wait_until(lambda: certificate(server.url) != before, "the new certificate is not in use")


def certificate(url: str) -> str:
    parts = urlsplit(url)
    return ssl.get_server_certificate((parts.hostname or "", parts.port or 0), timeout=30)


def test_tokens_do_not_cross_the_network(url: str, token_file: str) -> None:
    with pytest.raises(SettingsError, match="without TLS"):
        DashboardSettings(url, host="0.0.0.0", credentials=Credentials(token_file=token_file))
    DashboardSettings(url, host="0.0.0.0", credentials=Credentials(token_file=token_file, allow_insecure_tokens=True))
