"""Schedules in samples: the same rate at the same data, whatever the batch was on the way."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.collective.training.schedule import SampleSchedule  # noqa: E402
from edl.errors import SettingsError  # noqa: E402


def schedule(samples_per_step: float = 100) -> tuple[SampleSchedule, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6], gamma=0.1)
    optimizer.step()  # or PyTorch warns of a schedule that goes first
    return SampleSchedule(steps, samples_per_step), optimizer


@settings(deadline=None)
@given(batches=st.lists(st.integers(1, 250), min_size=1, max_size=12))
def test_rate_depends_on_samples_only(batches: list[int]) -> None:
    """The rate depends on the samples only."""
    moved, optimizer = schedule()
    samples = 0
    for batch in batches:
        samples += batch
        moved.move_to(samples)
        wanted = 1.0 if samples < 300 else 0.1 if samples < 600 else 0.01
        assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted)


def test_near_fractions_make_a_step() -> None:
    """Fractions that nearly make a step make one."""
    moved, optimizer = schedule()
    progress = 0.0
    for _ in range(3000):
        progress += 0.1
    assert progress != 300
    moved.move_to(progress)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_state_goes_on_with_other_steps() -> None:
    """It goes on from its state also with other steps."""
    first, _ = schedule(100)
    first.move_to(250)
    state = copy.deepcopy(first.state_dict())
    same, optimizer = schedule(100)
    same.load_state_dict(state)
    same.move_to(299)
    assert same.scheduler.last_epoch == 2
    same.move_to(300)
    assert same.scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    other, _ = schedule(400)
    other.load_state_dict(state)
    other.move_to(599)
    assert other.scheduler.last_epoch == 2
    other.move_to(600)
    assert other.scheduler.last_epoch == 3


def test_steps_of_nothing_are_refused() -> None:
    with pytest.raises(SettingsError, match="samples_per_step=0"):
        schedule(0)


def test_evaluation_schedule_is_refused() -> None:
    """A schedule of evaluations is refused."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(SettingsError, match=r"on_result=plateau\.step"):
        SampleSchedule(plateau, 100)
