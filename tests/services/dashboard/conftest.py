"""For tests of the page: open it in a real browser, and want nothing amiss there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.fast.dashboard.server.conftest import store, url
from tests.plugins_chromium import Browser, Page
from tests.services.dashboard.page_server import PageServer

__all__ = ["look", "store", "url"]

DRAWN = "document.getElementById('content').dataset.time"

Look = Callable[..., tuple[PageServer, Page]]


@pytest.fixture
def look(browser: Browser) -> Iterator[Look]:
    """Serve a state, and open the page on it; afterwards the browser must have had nothing to complain of."""
    opened: list[tuple[PageServer, Page]] = []

    def open_page(state: Mapping[str, Any], port: int = 0) -> tuple[PageServer, Page]:
        server = PageServer(state, port)
        page = browser.open(server.url)
        opened.append((server, page))
        page.wait(DRAWN)
        return server, page

    yield open_page
    for server, opened_page in opened:
        opened_page.evaluate("1")  # what it said before has been read then
        troubles, requests = list(opened_page.troubles), list(opened_page.requests)
        opened_page.close()
        server.close()
        # A test that refuses streams or goes away has the browser say so.
        assert [each for each in troubles if not each.startswith("network: Failed to load resource")] == []
        assert {url for url in requests if not url.startswith(server.url)} <= {"about:blank"}


def publish(server: PageServer, page: Page, state: Mapping[str, Any], kind: str = "state") -> None:
    """Send a state, and wait until the page has drawn it."""
    server.publish(state, kind)
    page.wait(f"{DRAWN} === {str(_number(state['time']))!r}")


def _number(value: float) -> str:
    """Return a number as JavaScript writes it."""
    return str(int(value)) if value == int(value) else repr(value)
