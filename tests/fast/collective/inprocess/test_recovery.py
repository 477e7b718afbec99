"""Going on in process: whose state, back to which step, and what the agent says."""

from __future__ import annotations

import json
import os
import random
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import TCPStore, distributed_c10d

from edl.collective.checkpoint.state.state import State
from edl.collective.inprocess.control_pipe import ControlPipe
from edl.collective.inprocess.process_group import AbortableProcessGroup, unsupported_reason
from edl.collective.inprocess.recovery_plan import RankState, RecoveryPlan, plan_recovery
from edl.collective.inprocess.step_snapshot import StepSnapshot
from tests.descriptors import count_descriptors


def live(step: int, generation: int = 0, size: int = 3) -> RankState:
    return RankState(step, generation, size, live=True)


def test_furthest_rank_gives_its_state() -> None:
    """The one that got furthest gives its state to the others."""
    assert plan_recovery([live(7), live(8), RankState(), live(8)]) == RecoveryPlan(
        8, 3, source=1, behind=frozenset({0, 2})
    )


def test_equal_ranks_have_nobody_behind() -> None:
    """Nobody is behind where all have the same."""
    assert plan_recovery([live(7), live(7)]) == RecoveryPlan(7, 3, source=0, behind=frozenset())


def test_adjusted_state_counts_first() -> None:
    """A state that was adjusted to a later world counts before one of the same step that was not."""
    assert plan_recovery([live(7, 4, 3), live(7, 5, 2)]) == RecoveryPlan(7, 2, source=1, behind=frozenset({0}))


def test_no_live_state_no_plan() -> None:
    """Without a live state there is no plan."""
    assert plan_recovery([RankState(), RankState(9, 1, 3, live=False)]) is None


REPORTS = st.builds(RankState, st.integers(-1, 5), st.integers(0, 2), st.integers(1, 2), st.booleans())


@given(st.lists(REPORTS, min_size=1, max_size=6))
def test_everybody_ends_with_the_newest(reports: list[RankState]) -> None:
    """Everybody ends with the newest live state."""
    found = plan_recovery(reports)
    if found is None:
        assert not any(report.live for report in reports)
        return
    source = reports[found.source]
    assert source.live
    assert all(source.step >= report.step for report in reports if report.live)
    assert all(report == source for rank, report in enumerate(reports) if rank not in found.behind)
    assert found.source not in found.behind


class Job:
    """A small training job with everything that a step changes."""

    def __init__(self, optimizer: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        fields = {"optimizer": self.optimizer} if optimizer else {}
        self.state = State(model=self.model, seen=[], **fields)

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
    """A step that failed before the update is undone."""
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


def test_failure_after_update_is_final() -> None:
    """A step that failed after the update cannot be undone."""
    job = Job()
    snapshot = StepSnapshot(job.state)
    snapshot.take()
    job.forward_and_backward()
    job.optimizer.step()
    assert not snapshot.rollback()
    snapshot.take()
    assert snapshot.rollback()


def test_bare_parameters_are_copied() -> None:
    """Without an optimizer in the state parameters are copied as well."""
    job = Job(optimizer=False)
    snapshot = StepSnapshot(job.state)
    snapshot.take()
    before = job.model.state_dict()["0.weight"].clone()
    job.forward_and_backward()
    job.optimizer.step()
    assert snapshot.rollback()
    assert torch.equal(job.model.state_dict()["0.weight"], before)


def test_no_way_back_without_a_note() -> None:
    """There is no way back before a step was noted or after it was forgotten."""
    snapshot = StepSnapshot(Job().state)
    assert not snapshot.rollback()
    snapshot.take()
    snapshot.discard()
    assert not snapshot.rollback()


def test_tensors_are_put_back_where_they_are() -> None:
    mean = torch.zeros(3)
    state = State(mean=mean, notes={"best": torch.ones(2)})
    snapshot = StepSnapshot(state)
    for value in (1.0, 2.0):  # the second time the first one's memory is used again
        mean.fill_(value)
        snapshot.take()
        mean.add_(5)
        state.notes["best"].add_(1)
        assert snapshot.rollback()
        assert state.mean is mean
        assert mean.tolist() == [value] * 3
        assert state.notes["best"].tolist() == [1.0, 1.0]


def test_closing_leaves_the_optimizer() -> None:
    """Closing leaves the optimizer as it was."""
    job = Job()
    snapshot = StepSnapshot(job.state)
    snapshot.take()
    snapshot.close()
    job.forward_and_backward()
    job.optimizer.step()
    assert snapshot.rollback()  # it no longer knows


def test_failed_group_keeps_the_next_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that could not be made does not change the name of the next one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    names = []
    for size in (1, 2, 1):
        group = AbortableProcessGroup(0, size, "gloo", timeout_s=60.0)
        group.connect_store(lambda: None)
        if size == 2:
            group._timeout = timedelta(seconds=0.3)  # not for the store, which is there
        group.track_sockets()
        with pytest.raises(RuntimeError) if size == 2 else nullcontext():  # nobody else comes
            group.init_group()
            names.append(distributed_c10d._get_default_group().group_name)
        group.end_tracking()
        group.abort()
        group.destroy()
        assert not distributed_c10d.is_initialized()
    assert names[0] == names[1]


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
    """The newest generation is taken and older ones are not."""
    woken: list[bool] = []
    with ControlPipe(pipe, 3, lambda: woken.append(control.has_next_generation)) as control:
        say(pipe, line(2) + line(3))
        assert control.wait_for_environment(0.1) is None
        say(pipe, line(4))
        environ = control.wait_for_environment(10)
        assert environ is not None
        assert environ["EDL_GENERATION"] == "4"
        assert woken == [True]  # before it could be taken
        assert not control.has_next_generation
        say(pipe, line(5)[:9])  # a line may come in pieces
        say(pipe, line(5)[9:])
        assert control.wait_for_environment(10) == json.loads(line(5))


def test_failed_wake_loses_no_generation(pipe: Path) -> None:
    def fail() -> None:
        raise RuntimeError("not foreseen")

    with ControlPipe(pipe, 0, fail) as control:
        say(pipe, line(1))
        assert control.wait_for_environment(10) == json.loads(line(1))


def test_a_fork_leaves_the_pipe_alone(pipe: Path) -> None:
    """A child that the script forks, and that ends by an exception, shares the pipes with its parent."""
    with ControlPipe(pipe, 0, lambda: None) as control:
        child = os.fork()
        if not child:
            try:
                control.__exit__(None, None, None)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        say(pipe, line(1))
        assert control.wait_for_environment(10) == json.loads(line(1))


def test_nothing_waits_without_an_agent() -> None:
    """Without an agent nothing is said and nothing waits."""
    with ControlPipe(None, 0, lambda: None) as control:
        assert control.wait_for_environment(0.0) is None
        assert not control.has_next_generation


def test_listening_ends_with_the_context(pipe: Path) -> None:
    before = count_descriptors(str(pipe))
    with ControlPipe(pipe, 0, lambda: None):
        pass
    assert count_descriptors(str(pipe)) == before
    with pytest.raises(OSError):
        say(pipe, line(1))  # the agent sees that nobody listens


def test_only_gloo_goes_on_in_process() -> None:
    """An aborted communicator of NCCL ends its kernels as if they had worked, and errors of CUDA stay."""
    assert unsupported_reason("gloo") == ""
    assert "nccl" in unsupported_reason("nccl")
