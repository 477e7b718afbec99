"""What follows from failures after earlier ones: errors that are forgiven, and an end to restarts that lead nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from edl.collective.agent.health.failures import RecoveryDecision

__all__ = ["RestartPolicy"]

_FRUITLESS: Final = 10
_FRUITFUL_S: Final = 60.0


class RestartPolicy:
    """Of one node's workers.

    Args:
        most_forgiven: errors of the script's own after which a job goes on.
    """

    def __init__(self, most_forgiven: int) -> None:
        self._most_forgiven = most_forgiven
        self._fruitless = 0
        self._best_step = -1
        self._unclear_faults = 0

    def apply_limits(self, verdict: RecoveryDecision, forgiven: int, step: int) -> RecoveryDecision:
        """What follows from a verdict, after all that was before it.

        Args:
            forgiven: how many errors of the script's own the job has gone on after.
            step: the last one that any worker finished.
        """
        if verdict.unclear and self._unclear_faults:
            return replace(verdict, leave_out=True)
        if verdict.fatal and forgiven < self._most_forgiven:
            return RecoveryDecision(restart=verdict.fatal.split("\n", 1)[0], after_error=True)
        if verdict.restart and self._fruitless >= _FRUITLESS and self._best_step >= step:
            return RecoveryDecision(
                fatal=f"{_FRUITLESS} restarts in a row led nowhere; the last because {verdict.restart}"
            )
        return verdict

    def record_unclear_fault(self) -> None:
        """A GPU failed, or a kernel of the script, and nothing tells which: the next time the GPU is blamed."""
        self._unclear_faults += 1

    def record_restart(self, step: int, lived_s: float) -> None:
        """The workers begin anew, after `step` and a life of `lived_s`, which is all that is known of a script that
        reports no steps."""
        self._fruitless = 0 if step > self._best_step or lived_s > _FRUITFUL_S else self._fruitless + 1
        self._best_step = max(self._best_step, step)
