"""What follows from failures after earlier failures: errors that are forgiven, and an end to fruitless restarts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from edl.collective.agent.health.failures import RecoveryDecision

__all__ = ["RestartPolicy"]

_FRUITLESS: Final = 10
"""So many restarts in a row without progress end a job. A node that flaps may take several until it is out; a script
that cannot get further would otherwise hold its GPUs for ever."""
_FRUITFUL_S: Final = 60.0
"""Workers that lived for so long have made progress, as far as can be told of a script that reports no steps: more than
it takes to start, connect and fail again."""


class RestartPolicy:
    """Limits the restarts of a node's workers.

    Args:
        max_forgiven: errors of the script's own after which a job goes on.
    """

    def __init__(self, max_forgiven: int) -> None:
        self._max_forgiven = max_forgiven
        self._fruitless = 0
        self._best_step = -1
        self._unclear_faults = 0

    def apply_limits(self, decision: RecoveryDecision, forgiven: int, step: int) -> RecoveryDecision:
        """Return what follows from failures, after all that was before them.

        Args:
            decision: what would follow from the failures alone.
            forgiven: how many errors of the script's own the job has gone on after.
            step: the last step that any worker finished, -1 for none.
        """
        if decision.unclear and self._unclear_faults:
            return replace(decision, leave_out=True)
        if decision.fatal and forgiven < self._max_forgiven:
            return replace(decision, restart=decision.fatal.split("\n", 1)[0], fatal="", after_error=True)
        if decision.restart and self._fruitless >= _FRUITLESS and self._best_step >= step:
            why = f"{_FRUITLESS} restarts in a row led nowhere; the last because {decision.restart}"
            return replace(decision, restart="", fatal=why, unclear=False, leave_out=False)
        return decision

    def record_unclear_fault(self) -> None:
        """Record that a GPU failed, or a kernel of the script, and nothing tells which: the next is the GPU's fault."""
        self._unclear_faults += 1

    def record_restart(self, step: int, lived_s: float) -> None:
        """Record that the workers begin anew.

        Args:
            step: the last step that any worker finished, -1 for none.
            lived_s: for how long the workers had run, in seconds.
        """
        self._fruitless = 0 if step > self._best_step or lived_s > _FRUITFUL_S else self._fruitless + 1
        self._best_step = max(self._best_step, step)
