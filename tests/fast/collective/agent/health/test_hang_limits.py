"""Hangs in simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edl.collective.agent.health.hang_limits import HangLimits, describe_hang, find_progress_limit
from edl.collective.worker_status import Phase, WorkerStatus, WorkerStatusPage

LIMITS = HangLimits(floor_s=10.0, factor=5.0, first_step_s=60.0, start_s=30.0, load_s=40.0, save_s=20.0)


def status(phase: Phase = Phase.TRAIN, **fields: object) -> WorkerStatus:
    values = {"phase_since": 100.0, "step": 7, "step_at": 100.0, "durations_s": (1.0, 1.0, 1.0), **fields}
    return replace(WorkerStatusPage.from_env().read_status(), phase=phase, **values)  # type: ignore[arg-type]


def why_hung(status: WorkerStatus, now_s: float, limits: HangLimits, forked_s: float = 0.0) -> str | None:
    found = find_progress_limit(status, limits, forked_s=forked_s)
    return None if found is None else describe_hang(found, now_s, limits)


def test_missing_step_is_a_hang() -> None:
    """A step that does not come is a hang after the floor."""
    assert why_hung(status(), 110.0, LIMITS) is None
    why = why_hung(status(), 110.1, LIMITS)
    assert why == "no step after step 7 for 10.1 s; the limit is 10 s where a step takes 1 s"


def test_slow_steps_have_longer() -> None:
    slow = status(durations_s=(4.0, 4.0, 90.0))
    assert why_hung(slow, 120.0, LIMITS) is None
    assert why_hung(slow, 120.1, LIMITS) is not None


@pytest.mark.parametrize("fields", [{"step": -1, "step_at": 0.0}, {"durations_s": (0.1, 0.1)}])
def test_first_steps_have_their_own_limit(fields: dict[str, object]) -> None:
    """The first steps have a limit of their own."""
    assert why_hung(status(**fields), 160.0, LIMITS) is None
    assert "for the first steps" in (why_hung(status(**fields), 160.1, LIMITS) or "")


def test_new_workers_first_step_has_as_well() -> None:
    """So has the first step of a new worker on the same page."""
    assert why_hung(status(step_at=50.0), 160.0, LIMITS, forked_s=90.0) is None
    assert why_hung(status(step_at=50.0), 160.1, LIMITS, forked_s=90.0) is not None


def test_save_or_new_worker_restarts_time() -> None:
    """A save or a new worker begins the time anew."""
    assert why_hung(status(step_at=50.0, phase_since=105.0), 115.0, LIMITS) is None
    assert why_hung(status(step_at=50.0, phase_since=105.0), 115.1, LIMITS) is not None


@pytest.mark.parametrize(
    ("phase", "limit_s"), [(Phase.START, 30.0), (Phase.LOAD, 40.0), (Phase.SAVE, 20.0), (Phase.AGREE, 120.0)]
)
def test_other_phases_have_their_limits(phase: Phase, limit_s: float) -> None:
    assert why_hung(status(phase), 100.0 + limit_s, LIMITS) is None
    assert f"in phase {phase.name}" in (why_hung(status(phase), 100.1 + limit_s, LIMITS) or "")


@pytest.mark.parametrize("limits", [HangLimits(floor_s=3600.0), HangLimits(), HangLimits(save_s=4000.0)])
@pytest.mark.parametrize("durations_s", [(), (1.0, 1.0, 1.0), (200.0, 200.0, 200.0)])
@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.ROLLBACK, Phase.SAVE])
def test_hanging_rank_is_found_first(limits: HangLimits, durations_s: tuple[float, ...], phase: Phase) -> None:
    """The rank that hangs is found before those that wait for it."""
    waiting, hanging = (status(each, durations_s=durations_s) for each in (Phase.AGREE, phase))
    found = next(now_s for now_s in range(100, 20000, 30) if why_hung(hanging, now_s, limits))
    assert why_hung(waiting, found, limits) is None
    assert why_hung(waiting, 20000.0, limits) is not None, "but not for ever"


def test_silent_and_waiting_scripts_are_left() -> None:
    """A script that reports nothing and one that waits for others are left alone."""
    assert why_hung(status(Phase.START, step=-1), 1e9, LIMITS) is None
    assert why_hung(status(Phase.PAUSE), 1e9, LIMITS) is None
    assert why_hung(status(Phase.EXIT), 1e9, LIMITS) is None
