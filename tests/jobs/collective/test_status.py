"""`edl status` of a job that really runs, whose worker is killed, and then its node."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from edl.cli import main
from tests.jobs.collective.job import TRAIN_STATE, Job
from tests.waiting import wait_until


@pytest.mark.timeout(400)
def test_kills_show_in_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the agent its status pages are gone: what was finished before is known by the store, and counts as lost."""

    def status() -> dict[str, Any]:
        capsys.readouterr()
        assert main(["status", job.name, "--json", "--store", job.url]) == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    def wait_for(generation: int, step: int) -> dict[str, Any]:
        """Until the status has this step, or a later one, of this generation."""

        def there() -> dict[str, Any] | None:
            told = status()
            steps = [node["step"] for node in told["nodes"] if node["step"] is not None]
            return told if told["generation"] == generation and max(steps, default=-1) >= step else None

        return wait_until(there, f"step {step} of generation {generation}") or {}

    command = [str(TRAIN_STATE), str(tmp_path), "0.05", "1000000"]  # the first step is saved, and none after it
    with Job(tmp_path, ("--nnodes", "1"), command) as job:
        began_s = time.time()
        node = job.start()
        job.wait_for_world(1)
        told = wait_for(0, 20)
        assert (told["state"], told["world_size"], told["nodes"][0]["ranks"]) == ("running", 1, [0])
        os.kill(node.workers[0], signal.SIGKILL)
        finished = wait_for(1, 40)["nodes"][0]["step"]
        node.signal_all(signal.SIGKILL)
        node.wait()
        again = job.start()
        wait_for(2, finished + 20)
        job.end()
        assert again.wait() == 0
        ended = status()
    assert (ended["state"], ended["generation"]) == ("done", 2)
    assert ended["step"] >= finished + 20
    seconds = ended["seconds"]
    assert sum(seconds.values()) == pytest.approx(ended["elapsed_s"])
    assert ended["elapsed_s"] <= time.time() - began_s
    assert seconds["train"] >= (finished + 20) * 0.05
    assert seconds["rollback"] >= 0.9 * (20 + finished) * 0.05
    assert seconds["load"] > 0
    assert 0 < ended["goodput"] < 1
    assert {"join", "generation", "restart"} <= {event["kind"] for event in ended["events"]}
    assert "SIGKILL" in str(ended["events"])
