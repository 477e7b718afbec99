"""From which rank's live state a new generation goes on: pure.

Survivors may differ by a step, since a collective can fail on a rank after it worked on another. The rank that got
furthest gives its state to the ranks behind it, and to new workers, which have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RankState", "RecoveryPlan", "plan_recovery"]


@dataclass(frozen=True)
class RankState:
    """How far a rank's state is.

    Attributes:
        step: the last finished step, -1 for none.
        generation: in which the state was last adjusted to the size of the world.
        size: ranks of that world.
        live: whether the state is exactly what it was at the end of that step.
    """

    step: int = -1
    generation: int = -1
    size: int = 0
    live: bool = False


@dataclass(frozen=True)
class RecoveryPlan:
    """From which rank's state all ranks go on.

    Attributes:
        step: the last finished step of that state.
        size: ranks of the world that the state is adjusted to.
        source: the rank that gives its state.
        behind: the ranks that lack it.
    """

    step: int
    size: int
    source: int
    behind: frozenset[int]


def plan_recovery(states: Sequence[RankState]) -> RecoveryPlan | None:
    """Choose the newest live state.

    Args:
        states: of all ranks, by rank.

    Returns:
        Which rank gives its state to which others; None where no rank's state is live.
    """
    live = [state for state in states if state.live]
    if not live:
        return None
    best = max(live, key=lambda state: (state.step, state.generation))
    behind = frozenset(rank for rank, state in enumerate(states) if state != best)
    return RecoveryPlan(best.step, best.size, states.index(best), behind)
