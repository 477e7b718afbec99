"""A sharded state that four ranks stored comes back in worlds of other sizes, through EDL and through DCP alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edl.collective.checkpoint.storage.writer import CheckpointWriter
from tests.fast.collective.checkpoint.counted import reads
from tests.jobs.collective.checkpoint.test_checkpoint import same
from tests.jobs.collective.checkpoint.world import run

pytestmark = pytest.mark.timeout(300)  # the first test waits for torch's import as well


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the ranks said, and where their state is stored; their memory is lost afterwards."""
    folder = tmp_path_factory.mktemp("world")
    said = run(4, "save", folder, kind="fsdp")
    slots = [folder / f"slots-{rank}" for rank in range(4)]
    node, other = (CheckpointWriter(str(folder / "c"), run=lambda: "0" * 16) for _ in range(2))
    first, second = node.write_newest(slots[:2]), other.write_newest(slots[2:])
    assert first is not None
    assert second is not None
    assert (first.committed, second.committed) == (False, True)
    for path in folder.glob("slots-*"):
        path.unlink()
    return said[0], folder / "c"


@pytest.mark.parametrize("size", [2, 3])
def test_another_world_restores_it(tmp_path: Path, stored: tuple[dict[str, Any], Path], size: int) -> None:
    saved, url = stored
    for after in run(size, "restore", tmp_path, kind="fsdp", storage=f"counted://{url}"):
        assert (after["step"], after["changes"]) == (4, [[4, size, 4]])
        same(saved, after, without=("buffers",))


def test_ranks_share_out_what_all_need(tmp_path: Path) -> None:
    """Each byte of a replicated state is read by one of three ranks, which gives it to the others."""
    folder, url = tmp_path / "old", tmp_path / "c"
    folder.mkdir()
    saved = run(2, "save", folder, kind="ddp")
    CheckpointWriter(str(url), run=lambda: "0" * 16).write_newest([folder / "slots-0", folder / "slots-1"])
    for after in run(3, "restore", tmp_path, kind="ddp", storage=f"counted://{url}"):
        assert after["step"] == 4
        same(saved[0], after, without=("buffers",))
    counted = reads(tmp_path)
    assert sum(counted) <= next(url.glob("*/__0_0.distcp")).stat().st_size
    assert len(counted) <= 2


def test_one_process_restores_without_fsdp(tmp_path: Path, stored: tuple[dict[str, Any], Path]) -> None:
    """One process restores it without fsdp."""
    saved, url = stored
    (after,) = run(1, "restore", tmp_path, kind="plain", storage=str(url))
    same(saved, after, without=("buffers",))


def test_dcp_alone_loads_it_in_two(tmp_path: Path, stored: tuple[dict[str, Any], Path]) -> None:
    saved, url = stored
    (checkpoint,) = url.iterdir()
    for after in run(2, "dcp_load", tmp_path, kind="fsdp", checkpoint=str(checkpoint)):
        for key in ("model", "optimizer"):
            assert after[key] == saved[key], key


def test_ranks_agree_on_run_without_agent(tmp_path: Path) -> None:
    """Under plain torchrun all generations are 0: a world's pieces must find each other, and no other world's."""
    url = tmp_path / "c"
    for attempt in range(2):
        slots = [f"slots-{attempt}-{rank}" for rank in range(2)]
        run(2, "save", tmp_path, kind="fsdp", storage=str(url), slots=slots)
        stored = {path.name: {one.name for one in path.glob("piece-*")} for path in url.iterdir()}
        assert len(stored) == attempt + 1
        for name, pieces in stored.items():
            assert name.startswith("step-4.g-0.r-")
            assert not name.endswith(".tmp")
            assert pieces == {"piece-0.json", "piece-1.json"}
