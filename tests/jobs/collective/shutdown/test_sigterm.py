"""A node that is asked to leave: its workers get the signal, and time to end; of all nodes asked at once, one keeps."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.collective.job import TRAIN_STATE, Job, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


# As scripts for preemptible machines are written; torchrun gives them 30 s.
SAVES = """
import os, signal, sys, time

def save(number, frame):
    with open(f"begun-{os.environ['RANK']}", "w") as file:
        file.write(str(number))
    time.sleep(float(sys.argv[1]))
    open(f"saved-{os.environ['RANK']}", "w").close()
    sys.exit(0)

signal.signal(int(sys.argv[2]), save)
open(f"ready-{os.environ['RANK']}", "w").close()
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "saves.py").write_text(SAVES)
    with Job(tmp_path, options=("--nnodes", "1", "--nproc-per-node", "2")) as job:
        yield job
        job.nothing_is_left()


def all_of(folder: Path, what: str) -> bool:
    return all((folder / f"{what}-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_handlers_have_time_to_save(job: Job, tmp_path: Path, number: int) -> None:
    node = job.start(command=["saves.py", "1.5", str(int(number))])
    wait_until(lambda: all_of(tmp_path, "ready"), "the script runs")
    node.kill(number)
    assert node.wait() == 128 + number, node.output
    assert all_of(tmp_path, "saved"), "each worker's handler came to its end"
    assert (tmp_path / "begun-0").read_text() == str(int(number)), "it got the signal that the node got"


def test_the_grace_period_ends(job: Job, tmp_path: Path) -> None:
    node = job.start("--grace-period", "1", command=["saves.py", "1000", "15"])
    wait_until(lambda: all_of(tmp_path, "ready"), "the script runs")
    node.kill(signal.SIGTERM)
    assert node.wait(60.0) == 143, node.output
    assert not all_of(tmp_path, "saved")


def test_a_second_signal_ends_the_wait(job: Job, tmp_path: Path) -> None:
    node = job.start(command=["saves.py", "1000", "15"])
    wait_until(lambda: all_of(tmp_path, "ready"), "the script runs")
    node.kill(signal.SIGTERM)
    wait_until(lambda: all_of(tmp_path, "begun"), "the handlers run")
    node.kill(signal.SIGTERM)
    assert node.wait(20.0) == 143, node.output


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
        begun = time.monotonic()
        job.start()
        assert job.wait_for_world(1, after=begun)[0].step == last + 1


@pytest.mark.parametrize("apart_s", [0.0, 0.03])
def test_all_nodes_are_asked_at_once(tmp_path: Path, apart_s: float) -> None:
    with Job(tmp_path, ("--nnodes", "1:2", "--lease-ttl", "10"), [str(TRAIN_STATE), str(tmp_path)]) as job:
        begun = time.monotonic()
        nodes = [job.start(), job.start()]
        job.wait_for_world(2, after=begun)
        for node in nodes:
            node.kill(signal.SIGTERM)
            time.sleep(apart_s)
        assert [node.wait() for node in nodes] == [143, 143]
        said = [node.output for node in nodes]
        assert any("in this host's memory" in text for text in said), said
        last = max(one.step for one in job.steps())
        begun = time.monotonic()
        again = job.start()
        first = job.wait_for_world(1, after=begun)[0]
        assert first.step == last + 1, "no step was lost, and none was made twice"
        again.signal_all(signal.SIGKILL)
        again.wait()
