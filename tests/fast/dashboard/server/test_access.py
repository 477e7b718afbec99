"""Who gets the page: names of the server, tokens, cookies, and TLS."""

from __future__ import annotations

import json
import logging
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import Store
from edl.errors import SettingsError
from edl.settings import Credentials
from tests.certificates import Authority, put
from tests.fast.dashboard.server import EventClient, ask, put_job
from tests.waiting import wait_until

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


def test_nothing_without_a_token(closed: str) -> None:
    for path in ("/api/state", "/api/events", "/metrics", "/static/index.html"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Cookie": f"x={TOKEN}"}):
            answer = ask(closed, path, headers=headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), (path, headers)
            assert b"resnet" not in answer.body
    front = ask(closed, "/")
    assert (front.status, front.headers["location"]) == (303, "login")
    for path in ("/healthz", "/livez", "/readyz"):
        assert ask(closed, path).status == 200, path
    assert ask(closed, "/api/state", headers={"Authorization": f"Bearer {TOKEN}"}).json()["jobs"]
    assert ask(closed, "/api/state", headers={"Authorization": "bearer another-long-enough-token"}).status == 200


def test_browser_logs_in_once(closed: str, caplog: pytest.LogCaptureFixture) -> None:
    """The cookie holds no token, and is no script's to read."""
    form = ask(closed, "/login")
    assert (form.status, form.headers["cache-control"]) == (200, "no-store")
    assert b'<form method="post"' in form.body
    fields = {"Content-Type": "application/x-www-form-urlencoded"}
    for wrong in (b"token=wrong", b"", b"token=%00%ff", b"token=a&token=b"):
        assert ask(closed, "/login", "POST", fields, wrong).status == 403
    assert ask(closed, "/login", "POST", fields, b"token=" + b"x" * 10_000).status == 413
    done = ask(closed, "/login", "POST", fields, f"token={TOKEN}".encode())
    assert (done.status, done.headers["location"]) == (303, "./")
    cookie = done.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    shown = {"Cookie": cookie.partition(";")[0]}
    assert ask(closed, "/", headers=shown).status == 200
    assert ask(closed, "/api/state", headers=shown).status == 200
    with EventClient(closed, shown) as client:
        assert client.next()[0] == "state"
    assert TOKEN not in caplog.text


def test_revoked_tokens_open_nothing(closed: str, token_file: str) -> None:
    """Neither do the cookies that they gave."""
    fields = {"Content-Type": "application/x-www-form-urlencoded"}
    cookie = ask(closed, "/login", "POST", fields, f"token={TOKEN}".encode()).headers["set-cookie"]
    shown = {"Cookie": cookie.partition(";")[0]}
    assert ask(closed, "/api/state", headers=shown).status == 200
    put(Path(token_file), "a-new-token-of-good-length\n")
    wait_until(lambda: ask(closed, "/api/state", headers=shown).status == 401, "the cookie is still good")
    assert ask(closed, "/api/state", headers={"Authorization": f"Bearer {TOKEN}"}).status == 401


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
