"""A node that is asked to leave: its workers get the signal and time to end, and it waits for nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.collective.job_records import JobState, Node, World, prefix
from edl.discovery import open_store
from tests.jobs.collective.job import TRAIN_STATE, Job
from tests.jobs.collective.job import Node as Agent
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

# As scripts for preemptible machines are written; torchrun gives them 30 s.
SAVES = """
import os, signal, sys, time

def save(number, frame):
    open(f"begun-{os.environ['RANK']}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
    open(f"saved-{os.environ['RANK']}", "w").write(str(number))
    sys.exit(0)

signal.signal(int(sys.argv[1]), save)
open(f"ready-{os.environ['RANK']}", "w").close()
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, options=("--nnodes", "1:2")) as job:
        yield job
        job.nothing_is_left()


def all_of(folder: Path, what: str) -> bool:
    return all((folder / f"{what}-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("ends", ["handlers end", "grace period ends"])
def test_handlers_have_time_to_save(job: Job, tmp_path: Path, ends: str) -> None:
    """Until each worker's handler has come to its end, or the grace period is over."""
    (tmp_path / "saves.py").write_text(SAVES)
    number = signal.SIGINT if ends == "handlers end" else signal.SIGTERM
    grace = ("--grace-period", "1" if ends == "grace period ends" else "600")
    node = job.start("--nproc-per-node", "2", *grace, command=["saves.py", str(int(number))])
    wait_until(lambda: all_of(tmp_path, "ready"), "the script runs")
    for other in (signal.SIGHUP, signal.SIGTERM):
        # Slurm and systemd ask all processes of a job, also the one that workers are forked from.
        os.kill(node.zygote, other)
    node.kill(number)
    if ends == "handlers end":
        wait_until(lambda: all_of(tmp_path, "begun"), "the handlers run")
        (tmp_path / "go").touch()
    assert node.wait() == 128 + number, node.output
    assert all_of(tmp_path, "saved") is (ends == "handlers end")
    if ends == "handlers end":
        assert (tmp_path / "saved-0").read_text() == str(int(number)), "it got the signal that the node got"


def test_handlers_run_after_the_pause(tmp_path: Path) -> None:
    """With a `Checkpointer` the state is saved first, so what a handler saves is that step as well."""
    script = tmp_path / "script.py"
    handler = "signal.signal(signal.SIGTERM, lambda *_: (open('handled', 'w').write(str(steps())), sys.exit(0)))"
    steps = "def steps(): return len(open('steps.jsonl').readlines()) - 1"
    source = TRAIN_STATE.read_text().replace("    main()\n", f"    import signal\n    {handler}\n    main()\n")
    script.write_text(source.replace("def main()", f"{steps}\n\n\ndef main()", 1))
    with Job(tmp_path, options=("--nnodes", "1"), command=[str(script), str(tmp_path)]) as job:
        node = job.start()
        wait_until(lambda: any(one.step > 5 for one in job.steps()), "steps")
        node.kill(signal.SIGTERM)
        assert node.wait() == 143, node.output
        last = max(one.step for one in job.steps())
        assert (tmp_path / "handled").read_text() == str(last), node.output


def test_ctrl_c_ends_and_job_resumes(tmp_path: Path) -> None:
    with Job(tmp_path, options=("--nnodes", "1", "--nproc-per-node", "2")) as job:
        node = job.start()
        job.wait_for_world(2)
        os.killpg(node.pid, signal.SIGINT)
        assert node.wait() == 130
        assert "Traceback" not in node.output
        job.nothing_is_left()

        # Once more, and asked twice in a moment, while the workers cannot even be asked.
        at, node = time.monotonic(), job.start()
        job.wait_for_world(2, after=at)
        for pid in node.workers:
            os.kill(pid, signal.SIGSTOP)
        node.kill(signal.SIGTERM)
        node.kill(signal.SIGTERM)
        assert node.wait() == 143
        job.nothing_is_left()
        steps = sorted({one.step for one in job.steps()})
        assert steps == list(range(len(steps)))


def test_signal_ends_what_an_agent_waits_for(job: Job, tmp_path: Path) -> None:
    """Imports of the script, others to check or be checked with, and nodes of a failed job: each would take minutes."""
    (tmp_path / "endless.py").write_text("import time, pathlib\npathlib.Path('begun').touch()\ntime.sleep(1000)\n")
    (tmp_path / "script.py").write_text("import endless\n")
    leaves(job, job.start("--preload", "endless", command=["script.py"]), (tmp_path / "begun").exists)

    with open_store(job.url) as store:
        job.name += "-checks"
        waiting = prefix(job.name) + "check/waiting/"
        node = job.start("--node-check", "--rdzv-conf", "last_call_timeout=1000")
        leaves(job, node, lambda: store.list(waiting))
        assert not store.list(waiting)

        node = job.start("--node-check", "--rdzv-conf", "last_call_timeout=0")
        leaves(job, node, lambda: "checking itself" in node.output)

        job.name += "-fails"
        with store.lease(60.0) as lease:
            store.put(prefix(job.name) + "world", World(3, JobState.FAILED, message="it raised").encode())
            store.put(prefix(job.name) + "nodes/last", Node("last", "127.0.0.1", 1, 1).encode(), lease)
            leaves(job, job.start("--lease-ttl", "600"), job.shared_memory.exists)


def leaves(job: Job, node: Agent, waits: Callable[[], object]) -> None:
    """A node is asked to leave as soon as it waits."""
    wait_until(waits, "it waits")
    node.kill(signal.SIGTERM)
    assert node.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in node.output
    job.nothing_is_left()
