"""Whose live state a new generation goes on from: pure.

Survivors may differ by one step, since a collective can fail on one rank after it worked on another. The one that got
furthest gives its state to those behind it, and to new workers, which have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Plan", "Report", "plan"]


@dataclass(frozen=True)
class Report:
    """What one rank says of its state.

    Attributes:
        step: the last finished one, -1 for none.
        generation: in which the state was last adjusted to the size of the world.
        size: of that world.
        live: whether the state is exactly what it was at the end of that step.
    """

    step: int = -1
    generation: int = -1
    size: int = 0
    live: bool = False


@dataclass(frozen=True)
class Plan:
    """What the ranks do.

    Attributes:
        step: the last finished one.
        size: of the world that the state is adjusted to.
        source: the rank that gives its state.
        behind: the ranks that lack it.
    """

    step: int
    size: int
    source: int
    behind: frozenset[int]


def plan(reports: Sequence[Report]) -> Plan | None:
    """What to go on from, given everyone's report by rank; None if nobody's state is live."""
    live = [report for report in reports if report.live]
    if not live:
        return None
    best = max(live, key=lambda report: (report.step, report.generation))
    behind = frozenset(rank for rank, report in enumerate(reports) if report != best)
    return Plan(best.step, best.size, reports.index(best), behind)
