"""Evaluations that take much longer than `--hang-after`, and a rank that hangs all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.collective.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from edl.collective import Checkpointer, Evaluator, State

folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()


def note(text):
    with (folder / "notes").open("a") as file:
        file.write(f"{text} {rank}\\n")


def first(text):
    try:
        os.close(os.open(folder / text, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def evaluate():
    note(f"begin {float(state.count)}")
    if how == "declared":
        if rank == 0 and first("killed"):
            while "begin 7.0 1" not in (folder / "notes").read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5.0 if int(os.environ["EDL_GENERATION"]) else 50.0)  # the first time until this rank is killed, too
    note("end")
    return float(state.count) if rank == 0 else None


def compute():
    until = time.monotonic() + 8.0
    while time.monotonic() < until:
        sum(range(1000))


state = State(count=torch.zeros(()))
evaluator = state.evaluator = Evaluator(evaluate, limit_s=60.0)
with Checkpointer(state, interval_steps=1) as checkpointer:
    for step in range(checkpointer.restore() + 1, 10):
        dist.all_reduce(torch.ones(1))
        state.count += 1
        checkpointer.save(step)
        if step == 6 and how == "declared":
            checkpointer.evaluate(evaluator)
        if step == 6 and how == "works" and rank == 0:
            compute()
        if step == 6 and how == "announced" and rank == 0:
            with checkpointer.busy("an evaluation", limit_s=60.0):
                note("busy")
                time.sleep(6.0)
                note("free")
        if step == 6 and how == "hangs" and rank == 0 and first("hung"):
            time.sleep(600)
note(f"done {evaluator.results}")
dist.destroy_process_group()
"""


def run(tmp_path: Path, how: str) -> tuple[str, list[str]]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Job(tmp_path, options=("--nnodes", "1", "--nproc-per-node", "2", "--hang-after", "3")) as job:
        code, output = job.run(command=[str(script), str(tmp_path), how])
        assert code == 0, output
        job.nothing_is_left()
    return output, sorted((tmp_path / "notes").read_text().splitlines())


def test_evaluation_is_neither_cut_nor_lost(tmp_path: Path) -> None:
    """It is longer than a hang, and its first try is killed in the middle, on one rank of two."""
    output, notes = run(tmp_path, "declared")
    assert "the workers hang" not in output
    assert [note for note in notes if note.startswith(("begin", "done"))] == [
        *("begin 7.0 0", "begin 7.0 0", "begin 7.0 1", "begin 7.0 1"),
        *("done {6: 7.0} 0", "done {6: 7.0} 1"),
    ]
    assert [note for note in notes if note.startswith("end")] == ["end 0", "end 1"]


def test_a_rank_that_works_is_waited_for(tmp_path: Path) -> None:
    output, notes = run(tmp_path, "works")
    assert "the workers hang" not in output
    assert notes == ["done {} 0", "done {} 1"]


def test_rank_of_another_node_is_waited_for(tmp_path: Path) -> None:
    """A rank of another node is waited for."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [str(script), str(tmp_path), "announced"]
    with Job(tmp_path, options=("--nnodes", "2", "--hang-after", "3", "--lease-ttl", "10"), command=command) as job:
        nodes = [job.start(), job.start()]
        assert [node.wait() for node in nodes] == [0, 0]
        assert not any("the workers hang" in node.output for node in nodes)
        job.nothing_is_left()
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes[:2] == ["busy 0", "free 0"], "nobody has broken it off"
    assert sorted(notes[2:]) == ["done {} 0", "done {} 1"]


def test_rank_that_sleeps_is_found(tmp_path: Path) -> None:
    """A rank that sleeps for ever is found."""
    output, notes = run(tmp_path, "hangs")
    assert "the workers hang" in output
    assert notes == ["done {} 0", "done {} 1"]
