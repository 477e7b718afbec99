"""Which event led to which: a new generation, and a restart, say why in their text; an event before may say more.

What does not belong here: how events are recorded (`records`) and shown (`edl status`, the page).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edl.collective.goodput.codec import Event

__all__ = ["find_causes"]

_EXPLAINED: Final = frozenset({"generation", "restart", "faulty"})
"""Kinds whose text is the reason."""
_LEADING: Final = frozenset({"kill", "exit", "hang", "leave", "faulty", "restart", "error"})
"""Kinds that lead to another generation."""


def find_causes(events: Sequence[Event]) -> list[str]:
    """Return the cause of every event, in words; empty where none is known.

    Args:
        events: of a job, oldest first.
    """
    causes = []
    leading: dict[int, Event] = {}  # by generation: the last event in it that leads to another
    for event in events:
        cause = event.text if event.kind in _EXPLAINED else ""
        before = leading.get(event.generation - 1)
        if event.kind == "generation" and before is not None and before.text not in cause:
            cause = f"{cause} ({before.kind} at {before.node}: {before.text})"
        if event.kind in _LEADING:
            leading[event.generation] = event
        causes.append(cause)
    return causes
