"""A store with a page on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edl.dashboard import streams
from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import Store


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pages look at their store, and after their connections and certificates, more often than once a second."""
    monkeypatch.setattr(streams, "INTERVAL_S", 0.05)
    monkeypatch.setattr("edl.http_server.server.CHECK_EVERY_S", 0.05)


@pytest.fixture
def page(url: str, store: Store) -> Iterator[str]:
    """The URL of a page on the store."""
    with DashboardServer(DashboardSettings(url, port=0)) as server:
        yield server.url
