"""Sharded tensors outside of modules and optimizers, and shards that several groups of ranks hold alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.collective.checkpoint.world import run

pytestmark = pytest.mark.timeout(300)  # the first test waits for torch's import as well


def test_dtensors_in_fields_come_back(tmp_path: Path) -> None:
    """In a dict, nested, in an object: made in the first step, so that a restarted script does not have them yet."""
    saved = run(2, "averages", tmp_path, step=4)
    restored = run(2, "averages", tmp_path, step=4, generation=1)
    assert [one["first"] for one in (*saved, *restored)] == [-1, -1, 4, 4]
    for after in restored:
        assert after["bits"] == saved[0]["bits"]
        assert after["placed"] == saved[0]["placed"]


def test_dtensors_come_back_elsewhere(tmp_path: Path) -> None:
    saved = run(2, "averages", tmp_path, step=4)
    for after in run(3, "averages", tmp_path, step=4, generation=1):
        assert (after["first"], after["bits"]) == (4, saved[0]["bits"])
        assert after["placed"] == saved[0]["placed"]


def test_an_unknown_mesh_is_refused(tmp_path: Path) -> None:
    for said in run(2, "averages", tmp_path, step=4, lost_mesh=True):
        assert "averages.shadow.0 could be saved, but not restored" in said["refused"]
    assert not [path for path in tmp_path.glob("slots-*") if path.stat().st_size > 4096]


@pytest.mark.parametrize("slots", [["slots-2", "slots-3"], ["new-0", "new-1", "slots-3", "slots-2"]], ids=["2", "4"])
def test_one_replica_group_is_enough(tmp_path: Path, slots: list[str]) -> None:
    """HSDP over two nodes of two workers: one node's memory is lost with it, the other one has all shards."""
    saved = run(4, "save", tmp_path, kind="hsdp")
    for after in run(len(slots), "restore", tmp_path, kind="hsdp", slots=slots, generation=1):
        assert after["step"] == 4
        for key in ("model", "optimizer", "rest"):
            assert after[key] == saved[0][key], key
