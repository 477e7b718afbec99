"""Going on in process: whose state, back to which step, who is waited for, and what the agent says."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from edl.collective.agent.processes.regroup_timer import RegroupTimer
from edl.collective.checkpoint.state.state import State
from edl.collective.inprocess.control_pipe import ControlPipe
from edl.collective.inprocess.process_group import unsupported_reason
from edl.collective.inprocess.recovery_plan import RankState, RecoveryPlan, plan_recovery
from edl.collective.inprocess.sockets import shut_down_connections
from edl.collective.inprocess.step_snapshot import StepSnapshot


def live(step: int, generation: int = 0, size: int = 3) -> RankState:
    return RankState(step, generation, size, live=True)


def test_furthest_rank_gives_its_state() -> None:
    assert plan_recovery([live(7), live(8), RankState(), live(8)]) == RecoveryPlan(
        8, 3, source=1, behind=frozenset({0, 2})
    )


class Job:
    """A small training job with everything that a step changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.state = State(model=self.model, seen=[], optimizer=self.optimizer)

    def forward_and_backward(self) -> None:
        self.model(torch.randn(8, 4)).square().sum().backward()
        self.state.seen.append(random.random())
        self.optimizer.param_groups[0]["lr"] *= 0.9

    def all(self) -> list[object]:
        parts = [one.clone() for one in self.model.state_dict().values()]
        rate = self.optimizer.param_groups[0]["lr"]
        return [
            *(part.tolist() for part in parts),
            list(self.state.seen),
            rate,
            torch.rand(3).tolist(),
            random.random(),
        ]


def test_failure_before_update_is_undone() -> None:
    job = Job()
    job.forward_and_backward()
    job.optimizer.step()
    snapshot = StepSnapshot(job.state)
    snapshot.take()
    wanted = job.all()
    job.forward_and_backward()
    assert snapshot.rollback()
    assert job.all() == wanted
    assert all(one.grad is None for one in job.model.parameters())
    assert snapshot.rollback()  # as often as steps fail
    assert job.all() == wanted


def say(path: Path, text: str) -> None:
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(pipe, text.encode())
    os.close(pipe)


def line(generation: int) -> str:
    return json.dumps({"EDL_GENERATION": str(generation), "RANK": "0"}) + "\n"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "control")
    return tmp_path / "control"


def test_only_newest_generation_is_taken(pipe: Path) -> None:
    woken: list[bool] = []
    with ControlPipe(pipe, 3, lambda: woken.append(control.has_next_generation)) as control:
        say(pipe, line(2) + line(3))
        assert control.wait_for_environment(0.1) is None
        say(pipe, line(4))
        environ = control.wait_for_environment(10)
        assert environ["EDL_GENERATION"] == "4"
        assert woken == [True]  # before it could be taken
        assert not control.has_next_generation
        say(pipe, line(5)[:9])  # a line may come in pieces
        say(pipe, line(5)[9:])
        assert control.wait_for_environment(10) == json.loads(line(5))


def test_only_gloo_goes_on_in_process() -> None:
    """An aborted communicator of NCCL ends its kernels as if they had worked, and errors of CUDA stay."""
    assert unsupported_reason("gloo") == ""
    assert "nccl" in unsupported_reason("nccl")


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listening socket, and the two ends of a connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listening.getsockname())
    other, _ = listening.accept()
    return listening, one, other


def test_who_waits_on_a_connection_is_woken() -> None:
    listening, one, other = pair()
    with listening, one, other:
        got: list[bytes] = []
        waiting = threading.Thread(target=lambda: got.append(one.recv(1)))
        waiting.start()
        assert shut_down_connections([inode(one)]) == 1
        waiting.join()
        assert got == [b""]
        assert other.recv(1) == b""  # and so is the other end
        shut_down_connections([inode(one)])  # once more does no harm


def looked(timer: RegroupTimer, start: float, end: float) -> list[int]:
    """What is found at `end`, having looked every 0.1 s since `start`."""
    for tenth in range(1, round(10 * (end - start))):
        assert timer.find_late(start + tenth / 10) == []
    return timer.find_late(end)


def test_who_has_not_come_in_time_is_late() -> None:
    timer = RegroupTimer(2.0)
    timer.expect_ranks({0, 1}, 10.0)
    timer.record_arrival(0)
    assert timer.awaited_ranks == [1]
    assert looked(timer, 10.0, 12.1) == [1]
    timer.record_arrival(1)
    assert timer.find_late(12.2) == []
