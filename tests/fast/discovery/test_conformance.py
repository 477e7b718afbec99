"""The conformance suite over what needs no server of others: SQLite, and the store that an agent serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast.discovery.conformance.backends import ServedBackend
from tests.fast.discovery.conformance.suite import RegistrySuite, StoreSuite


class TestSqliteRegistry(RegistrySuite):
    pass


class TestSqliteStore(StoreSuite):
    pass


class Served:
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[ServedBackend]:
        backend = ServedBackend(tmp_path / "served.sqlite")
        yield backend
        backend.stop()


class TestServedRegistry(Served, RegistrySuite):
    pass


class TestServedStore(Served, StoreSuite):
    pass
