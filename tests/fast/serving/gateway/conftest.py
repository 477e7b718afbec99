"""Gateways and the small engine, ended with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast.serving.gateway.formula_engine import FormulaEngine
from tests.fast.serving.gateway.gateways import Gateways


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Gateways]:
    started = Gateways(tmp_path)
    yield started
    started.close()


@pytest.fixture
def engine() -> Iterator[FormulaEngine]:
    server = FormulaEngine()
    yield server
    server.close()
