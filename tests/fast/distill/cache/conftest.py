"""What the cache logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "edl.distill"):
        yield lambda: [record.getMessage() for record in caplog.records]
