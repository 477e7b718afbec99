"""Trainers that are killed around their checkpoints: each sample once, relative to the state that survives."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from edl.master import MasterClient, ShardReader
from tests.fast.master.conftest import Create, Lead
from tests.jobs.master.processes import running
from tests.waiting import DEADLINE_S


def train(folder: str, name: str, limit: int, every: int, pause_s: float, seen: str, saving: bool = False) -> None:
    """Count samples, in a checkpoint with the reader; after `limit` of them be killed in the middle of a step.

    With `saving` that is in the middle of the checkpoint that follows: the master has the mark, the disk has not.

    The process's state is the counts, which a checkpoint replaces as a whole, as a model's would be.
    """
    path = Path(folder) / f"checkpoint.{name}"
    counts: dict[str, int] = {}
    with (
        MasterClient("job", f"sqlite:///{folder}/store.sqlite", timeout_s=600) as client,
        ShardReader(client, "d", holder=name, prefetch=2) as reader,
    ):
        if path.exists():
            saved = json.loads(path.read_text())
            reader.load_state_dict(saved["reader"])
            counts = saved["counts"]
        else:
            reader.start_over()
        step = 0

        def save() -> None:
            state = {"reader": reader.state_dict(), "counts": counts}
            if saving and step >= limit:
                os.kill(os.getpid(), signal.SIGKILL)
            path.with_suffix(".new").write_text(json.dumps(state))
            path.with_suffix(".new").rename(path)

        with open(seen, "a", buffering=1) as log:  # noqa: PTH123
            for sample in reader.samples():
                counts[str(sample)] = counts.get(str(sample), 0) + 1
                log.write(f"{name} {sample}\n")
                step += 1
                if step == limit and not saving:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % every == 0:
                    save()
                time.sleep(pause_s)
        save()


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
