"""After which step workers can pause together, and how long that may take: decisions from their status pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from typing import Final

from edl.collective.worker_status import WorkerStatus

__all__ = ["pause_needs_s", "pause_step"]

_NOTICE_S: Final = 1.0
"""So far ahead is the step after which workers pause. Agents of other nodes learn of it by a watch, or within the
second after which they read the records anyway: with less, a worker may have passed the step. Training goes on."""
_MIN_STEPS: Final = 2
"""A worker may be in the step after its last reported one already."""
_PATIENCE_STEPS: Final = 6
"""So many usual steps may pass until all workers have paused, of which two are ahead of the pause as a rule: fewer
would cut off a step that takes longer than most, more would make nodes that join wait for a rank that hangs."""


def pause_step(statuses: Collection[WorkerStatus], generation: int) -> int | None:
    """Return a step so far ahead that all workers see the request before they finish it.

    Args:
        statuses: of the workers' status pages.
        generation: that the workers belong to.

    Returns:
        The step; None if a worker reports no steps, or is not in this generation yet.
    """
    if any(status.step < 0 or status.generation != generation for status in statuses):
        return None
    step_s = _usual_step_s(statuses)
    ahead = math.ceil(_NOTICE_S / max(step_s if step_s is not None else _NOTICE_S, 1e-6))
    return max(status.step for status in statuses) + max(_MIN_STEPS, ahead)


def pause_needs_s(statuses: Collection[WorkerStatus]) -> float:
    """Return how many seconds the steps until a pause may take, where steps are long; 0 if no step was measured."""
    step_s = _usual_step_s(statuses)
    return _PATIENCE_STEPS * step_s if step_s is not None else 0.0


def _usual_step_s(statuses: Collection[WorkerStatus]) -> float | None:
    durations = [duration_s for status in statuses for duration_s in status.durations_s]
    return statistics.median(durations) if durations else None
