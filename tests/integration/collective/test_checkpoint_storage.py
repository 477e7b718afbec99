"""A sharded state that four ranks stored comes back in worlds of other sizes, through EDL and through DCP alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edl.collective.checkpoint.storage import Persister
from tests.integration.collective.checkpoint_world import run


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the ranks said, and where their state is stored; their memory is lost afterwards."""
    folder = tmp_path_factory.mktemp("world")
    said = run(4, "save", folder, kind="fsdp")
    slots = [folder / f"slots-{rank}" for rank in range(4)]
    node, other = Persister(str(folder / "c")), Persister(str(folder / "c"))
    first, second = node.persist(slots[:2]), other.persist(slots[2:])
    assert first is not None
    assert second is not None
    assert (first.committed, second.committed) == (False, True)
    for path in folder.glob("slots-*"):
        path.unlink()
    return said[0], folder / "c"


@pytest.mark.parametrize("size", [2, 3])
def test_another_world_restores_it(tmp_path: Path, stored: tuple[dict[str, Any], Path], size: int) -> None:
    saved, url = stored
    for after in run(size, "restore", tmp_path, kind="fsdp", storage=str(url)):
        assert (after["step"], after["changes"]) == (4, [[4, size, 4]])
        for key in ("model", "optimizer", "rest"):
            assert after[key] == saved[key], key


def test_one_process_restores_it_without_fsdp(tmp_path: Path, stored: tuple[dict[str, Any], Path]) -> None:
    saved, url = stored
    (after,) = run(1, "restore", tmp_path, kind="plain", storage=str(url))
    for key in ("model", "optimizer", "rest"):
        assert after[key] == saved[key], key


def test_dcp_alone_loads_it_in_two(tmp_path: Path, stored: tuple[dict[str, Any], Path]) -> None:
    saved, url = stored
    (checkpoint,) = url.iterdir()
    for after in run(2, "dcp_load", tmp_path, kind="fsdp", checkpoint=str(checkpoint)):
        for key in ("model", "optimizer"):
            assert after[key] == saved[key], key
