"""A store with a page on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.dashboard.server import DashboardServer, DashboardSettings
from edl.discovery import Store, open_store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as store:
        yield store


@pytest.fixture
def page(url: str, store: Store) -> Iterator[str]:
    """The URL of a page on the store."""
    with DashboardServer(DashboardSettings(url, port=0)) as server:
        yield server.url
