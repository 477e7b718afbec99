"""Workers that go on in the same process, in a job whose workers are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.collective.job import Job
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
SCRIPT = str(Path(__file__).with_name("train.py"))
Row = dict[str, Any]


def rows_of(folder: Path) -> dict[int, list[Row]]:
    """What each process wrote, by its id. A line that is being written is left out."""
    paths = [path for path in folder.glob("*.jsonl") if path.stem.isdigit()]
    return {int(path.stem): [json.loads(line) for line in path.read_text().split("\n")[:-1]] for path in paths}


def world(job: Job, size: int, after: int = -1) -> dict[int, Row]:
    """Wait until `size` ranks train in a generation later than `after`. Returns their last rows, by pid."""

    def found() -> dict[int, Row] | None:
        assert any(node.process.poll() is None for node in job.nodes)
        last = {pid: rows[-1] for pid, rows in rows_of(job.folder).items() if rows}
        newest = max((row["generation"] for row in last.values()), default=-1)
        together = {pid: row for pid, row in last.items() if row["generation"] == newest}
        complete = newest > after and {row["size"] for row in together.values()} == {len(together)} == {size}
        return together if complete else None

    return wait_until(found, f"a world of {size} after generation {after}") or {}


def check_steps(folder: Path) -> dict[int, str]:
    """No process lost or repeated a step, and all agree on the parameters after each. Returns their hash by step.

    A step that one survivor had finished when a peer died, and another had not, is handed to that one with the state:
    it is missing from its diary, at the seam of two generations, and in the other's.
    """
    hashes: dict[int, set[str]] = defaultdict(set)
    for rows in rows_of(folder).values():
        for row in rows:
            hashes[row["step"]].add(row["hash"])
            assert row["losses"] == row["step"] + 1
    assert sorted(hashes) == list(range(len(hashes)))
    assert not {step: found for step, found in hashes.items() if len(found) > 1}
    for rows in rows_of(folder).values():
        for before, after in pairwise(rows):
            most = 2 if after["generation"] > before["generation"] else 1
            assert before["step"] < after["step"] <= before["step"] + most
    return {step: found.pop() for step, found in hashes.items()}


def test_kills_lose_and_repeat_no_step(tmp_path: Path) -> None:
    """Survivors stay as they are, and all ends as under torchrun, where there is one generation."""
    steps, calm = "150", tmp_path / "calm"
    calm.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environ = {"OMP_NUM_THREADS": "1"}
    theirs = subprocess.run(
        [*torchrun, SCRIPT, str(calm), steps, "0"], env={**os.environ, **environ}, capture_output=True, timeout=100
    )
    assert theirs.returncode == 0, theirs.stderr
    assert {row["generation"] for rows in rows_of(calm).values() for row in rows} == {0}
    options = ("--nproc-per-node", "3", "--regroup-timeout", "90")  # who waits for a busy core is not replaced
    with Job(tmp_path, options, [SCRIPT, str(tmp_path), steps, "0.03"], environ=environ) as job:
        job.start()
        alive = world(job, 3)
        for victims in (1, 1, 2):
            survivors = sorted(alive)[victims:]
            for pid in sorted(alive)[:victims]:
                os.kill(pid, signal.SIGKILL)
            alive = world(job, 3, after=next(iter(alive.values()))["generation"])
            assert set(survivors) <= set(alive)
        assert job.nodes[0].wait() == 0
        assert len(rows_of(tmp_path)) == 7, "each kill cost one process, and brought one"
    assert check_steps(tmp_path) == check_steps(calm)
