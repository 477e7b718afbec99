"""A SQLite file for each test, which must leave nothing open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fast.discovery.conformance.backends import SqliteBackend
from tests.fast.discovery.conformance.fixtures import folder, member, nothing_stays_open, registry, service, store

__all__ = ["folder", "member", "nothing_stays_open", "registry", "service", "store"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "discovery.sqlite"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def backend(path: Path) -> SqliteBackend:
    return SqliteBackend(path)
