"""Gateways and the small engine, ended with the test."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.fast.serving.gateway.formula_engine import FormulaEngine
from tests.fast.serving.gateway.gateways import Gateways


@pytest.fixture
def gateways(stack: ExitStack, tmp_path: Path) -> Gateways:
    return stack.enter_context(closing(Gateways(tmp_path)))


@pytest.fixture
def engine(stack: ExitStack) -> FormulaEngine:
    return stack.enter_context(closing(FormulaEngine()))
