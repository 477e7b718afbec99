"""What a node does after failures, and after which step it pauses: decisions without workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edl.collective.agent.health.failure_policy import RestartPolicy
from edl.collective.agent.health.failures import RecoveryDecision
from edl.collective.agent.membership.pause import pause_needs_s, pause_step
from edl.collective.worker_status import Board, Reading

KILLED, ERROR = (
    RecoveryDecision(restart="worker 0 was killed"),
    RecoveryDecision(fatal="rank 0: worker 0 failed\nTraceback"),
)


def test_script_errors_are_forgiven() -> None:
    """Errors of the script are forgiven as often as the user said."""
    restarts = RestartPolicy(2)
    again = RecoveryDecision(restart="rank 0: worker 0 failed", after_error=True)
    assert [restarts.limited(ERROR, forgiven, 5) for forgiven in range(3)] == [again, again, ERROR]
    assert restarts.limited(KILLED, 2, 5) == KILLED


def test_fruitless_restarts_end_the_job() -> None:
    """Restarts that lead nowhere end the job."""
    restarts = RestartPolicy(0)
    for _ in range(11):
        assert restarts.limited(KILLED, 0, 5) == KILLED
        restarts.count(5, 1.0)
    nowhere = restarts.limited(KILLED, 0, 5)
    assert nowhere == RecoveryDecision(fatal="10 restarts in a row led nowhere; the last because worker 0 was killed")
    assert restarts.limited(KILLED, 0, 6) == KILLED, "this one led somewhere"


@pytest.mark.parametrize(("step", "lived_s"), [(6, 1.0), (5, 61.0)])
def test_step_or_long_life_resets_the_count(step: int, lived_s: float) -> None:
    """A step or a long life counts from the beginning."""
    restarts = RestartPolicy(0)
    for _ in range(11):
        restarts.count(5, 1.0)
    restarts.count(step, lived_s)
    for _ in range(10):
        assert restarts.limited(KILLED, 0, step) == KILLED
        restarts.count(step, 1.0)
    assert restarts.limited(KILLED, 0, step).fatal


def reading(step: int, *durations_s: float, generation: int = 3) -> Reading:
    return replace(Board.from_env().read(), generation=generation, step=step, durations_s=durations_s)


def test_pause_is_after_a_step_all_can_hear() -> None:
    """Workers pause after a step that all can be told of."""
    assert pause_step([reading(7, 1.0), reading(8, 1.0)], 3) == 10, "two steps ahead at least"
    assert pause_step([reading(7, 0.01), reading(8, 0.01)], 3) == 108, "1 s ahead where steps are short"
    assert pause_step([reading(0)], 3) == 2, "no step was measured yet"
    assert pause_step([reading(7, 1.0), reading(-1)], 3) is None, "one reports no steps"
    assert pause_step([reading(7, 1.0), reading(7, 1.0, generation=2)], 3) is None, "one is not there yet"


def test_long_steps_have_long_to_pause() -> None:
    """Long steps have long until the pause."""
    assert pause_needs_s([reading(7, 2.0, 2.0, 40.0), reading(7, 2.0)]) == 12.0
    assert pause_needs_s([reading(-1)]) == 0.0
