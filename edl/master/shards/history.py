"""What readers that commit by checkpoints consumed, as far back as they may go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from edl.master.shards.ranges import UnitRange

__all__ = ["MARKS_KEPT", "ReaderHistory", "ReaderMark"]

MARKS_KEPT: Final = 16
"""Of a reader: whoever keeps checkpoints keeps a few. Each holds what was consumed between it and the mark before."""


@dataclass(slots=True)
class ReaderMark:
    """A moment of a reader that it may come back to.

    Attributes:
        session: that made it.
        number: grows in a reader's history; 0 is its beginning.
        consumed: since the mark before.
        open: what the reader had in hand, less what it had consumed.
    """

    session: str
    number: int
    consumed: list[UnitRange] = field(default_factory=list)
    open: list[UnitRange] = field(default_factory=list)


@dataclass(slots=True)
class ReaderHistory:
    """What a reader consumed, through all its sessions, as far back as it may go.

    Attributes:
        session: the latest.
        holder: the name that people see.
        marks: the last `MARKS_KEPT`.
        pending: what was reported after the last mark. Of a session that was lost it is empty: that went back.
    """

    session: str
    holder: str
    marks: deque[ReaderMark]
    pending: list[UnitRange] = field(default_factory=list)

    @classmethod
    def begin(cls, session: str, holder: str) -> ReaderHistory:
        """Return the history of a reader that has consumed nothing."""
        return cls(session, holder, deque([ReaderMark(session, 0)], maxlen=MARKS_KEPT))

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was consumed and nothing marked."""
        return len(self.marks) == 1 and not self.marks[0].number and not self.pending

    def find(self, session: str, number: int) -> int | None:
        """Return the index of a mark; None if it is not kept."""
        for index, mark in enumerate(self.marks):
            if (mark.session, mark.number) == (session, number):
                return index
        return None

    def knows(self, session: str) -> bool:
        """Whether a session is part of it."""
        return session == self.session or any(mark.session == session for mark in self.marks)
