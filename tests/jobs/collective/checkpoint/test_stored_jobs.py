"""`edl run --checkpoint`: the nodes of a job store together, and another job goes on from there as a run of its own."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.jobs.collective.job import TRAIN_STATE, Job
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


SCRIPT = """
import sys

import torch
import torch.distributed as dist

from edl.collective import Checkpointer, State

dist.init_process_group("gloo")
state = State(total=torch.zeros(3))
with Checkpointer(state, interval_steps=1) as checkpointer:
    first = checkpointer.restore() + 1
    if dist.get_rank() == 0:
        sys.stdout.write(f"BEGINS AT {first} {state.total.tolist()}\\n")  # one write: the agent shares the pipe
    for step in range(first, first + 5):
        dist.all_reduce(torch.ones(1))
        state.total += 1
        checkpointer.save(step)
    checkpointer.save(step, force=True)
dist.destroy_process_group()
"""


def test_two_jobs_at_one_place(tmp_path: Path) -> None:
    """Two jobs one after the other at one place."""
    url, script = tmp_path / "checkpoints", tmp_path / "script.py"
    script.write_text(SCRIPT)
    for attempt in range(2):
        options = ("--nnodes", "2", "--lease-ttl", "60", "--checkpoint", str(url), "--checkpoint-interval", "1000")
        with Job(tmp_path / f"job{attempt}", options=options, command=[str(script)]) as job:
            nodes = [job.start(), job.start()]
            assert [node.wait() for node in nodes] == [0, 0]
            begins = f"BEGINS AT {5 * attempt} {[5.0 * attempt] * 3}"
            assert any(begins in node.output for node in nodes)
            assert any(f"stored the state after step {5 * attempt + 4}" in node.output for node in nodes)
            job.nothing_is_left()
        stored = sorted(url.iterdir())
        assert not any(path.name.endswith(".tmp") for path in stored), "all are complete"
        assert len({path.name.partition(".r-")[2] for path in stored}) == attempt + 1, "each job is a run of its own"
        newest = max(stored, key=lambda path: int(path.name.partition("-")[2].partition(".")[0]))
        manifest = json.loads((newest / "manifest.json").read_text())
        assert (manifest["step"], manifest["world"]) == (5 * attempt + 4, 2)


LOST = """
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from edl.collective import Checkpointer, State

dist.init_process_group("gloo")
with Checkpointer(State(total=torch.zeros(3)), interval_steps=1) as checkpointer:
    checkpointer.restore()
    checkpointer.save(0)
    shutil.rmtree(sys.argv[1])
    Path(sys.argv[1]).write_text("no folder any more")  # before the state is marked as one to store
dist.destroy_process_group()
"""


def test_unstored_last_state_is_stored_later(tmp_path: Path) -> None:
    """The storage is gone when the job is done. Its agent is killed, one leaves without it, and one stores it."""
    url, script = tmp_path / "checkpoints", tmp_path / "script.py"
    script.write_text(LOST)
    options = ("--nnodes", "1", "--checkpoint", str(url), "--checkpoint-interval", "1000")
    with Job(tmp_path / "job", options=options, command=[str(script), str(url)]) as job:
        node = job.start()
        wait_until(lambda: list(job.shared_memory.glob("*/unstored")), "the job is done, and its state not stored")
        assert "left incomplete" not in node.output, "the agent goes on trying"
        node.signal_all(signal.SIGKILL)
        node.wait()

        node = job.start()
        wait_until(lambda: "it is tried again" in node.output, "the storage refuses")
        node.process.terminate()
        wait_until(lambda: "asked once more, this node leaves without it" in node.output, "it goes on trying")
        node.process.terminate()
        assert node.wait() == 74
        assert "the job is done, its last state is not stored: exit code 74" in node.output
        job.nothing_is_left(state=True)

        url.unlink()
        code, output = job.run()
        assert code == 0, output
        assert f"stored the state after step 0 at {url}" in output
        assert len(list(url.glob("step-0.*/manifest.json"))) == 1
        job.nothing_is_left()
        assert "stored" not in job.run()[1]


def test_older_memory_gives_way_to_storage(tmp_path: Path) -> None:
    """An agent dies, the others go on and store, and are lost with their hosts: beside what the first one left."""
    folder, url = tmp_path / "job", tmp_path / "checkpoints"
    options = ("--nnodes", "1:2", "--checkpoint", str(url), "--checkpoint-interval", "0.5")
    with Job(folder, options=options, command=[str(TRAIN_STATE), str(folder)]) as job:
        first, second = job.start(), job.start()
        job.wait_for_world(2)
        lost = job.member(first)
        second.kill()
        second.wait()
        old = max(step.step for step in job.steps() if step.world == 2)
        wait_until(lambda: newest_stored(url) > old + 20, "the one that goes on stores")
        first.signal_all(signal.SIGKILL)
        first.wait()
        for path in job.shared_memory.glob("*/node"):
            if path.read_text() == lost:
                shutil.rmtree(path.parent)  # its host is gone
        stored, begun = newest_stored(url), time.monotonic()
        third = job.start()
        again = job.wait_for_world(1, after=begun)[0]
        assert "left its workers' state in memory here" in third.output, third.output
        assert again.step == stored + 1, f"memory ended near step {old}, storage has step {stored}"


def newest_stored(url: Path) -> int:
    """The last step with a manifest."""
    found = [path.parent.name for path in url.glob("step-*/manifest.json")]
    return max((int(name.partition("-")[2].partition(".")[0]) for name in found if ".tmp" not in name), default=-1)
