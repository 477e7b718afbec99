"""Tiny random models of transformers, made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fast.serving.backends.hf import checkpoints


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of torch: for models of this size, more of them wait for one another wherever something else has the cores."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
