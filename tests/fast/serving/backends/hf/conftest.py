"""Tiny random models of transformers, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fast.serving.backends.hf import checkpoints


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
