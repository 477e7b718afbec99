"""After which step workers pause together: decisions without workers."""

from __future__ import annotations

from dataclasses import replace

from edl.collective.agent.membership.pause import pause_needs_s, pause_step
from edl.collective.worker_status import WorkerStatus, WorkerStatusPage


def status(step: int, *durations_s: float, generation: int = 3) -> WorkerStatus:
    return replace(WorkerStatusPage.from_env().read_status(), generation=generation, step=step, durations_s=durations_s)


def test_pause_is_after_a_step_all_can_hear() -> None:
    """Workers pause after a step that all can be told of."""
    assert pause_step([status(7, 1.0), status(8, 1.0)], 3) == 10, "two steps ahead at least"
    assert pause_step([status(7, 0.01), status(8, 0.01)], 3) == 108, "1 s ahead where steps are short"
    assert pause_step([status(0)], 3) == 2, "no step was measured yet"
    assert pause_step([status(7, 1.0), status(-1)], 3) is None, "one reports no steps"
    assert pause_step([status(7, 1.0), status(7, 1.0, generation=2)], 3) is None, "one is not there yet"


def test_long_steps_have_long_to_pause() -> None:
    """Long steps have long until the pause."""
    assert pause_needs_s([status(7, 2.0, 2.0, 40.0), status(7, 2.0)]) == 12.0
    assert pause_needs_s([status(-1)]) == 0.0
