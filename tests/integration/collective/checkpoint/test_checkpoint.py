"""A world saves, dies, and another one goes on from its memory, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.collective.checkpoint.world import ROOT, run

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


def test_ranks_that_lack_the_state_are_given_it(tmp_path: Path) -> None:
    """One of two dies with its memory, and two new ones join."""
    saved = run(2, "save", tmp_path, kind="ddp")
    slots = ["new-a", "slots-1", "new-b"]
    restored = run(3, "restore", tmp_path, kind="ddp", slots=slots, generation=1)
    for after in restored:
        assert (after["step"], after["changes"]) == (4, [[2, 3, 4]])
        same(saved[1], after)
    again = run(3, "restore", tmp_path, kind="ddp", slots=slots, generation=2)
    assert [one["step"] for one in again] == [5, 5, 5]


def test_nothing_is_restored_where_there_is_nothing(tmp_path: Path) -> None:
    assert [one["step"] for one in run(2, "restore", tmp_path, kind="ddp")] == [-1, -1]


def test_shards_come_back_to_ranks_that_changed_places(tmp_path: Path) -> None:
    saved = run(2, "save", tmp_path, kind="fsdp")
    restored = run(2, "restore", tmp_path, kind="fsdp", slots=["slots-1", "slots-0"], generation=1)
    for before, after in zip(saved, restored, strict=True):
        assert after["step"] == 4
        same(before, after)
        assert after["next"] == before["next"]


def test_shards_are_put_together_for_a_world_of_another_size(tmp_path: Path) -> None:
    saved = run(2, "save", tmp_path, kind="fsdp")
    restored = run(3, "restore", tmp_path, kind="fsdp", generation=1)
    for after in restored:
        assert (after["step"], after["changes"]) == (4, [[2, 3, 4]])
        same(saved[0], after, without=("buffers",))


def test_a_sharded_state_of_which_a_part_is_lost_is_not_used(tmp_path: Path) -> None:
    run(2, "save", tmp_path, kind="fsdp")
    for path in tmp_path.glob("slots-1.*"):
        path.unlink()
    assert [one["step"] for one in run(2, "restore", tmp_path, kind="fsdp", generation=1)] == [-1, -1]


def test_a_live_state_is_given_to_all(tmp_path: Path) -> None:
    said = run(2, "broadcast", tmp_path, kind="plain")
    assert said[0]["rest"][0] == 11
    for one in said[1:]:
        same(said[0], one)


def test_a_sharded_live_state_is_refused_on_all_ranks_in_words(tmp_path: Path) -> None:
    said = run(2, "broadcast_refused", tmp_path, kind="fsdp")
    assert ["sharded" in one for one in said] == [True, True]


@pytest.mark.serial
@pytest.mark.alone
def test_a_wait_for_a_rank_that_is_late_is_no_save_and_one_for_a_longer_copy_is(tmp_path: Path) -> None:
    said = run(2, "waits", tmp_path, late=0, slow=1, seconds=2.0)
    (came_late, waited_for_copy), (waited_for_late, copied) = said
    assert waited_for_late["AGREE"] > 1.2
    assert waited_for_late["SAVE"] < 0.8
    assert came_late["AGREE"] + came_late["SAVE"] < 0.8
    assert copied["SAVE"] > 1.9
    assert waited_for_copy["SAVE"] > 1.2
    assert waited_for_copy["AGREE"] < 0.8


@pytest.mark.parametrize(("width", "behind"), [(300, 0), (1500, 1)], ids=["copied at once", "copied beside the next"])
def test_killed_at_any_instant_a_job_goes_on_from_one_of_its_last_steps(
    tmp_path: Path, width: int, behind: int
) -> None:
    command = [sys.executable, "-m", "tests.integration.collective.checkpoint.kills", str(tmp_path), "20", str(width)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rounds) == 20
    for finished, restored in rounds:
        assert finished - behind <= restored <= finished + 1
