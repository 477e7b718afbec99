"""Teacher processes for the reader's tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from edl.testing import LocalTeacher


class Start(Protocol):
    def __call__(self, model: str, **options: Any) -> LocalTeacher: ...


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts teachers, and ends them with the test."""
    started: list[LocalTeacher] = []

    def one(model: str, **options: Any) -> LocalTeacher:
        started.append(LocalTeacher(model, **options))
        return started[-1]

    yield one
    for teacher in started:
        teacher.close()


@pytest.fixture
def registry_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
