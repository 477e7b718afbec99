"""Decide after which step workers can pause together, and how long that may take, from their statuses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from typing import Final

from edl.collective.worker_status import WorkerStatus

__all__ = ["pause_needs_s", "pause_step"]

_MARGIN_S: Final = 1.0
"""Of which another node's agent may need a part until it knows. Training goes on meanwhile."""
_STEPS: Final = 6
"""So many usual steps are waited for a pause that was asked for two steps ahead."""


def pause_step(statuses: Collection[WorkerStatus], generation: int) -> int | None:
    """A step that no worker has finished and that all can still be told of; None if they report no steps."""
    if any(one.step < 0 or one.generation != generation for one in statuses):
        return None
    step_s = _usual_s(statuses)
    ahead = math.ceil(_MARGIN_S / max(step_s if step_s is not None else _MARGIN_S, 1e-6))
    return max(status.step for status in statuses) + max(2, ahead)


def pause_needs_s(statuses: Collection[WorkerStatus]) -> float:
    """How long the steps until a pause may take, where steps are long."""
    step_s = _usual_s(statuses)
    return _STEPS * step_s if step_s is not None else 0.0


def _usual_s(statuses: Collection[WorkerStatus]) -> float | None:
    durations = [one for status in statuses for one in status.durations_s]
    return statistics.median(durations) if durations else None
