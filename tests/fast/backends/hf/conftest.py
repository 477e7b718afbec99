"""Tiny random models of transformers, made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fast.backends.hf import checkpoints
from tests.fast.serving.conftest import Inside, StartInside


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `checkpoints.MAKERS`."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            folder = made[name] = tmp_path_factory.mktemp(name)
            model: Any = checkpoints.MAKERS[name]()
            model.save_pretrained(folder)
        return made[name]

    return find


@pytest.fixture
def inside() -> Iterator[StartInside]:
    """Start servers in this process."""
    started: list[Inside] = []

    def start(*backends: Any, **settings: Any) -> Inside:
        started.append(Inside(*backends, **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()
