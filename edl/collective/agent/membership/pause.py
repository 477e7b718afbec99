"""After which step workers can pause together, and how long that may take: decisions from what their boards say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from typing import Final

from edl.collective.worker_status import Reading

__all__ = ["pause_needs_s", "pause_step"]

_MARGIN_S: Final = 1.0
"""Of which another node's agent may need a part until it knows. Training goes on meanwhile."""
_STEPS: Final = 6
"""So many usual steps are waited for a pause that was asked for two steps ahead."""


def pause_step(readings: Collection[Reading], generation: int) -> int | None:
    """A step that no worker has finished and that all can still be told of; None if they report no steps."""
    if any(one.step < 0 or one.generation != generation for one in readings):
        return None
    step_s = _usual_s(readings)
    ahead = math.ceil(_MARGIN_S / max(step_s if step_s is not None else _MARGIN_S, 1e-6))
    return max(reading.step for reading in readings) + max(2, ahead)


def pause_needs_s(readings: Collection[Reading]) -> float:
    """How long the steps until a pause may take, where steps are long."""
    step_s = _usual_s(readings)
    return _STEPS * step_s if step_s is not None else 0.0


def _usual_s(readings: Collection[Reading]) -> float | None:
    durations = [one for reading in readings for one in reading.durations_s]
    return statistics.median(durations) if durations else None
