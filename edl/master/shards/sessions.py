"""Readers as the book knows them: their sessions, leases and marks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from edl.master.shards.ranges import UnitRange
from edl.protocol import master

if TYPE_CHECKING:
    from edl.master.shards.dataset import DatasetShards

__all__ = ["MARKS_KEPT", "ReaderHistory", "ReaderMark", "ReaderSession", "SessionInfo", "ShardLease"]

MARKS_KEPT: Final = 16
"""Of a reader: whoever keeps checkpoints keeps a few. Each holds what was consumed between it and the mark before."""


@dataclass(slots=True, eq=False)
class ShardLease:
    """A range that a session has.

    Attributes:
        id: never given twice.
        term: of the master that gave it.
        session: that has it.
        epoch: of the range.
        shard: of the range.
        start: the first unit.
        stop: the unit behind the last.
        marked: units before it are covered by a mark of the reader; as `start` until there is one.
    """

    id: int
    term: int
    session: ReaderSession
    epoch: int
    shard: int
    start: int
    stop: int
    marked: int

    def message(self) -> master.Lease:
        """Return it as it goes over the wire."""
        return master.Lease(
            id=self.id, term=self.term, epoch=self.epoch, shard=self.shard, start=self.start, stop=self.stop
        )


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


@dataclass(slots=True, eq=False)
class ReaderSession:
    """A reader's life, from its opening to its end.

    Attributes:
        id: its random name.
        holder: the name that people see.
        dataset: that it reads.
        last_request: the number of the last turn.
        reply: the answer to that turn.
        leases: what it has, by id, in the order in which it was given.
        units_done: that it reported.
        resume: what it resumed, and the answer to that.
    """

    id: str
    holder: str
    dataset: DatasetShards
    last_request: int = 0
    reply: master.NextReply | None = None
    leases: dict[int, ShardLease] = field(default_factory=dict)
    units_done: int = 0
    resume: tuple[master.Resume, master.ResumeReply] | None = None


@dataclass(frozen=True)
class SessionInfo:
    """A live session, as a server that keeps the clocks sees it.

    Attributes:
        dataset: that it reads.
        holder: the name that people see.
        leases: ids of what it has.
        last_request: the number of its last turn.
        lease_s: after how many seconds a lease ends that no turn renewed.
        session_s: after how many seconds it ends itself, with nothing heard of it.
        units_done: that it reported.
    """

    dataset: str
    holder: str
    leases: tuple[int, ...]
    last_request: int
    lease_s: float
    session_s: float
    units_done: int
