"""Every test that asks for a `place` runs over a file and over a store; tests/services/master has the real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast.master.journal.places import FilePlace, Place, StorePlace


@pytest.fixture(params=["file", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found: Place
    if request.param == "file":
        found = FilePlace(tmp_path / "folder" / "journal.sqlite")
    else:
        found = StorePlace(f"sqlite:///{tmp_path}/store.sqlite", "job")
    yield found
    found.close()
