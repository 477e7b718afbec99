"""A reader's session: shards that were given, reports on their way, and the turn in flight. No clock, no threads."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from edl.errors import EDLError
from edl.protocol import master as messages

__all__ = ["MarkRequest", "Outbox", "Outcome", "Report", "ResumeRequest", "Shard", "ShardSession", "first_of"]

_MOST_REPORTS: Final = 4096
"""Reports in a turn. The excess goes with the next one, so that a turn is applied in milliseconds."""

Outcome: TypeAlias = Literal["done", "failed", "returned"]


@dataclass(frozen=True)
class Shard:
    """A part of a data set that this reader has under a lease: units [start, stop) of an epoch.

    Attributes:
        id: Number of the lease, which is never given twice.
        term: Term of the master that gave the lease.
        epoch: The epoch, from 0.
        shard: Number of the shard in the data set.
        start: The first unit.
        stop: The unit after the last.
    """

    id: int
    term: int
    epoch: int
    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(eq=False, slots=True)
class Report:
    """The outcome of a shard, on its way to the master.

    `units` of the shard were done, if it was not done as a whole. `refused` is the master's reason, or None.
    """

    shard: Shard
    outcome: Outcome
    reason: str = ""
    units: int = 0
    refused: str | None = None
    answered: bool = False


@dataclass(eq=False)
class MarkRequest:
    """A position to be journalled: `consumed` units of open shards, by lease. `session` and `number` name it then."""

    consumed: dict[int, int]
    session: str = ""
    number: int = 0
    answered: bool = False
    failure: EDLError | None = None


@dataclass(eq=False)
class ResumeRequest:
    """A position to go back to: the `mark` that `holder` wrote in `session`."""

    holder: str
    session: str
    mark: int
    answered: bool = False
    failure: EDLError | None = None
    retry_until: float | None = None
    opened: ShardSession | None = None  # in which it is resumed; the same for each attempt


Outbox: TypeAlias = "collections.deque[Report | MarkRequest | ResumeRequest]"


@dataclass(slots=True)
class SessionLease:
    """A shard that was given and whose report, if there is one, was not answered yet."""

    shard: Shard
    touched_at: float
    taken: bool = False
    reported: bool = False


class ShardSession:
    """A session as the reader sees it: shards that it has, and the turn in flight. No clock, no threads."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.open: dict[int, SessionLease] = {}
        self.in_flight: messages.Turn | None = None  # it was not answered
        self._turns = 0
        self._sent: list[Report] = []

    def next_turn(self, want: int, outbox: Outbox) -> messages.Turn:
        """Return the turn in flight, or a new one that wants `want` shards and has the reports that come first."""
        if self.in_flight is not None:
            return self.in_flight
        self._turns += 1
        turn = messages.Turn(session=self.name, request=self._turns, want=want)
        while len(self._sent) < _MOST_REPORTS and isinstance(report := first_of(outbox), Report):
            outbox.popleft()
            self._sent.append(report)
            _add(turn, report)
        self.in_flight = turn
        return turn

    def answer(self, reply: messages.NextReply) -> list[Report]:
        """Take the answer of the turn in flight; return the reports that were answered, including those refused."""
        refusals = {refusal.lease.id: refusal.reason for refusal in reply.refused}
        for report in self._sent:
            report.refused = refusals.get(report.shard.id)
            self.open.pop(report.shard.id, None)
        return self._settle()

    def add(self, leases: Iterable[messages.Lease], now: float) -> list[Shard]:
        """Take shards that the master gives."""
        given = [Shard(lease.id, lease.term, lease.epoch, lease.shard, lease.start, lease.stop) for lease in leases]
        self.open.update((shard.id, SessionLease(shard, now)) for shard in given)
        return given

    def is_same(self, reply: messages.NextReply) -> bool:
        """Whether the answer to opening this session again is of this session, and not of a new one of its name."""
        answered = self._turns - (self.in_flight is not None)
        return reply.last_request in (answered, self._turns)

    def abandon(self, why: str) -> list[Report]:
        """Refuse the reports that were not answered, since the session is gone; return them."""
        self.open.clear()
        for report in self._sent:
            report.refused = why
        return self._settle()

    def _settle(self) -> list[Report]:
        self.in_flight = None
        reports, self._sent = self._sent, []
        for report in reports:
            report.answered = True
        return reports


def first_of(outbox: Outbox) -> Report | MarkRequest | ResumeRequest | None:
    """Return the report or request that comes first; None if there is none."""
    try:
        return outbox[0]
    except IndexError:  # a caller has withdrawn its request
        return None


def _add(turn: messages.Turn, report: Report) -> None:
    lease = messages.LeaseId(id=report.shard.id, term=report.shard.term)
    if report.outcome == "done":
        turn.done.append(lease.id)
        turn.done_terms.append(lease.term)
    elif report.outcome == "failed":
        reason = report.reason.encode(errors="backslashreplace").decode()  # a path may not be UTF-8, a message must be
        turn.failed.append(messages.Failure(lease=lease, reason=reason, units=report.units))
    else:
        turn.returned.append(messages.Partial(lease=lease, units=report.units))
