"""Trainers that are killed around their checkpoints: each sample once, relative to the state that survives."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.fast.master.conftest import Create, Lead
from tests.jobs.master.processes import running, train
from tests.waiting import DEADLINE_S


def survived(folder: Path) -> Counter[int]:
    """What the checkpoints have counted together."""
    counts: Counter[int] = Counter()
    for path in folder.glob("checkpoint.*"):
        counts.update({int(sample): count for sample, count in json.loads(path.read_text())["counts"].items()})
    return counts


@pytest.mark.timeout(600)
def test_killed_before_its_checkpoint(lead: Lead, create: Create, tmp_path: Path) -> None:
    """Shards that were reported after the last checkpoint are done again: their samples died with the process."""
    master = lead()
    create(500, commit="checkpoint", max_failures=100, lease_s=8.0, session_s=8.0)  # the first life has no checkpoint
    seen = str(tmp_path / "seen")
    with running(train, str(tmp_path), "b", 10_000, 25, 0.1, seen):  # slow enough to leave the other some
        for limit, saving in ((33, True), (57, False), (90, True)):
            with running(train, str(tmp_path), "a", limit, 40, 0.002, seen, saving) as worker:
                worker.join(DEADLINE_S)
                assert worker.exitcode == -signal.SIGKILL
        with running(train, str(tmp_path), "a", 10_000, 40, 0.002, seen) as worker:
            worker.join(DEADLINE_S)
            assert worker.exitcode == 0
        assert master.wait_done(DEADLINE_S)
    assert survived(tmp_path) == Counter(range(500))
    done = Path(seen).read_text().splitlines()
    assert len(done) > 500, "samples that died with their process were done again"
