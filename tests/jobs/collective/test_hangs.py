"""Evaluations and work that take much longer than `--hang-after`, and a rank that hangs; a node that is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.collective.job import Job

pytestmark = pytest.mark.timeout(600)  # a probe imports torch, in each round, on each node

SCRIPT = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from edl.collective import Checkpointer, Evaluator, State

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank, generation = dist.get_rank(), int(os.environ["EDL_GENERATION"])


def note(text):
    with (folder / "notes").open("a") as file:
        file.write(f"{generation} {text} {rank}\\n")


def evaluate():
    note(f"begin {float(state.count)}")
    if generation == 0:
        if rank == 0:
            while "begin 7.0 1" not in (folder / "notes").read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # until this rank is stopped, too
    time.sleep(5.0)
    note("end")
    return float(state.count) if rank == 0 else None


def compute():
    until = time.monotonic() + 6.0
    while time.monotonic() < until:
        sum(range(1000))


state = State(count=torch.zeros(()))
evaluator = state.evaluator = Evaluator(evaluate, limit_s=60.0)
with Checkpointer(state, interval_steps=1) as checkpointer:
    for step in range(checkpointer.restore() + 1, 12):
        dist.all_reduce(torch.ones(1))
        state.count += 1
        checkpointer.save(step)
        if step == 6:
            checkpointer.evaluate(evaluator)
        if step == 8 and rank == 0:
            compute()
            with checkpointer.busy("a report", limit_s=60.0):
                time.sleep(6.0)
            note("free")
        if step == 10 and rank == 0:
            note("calls")
            if generation == 1:
                time.sleep(600)
note(f"done {evaluator.results}")
dist.destroy_process_group()
"""


def test_slow_ranks_are_waited_for(tmp_path: Path) -> None:
    """An evaluation is longer than a hang, and its first try is killed in the middle, on one node of two.

    Then a rank works, and says that it is busy. In the end it waits for something else, and that is a hang: the call is
    made again.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--nnodes", "2", "--hang-after", "3", "--lease-ttl", "60")
    with Job(tmp_path, options=options, command=["train.py", str(tmp_path)]) as job:
        nodes = [job.start(), job.start()]
        assert [node.wait() for node in nodes] == [0, 0]
        output = "".join(node.output for node in nodes)
        job.nothing_is_left()
    assert "the workers hang" in output
    notes = (tmp_path / "notes").read_text().splitlines()
    assert sorted(notes[:2]) == ["0 begin 7.0 0", "0 begin 7.0 1"]
    assert sorted(notes[2:6]) == ["1 begin 7.0 0", "1 begin 7.0 1", "1 end 0", "1 end 1"]
    assert notes[6:9] == ["1 free 0", "1 calls 0", "2 calls 0"], "nobody has broken off the first"
    assert sorted(notes[9:]) == ["2 done {6: 7.0} 0", "2 done {6: 7.0} 1"]


# Found by each Python process: a probe of a broken node fails.
SITE = """\
import os, sys

if any("node_probe" in word for word in sys.orig_argv):
    if os.environ.get("PROBE") == "broken":
        raise SystemExit("this node's probe is broken")
"""


def test_faulty_node_does_not_join(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    options = ("--nnodes", "1:2", "--node-check", "--rdzv-conf", "last_call_timeout=0")
    with Job(tmp_path, options, environ={"PYTHONPATH": str(tmp_path)}) as job:
        fit = job.start()
        job.wait_for_world(1)
        assert "checking this node alone" in fit.output
        job.environ["PROBE"] = "broken"
        code, said = job.run()
        assert code == 69, said
        assert "this node is faulty: could not compute: SystemExit: this node's probe is broken; it does not" in said
        job.end()
        assert fit.wait() == 0
        assert {one.generation for one in job.steps()} == {0}
