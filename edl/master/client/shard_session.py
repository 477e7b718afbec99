"""What a reader and its master owe each other: reports that wait, the turn in flight, shards that were given.

Pure: no clock, no I/O, no threads.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from edl.protocol import master as messages

__all__ = ["Outcome", "Report", "Shard", "ShardSession"]

MOST_REPORTS: Final = 4096
"""Of a turn: more go with the next one, so that a message stays small and is applied in milliseconds."""

Outcome = Literal["done", "failed", "returned"]


@dataclass(frozen=True)
class Shard:
    """A part of a data set that this reader has, under a lease: units [start, stop) of an epoch.

    Attributes:
        id: of the lease, which is never given twice.
        term: of the master that gave it.
        epoch: from 0.
        shard: its number in the data set.
        start: the first unit.
        stop: after the last unit.
    """

    id: int
    term: int
    epoch: int
    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @classmethod
    def of(cls, lease: messages.Lease) -> Shard:
        """Return a lease of the protocol as a shard.

        Args:
            lease: from the wire.
        """
        return cls(lease.id, lease.term, lease.epoch, lease.shard, lease.start, lease.stop)


class Report:
    """What became of a shard, on its way to the master.

    Attributes:
        shard: the shard.
        outcome: done, failed, or returned without a failure.
        reason: of a failure.
        units: of the shard that were done, where it was not done as a whole.
        refused: why the master refused it; None if it did not.
        answered: whether the master has it.
    """

    __slots__ = ("answered", "outcome", "reason", "refused", "shard", "units")

    def __init__(self, shard: Shard, outcome: Outcome, reason: str = "", units: int = 0) -> None:
        self.shard = shard
        self.outcome = outcome
        # What no message could carry, such as a path that is not UTF-8, is written out.
        self.reason = reason.encode(errors="backslashreplace").decode()
        self.units = units
        self.refused: str | None = None
        self.answered = False


class ShardSession:
    """A session of a reader at the master, as the reader sees it.

    Args:
        name: random, and never used before.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.open: dict[int, Shard] = {}
        """Shards that were given and not reported as answered, by their leases' ids."""
        self.finished = False
        self.poisoned = 0
        self.epoch = 0
        self._waiting: collections.deque[Report] = collections.deque()
        self._requests = 0
        self._in_flight: messages.Turn | None = None
        self._sent: list[Report] = []

    @property
    def owes(self) -> bool:
        """Whether there is a report, or a turn that was not answered."""
        return bool(self._waiting) or self._in_flight is not None

    def report(self, report: Report) -> None:
        """Have a report sent with the next turn."""
        self._waiting.append(report)

    def next_turn(self, want: int) -> messages.Turn:
        """Return the turn to send: that which was not answered, or a new one.

        Args:
            want: shards wanted by a new one.
        """
        if self._in_flight is None:
            self._requests += 1
            turn = messages.Turn(session=self.name, request=self._requests, want=want)
            while self._waiting and len(self._sent) < MOST_REPORTS:
                report = self._waiting.popleft()
                self._sent.append(report)
                _add(turn, report)
            self._in_flight = turn
        return self._in_flight

    def answer(self, reply: messages.NextReply) -> tuple[list[Shard], list[Report]]:
        """Take the answer of the turn in flight.

        Returns:
            The shards that were given, and the reports that were answered, those refused among them.
        """
        reports, self._sent = self._sent, []
        self._in_flight = None
        refusals = {refusal.lease.id: refusal.reason for refusal in reply.refused}
        for report in reports:
            report.refused = refusals.get(report.shard.id)
            report.answered = True
            self.open.pop(report.shard.id, None)
        given = [Shard.of(lease) for lease in reply.leases]
        self.open.update((shard.id, shard) for shard in given)
        self.finished = reply.finished
        self.poisoned = reply.poisoned
        self.epoch = reply.epoch
        return given, reports

    def resume(self, leases: Sequence[messages.Lease]) -> list[Shard]:
        """Take the shards that another session had at its mark."""
        given = [Shard.of(lease) for lease in leases]
        self.open.update((shard.id, shard) for shard in given)
        return given

    def is_same(self, reply: messages.NextReply) -> bool:
        """Whether the answer to opening this session again is of this session, and not of a new one of its name."""
        answered = self._requests - (self._in_flight is not None)
        return reply.last_request in (answered, self._requests)

    def abandon(self, why: str) -> list[Report]:
        """Refuse all reports that were not answered: the session is gone.

        Returns:
            The reports.
        """
        reports = [*self._sent, *self._waiting]
        self._sent = []
        self._in_flight = None
        self._waiting.clear()
        self.open.clear()
        for report in reports:
            report.refused = why
            report.answered = True
        return reports


def _add(turn: messages.Turn, report: Report) -> None:
    lease = messages.LeaseId(id=report.shard.id, term=report.shard.term)
    if report.outcome == "done":
        turn.done.append(lease.id)
        turn.done_terms.append(lease.term)
    elif report.outcome == "failed":
        turn.failed.append(messages.Failure(lease=lease, reason=report.reason, units=report.units))
    else:
        turn.returned.append(messages.Partial(lease=lease, units=report.units))
