"""A world saves, dies, and another one goes on from its memory, bit for bit."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_a_world_goes_on_from_its_own_memory(tmp_path: Path, kind: str) -> None:
    size = 1 if kind == "plain" else 2
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


def test_nothing_is_restored_from_nothing(tmp_path: Path) -> None:
    """Nothing is restored where there is nothing."""
    assert [one["step"] for one in run(2, "restore", tmp_path, kind="ddp")] == [-1, -1]


def test_shards_follow_ranks_to_new_places(tmp_path: Path) -> None:
    """Shards come back to ranks that changed places."""
    saved = run(2, "save", tmp_path, kind="fsdp")
    restored = run(2, "restore", tmp_path, kind="fsdp", slots=["slots-1", "slots-0"], generation=1)
    for before, after in zip(saved, restored, strict=True):
        assert after["step"] == 4
        same(before, after)
        assert after["next"] == before["next"]


def test_shards_for_another_world_size(tmp_path: Path) -> None:
    """Shards are put together for a world of another size."""
    saved = run(2, "save", tmp_path, kind="fsdp")
    restored = run(3, "restore", tmp_path, kind="fsdp", generation=1)
    for after in restored:
        assert (after["step"], after["changes"]) == (4, [[2, 3, 4]])
        same(saved[0], after, without=("buffers",))


def test_partly_lost_shards_are_not_used(tmp_path: Path) -> None:
    """A sharded state of which a part is lost is not used."""
    run(2, "save", tmp_path, kind="fsdp")
    for path in tmp_path.glob("slots-1.*"):
        path.unlink()
    assert [one["step"] for one in run(2, "restore", tmp_path, kind="fsdp", generation=1)] == [-1, -1]


def test_a_live_state_is_given_to_all(tmp_path: Path) -> None:
    said = run(2, "broadcast", tmp_path, kind="plain")
    assert said[0]["rest"][0] == 11
    for one in said[1:]:
        same(said[0], one)


def test_sharded_live_state_is_refused(tmp_path: Path) -> None:
    """A sharded live state is refused on all ranks in words."""
    said = run(2, "broadcast_refused", tmp_path, kind="fsdp")
    assert ["sharded" in one for one in said] == [True, True]


@pytest.mark.serial
@pytest.mark.alone
def test_waits_are_told_from_copies(tmp_path: Path) -> None:
    """A wait for a rank that is late is no save and one for a longer copy is."""
    said = run(2, "waits", tmp_path, late=0, slow=1, seconds=2.0)
    (came_late, waited_for_copy), (waited_for_late, copied) = said
    assert waited_for_late["AGREE"] > 1.2
    assert waited_for_late["SAVE"] < 0.8
    assert came_late["AGREE"] + came_late["SAVE"] < 0.8
    assert copied["SAVE"] > 1.9
    assert waited_for_copy["SAVE"] > 1.2
    assert waited_for_copy["AGREE"] < 0.8


@pytest.mark.parametrize(("width", "behind"), [(300, 0), (1500, 1)], ids=["copied at once", "copied beside the next"])
def test_killed_at_any_instant_goes_on(tmp_path: Path, width: int, behind: int) -> None:
    """Killed at any instant a job goes on from one of its last steps."""
    command = [sys.executable, "-m", "tests.jobs.collective.checkpoint.kills", str(tmp_path), "20", str(width)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rounds) == 20
    for finished, restored in rounds:
        assert finished - behind <= restored <= finished + 1
