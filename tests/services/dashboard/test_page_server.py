"""The dashboard's page in a real browser, from the real server: what one sends is what the other draws."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the page's server needs aiohttp")

from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import open_store
from edl.settings import Credentials
from tests.plugins_chromium import Browser
from tests.plugins_consul import free_ports
from tests.services.dashboard.conftest import DRAWN

pytestmark = pytest.mark.chromium
TEXT = "document.body.innerText"
LIVE = "document.documentElement.dataset.connection === 'live'"
TOKEN = "0123456789abcdef0123456789abcdef"


def _wanted(count: int, reason: str) -> bytes:
    now = time.time()
    record = {"v": 1, "service": "digits", "count": count, "now": 1, "reason": reason, "since": now, "time": now}
    return json.dumps(record | {"decisions": [{"time": now, "from": 1, "count": count, "reason": reason}]}).encode()


def test_page_follows_a_store(browser: Browser, tmp_path: Path) -> None:
    """From nothing to a wanted count and another, and on over a restart of the server."""
    url = f"sqlite:///{tmp_path}/store.sqlite"
    settings = DashboardSettings(store=url, port=free_ports(1)[0])
    with open_store(url) as store:
        with DashboardServer(settings) as server:
            page = browser.open(server.url)
            page.wait(DRAWN)
            assert "Nothing runs here yet" in page.evaluate(TEXT)
            store.put("wanted/teachers/digits", _wanted(3, "students wait <b>much</b>"))
            page.wait(f"{TEXT}.includes('3 teachers wanted') && {TEXT}.includes('students wait <b>much</b>')")
            assert "Nothing runs here yet" not in page.evaluate(TEXT)
            store.put("wanted/teachers/digits", _wanted(4, "they wait more"))
            page.wait(f"{TEXT}.includes('4 teachers wanted')")
        page.wait(f"{TEXT}.includes('connection lost')")
        store.put("wanted/teachers/digits", _wanted(5, "nobody looks"))
        with DashboardServer(settings):
            page.wait(f"{LIVE} && {TEXT}.includes('5 teachers wanted')")
    page.evaluate("1")
    amiss = [each for each in page.troubles if not each.startswith("network: Failed to load resource")]
    assert amiss == [], "the page breaks the server's own policy"
    page.close()


def test_token_opens_the_page(browser: Browser, tmp_path: Path) -> None:
    """A form in place of the page, again where a restart made the cookie worthless."""
    (tmp_path / "tokens").write_text(TOKEN + "\n")
    (tmp_path / "tokens").chmod(0o600)
    url = f"sqlite:///{tmp_path}/store.sqlite"
    settings = DashboardSettings(
        store=url, port=free_ports(1)[0], credentials=Credentials(token_file=str(tmp_path / "tokens"))
    )
    form = "document.querySelector('input[type=password]')"
    with DashboardServer(settings) as server:
        page = browser.open(server.url)
        page.wait(f"!!{form}")
        page.evaluate(f"{form}.value = {TOKEN!r}; {form}.form.requestSubmit()")
        page.wait(f"document.getElementById('content')?.dataset.time && {LIVE}")
    with DashboardServer(settings):
        page.wait(f"!!{form}")
    page.close()
