"""What a node does after failures that follow one another: decisions without workers."""

from __future__ import annotations

import pytest

from edl.collective.agent.health.failures import RecoveryDecision
from edl.collective.agent.health.restart_policy import RestartPolicy

KILLED = RecoveryDecision(restart="worker 0 was killed")
ERROR = RecoveryDecision(fatal="rank 0: worker 0 failed\nTraceback")


def test_script_errors_are_forgiven() -> None:
    """Errors of the script are forgiven as often as the user said."""
    policy = RestartPolicy(2)
    again = RecoveryDecision(restart="rank 0: worker 0 failed", after_error=True)
    assert [policy.apply_limits(ERROR, forgiven, 5) for forgiven in range(3)] == [again, again, ERROR]
    assert policy.apply_limits(KILLED, 2, 5) == KILLED


def test_fruitless_restarts_end_the_job() -> None:
    """Restarts that lead nowhere end the job."""
    policy = RestartPolicy(0)
    for _ in range(11):
        assert policy.apply_limits(KILLED, 0, 5) == KILLED
        policy.record_restart(5, 1.0)
    nowhere = policy.apply_limits(KILLED, 0, 5)
    assert nowhere == RecoveryDecision(fatal="10 restarts in a row led nowhere; the last because worker 0 was killed")
    assert policy.apply_limits(KILLED, 0, 6) == KILLED, "this one led somewhere"


@pytest.mark.parametrize(("step", "lived_s"), [(6, 1.0), (5, 61.0)])
def test_step_or_long_life_resets_the_count(step: int, lived_s: float) -> None:
    """A step or a long life counts from the beginning."""
    policy = RestartPolicy(0)
    for _ in range(11):
        policy.record_restart(5, 1.0)
    policy.record_restart(step, lived_s)
    for _ in range(10):
        assert policy.apply_limits(KILLED, 0, step) == KILLED
        policy.record_restart(step, 1.0)
    assert policy.apply_limits(KILLED, 0, step).fatal
