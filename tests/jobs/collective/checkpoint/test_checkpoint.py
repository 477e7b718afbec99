"""A world saves, dies, and another one goes on from its memory, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.collective.checkpoint.world import ROOT, run

pytestmark = pytest.mark.timeout(300)  # the first test waits for torch's import as well

SAME = ("model", "buffers", "optimizer", "rest")


def same(one: dict[str, Any], other: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    for key in SAME:
        if key not in without:
            assert one[key] == other[key], key


@pytest.mark.parametrize(("kind", "size"), [("plain", 1), ("ddp", 2)])
def test_a_world_goes_on_from_its_own_memory(tmp_path: Path, kind: str, size: int) -> None:
    """Nothing is restored where there is nothing."""
    (tmp_path / "empty").mkdir()
    assert [one["step"] for one in run(size, "restore", tmp_path / "empty", kind=kind)] == [-1] * size
    saved = run(size, "save", tmp_path, kind=kind)
    restored = run(size, "restore", tmp_path, kind=kind, generation=1)
    for before, after in zip(saved, restored, strict=True):
        assert (after["step"], after["changes"]) == (4, [])
        same(before, after)
        assert after["next"] == before["next"], "each rank's random numbers go on"


def test_ranks_without_state_receive_it(tmp_path: Path) -> None:
    """One of two dies with its memory, and two new ones join."""
    saved = run(2, "save", tmp_path, kind="ddp")
    slots = ["new-a", "slots-1", "new-b"]
    restored = run(3, "restore", tmp_path, kind="ddp", slots=slots, generation=1)
    for after in restored:
        assert (after["step"], after["changes"]) == (4, [[2, 3, 4]])
        same(saved[1], after)
    again = run(3, "restore", tmp_path, kind="ddp", slots=slots, generation=2)
    assert [one["step"] for one in again] == [5, 5, 5]


def test_shards_come_back_to_other_ranks(tmp_path: Path) -> None:
    """To ranks that changed places, and put together for a world of another size; not if a part of them is lost."""
    saved = run(2, "save", tmp_path, kind="fsdp")
    for name in ("three", "part"):
        shutil.copytree(tmp_path, tmp_path / name, ignore=lambda *_: ["three", "part"])
    restored = run(2, "restore", tmp_path, kind="fsdp", slots=["slots-1", "slots-0"], generation=1)
    for before, after in zip(saved, restored, strict=True):
        assert after["step"] == 4
        same(before, after)
        assert after["next"] == before["next"]
    for after in run(3, "restore", tmp_path / "three", kind="fsdp", generation=1):
        assert (after["step"], after["changes"]) == (4, [[2, 3, 4]])
        same(saved[0], after, without=("buffers",))
    for path in (tmp_path / "part").glob("slots-1.*"):
        path.unlink()
    assert [one["step"] for one in run(2, "restore", tmp_path / "part", kind="fsdp", generation=1)] == [-1, -1]


def test_killed_at_any_instant_goes_on(tmp_path: Path) -> None:
    """Killed at any instant a job goes on from one of its last steps."""
    command = [sys.executable, "-m", "tests.jobs.collective.checkpoint.kills", str(tmp_path), "10", "300"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rounds) == 10
    for finished, restored in rounds:
        assert finished <= restored <= finished + 1


def test_dtensors_in_fields_come_back(tmp_path: Path) -> None:
    """In a dict, nested, in an object: made in the first step, so that a restarted script does not have them yet."""
    saved = run(2, "averages", tmp_path, step=4)
    shutil.copytree(tmp_path, tmp_path / "three", ignore=lambda *_: ["three"])
    restored = run(2, "averages", tmp_path, step=4, generation=1)
    assert [one["first"] for one in (*saved, *restored)] == [-1, -1, 4, 4]
    for after in (*restored, *run(3, "averages", tmp_path / "three", step=4, generation=1)):
        assert (after["first"], after["bits"], after["placed"]) == (4, saved[0]["bits"], saved[0]["placed"])


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
