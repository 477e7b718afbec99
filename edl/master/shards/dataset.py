"""The state of one data set: what was never given, what came back, what was given up, and who read what.

A shard is nowhere recorded that was not given yet, or is done: the cursor stands behind it, and nothing else names it.
So a million shards cost what a thousand do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from edl.errors import ConflictError
from edl.master.shards.cursors import StreamCursor, UnitCursor, make_cursor
from edl.master.shards.history import ReaderHistory
from edl.master.shards.ranges import Bounds, ReturnedRanges, ShardKey, UnitRange, join_bounds
from edl.protocol import master
from edl.quoting import shown

__all__ = ["DatasetShards", "FailureRecord", "ReaderSession", "SessionInfo", "ShardLease"]

_MOST_REASON: Final = 300
"""Characters of a failure's reason: what an exception says. A million poisoned shards are to fit into memory."""
_MOST_GIVEN_AGAIN: Final = 1024
"""Shards of which is known to whom they went after they came back: those of late reports, which come within minutes."""
_MOST_HISTORIES: Final = 1000
"""Of readers that ended: more than a job has. What is forgotten cannot be resumed, which the error says."""


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


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A failure of a shard.

    Attributes:
        holder: that had it.
        reason: in words.
        time_ms: when the master heard of it, in milliseconds since 1970.
    """

    holder: str
    reason: str
    time_ms: int


@dataclass(eq=False)
class DatasetShards:
    """A data set's shards. Methods change the state without asking whether the command was right.

    Attributes:
        name: of the data set.
        spec: its specification, defaults filled in; `index` as it was at the creation.
        cursor: what was never given.
        index: parts that were added to the specification's index.
        returned: ranges that wait to be given again.
        poisoned: ranges that were given up, by shard.
        failures: of shards that are not done.
        sessions: live ones, by id.
        histories: of readers that commit by checkpoints, by the id of the latest session; the oldest first.
        given_again: the holder of each shard that came back and was given again, the oldest first.
        leased: how many leases there are.
        units_done: in all epochs; what is provisional counts.
    """

    name: str
    spec: master.DatasetSpec
    cursor: UnitCursor
    index: list[bytes] = field(default_factory=list)
    returned: ReturnedRanges = field(default_factory=ReturnedRanges)
    poisoned: dict[ShardKey, list[Bounds]] = field(default_factory=dict)
    failures: dict[ShardKey, list[FailureRecord]] = field(default_factory=dict)
    sessions: dict[str, ReaderSession] = field(default_factory=dict)
    histories: dict[str, ReaderHistory] = field(default_factory=dict)
    given_again: dict[ShardKey, str] = field(default_factory=dict)
    leased: int = 0
    units_done: int = 0

    @classmethod
    def create(cls, name: str, spec: master.DatasetSpec) -> DatasetShards:
        """Return a data set of which nothing was given.

        Args:
            name: of it.
            spec: checked, defaults filled in.
        """
        return cls(name, spec, make_cursor(spec, spec.units, False, 0, 0, 0))

    @property
    def by_checkpoint(self) -> bool:
        """Whether what is reported is done only when a mark covers it."""
        return self.spec.commit == master.COMMIT_CHECKPOINT

    @property
    def is_stream(self) -> bool:
        """Whether its size is not known."""
        return not self.spec.HasField("units")

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing to give and nobody has anything; shards that were given up do not count."""
        return not self.leased and not self.returned and self.cursor.at_end

    @property
    def provisional_units(self) -> int:
        """Units that were reported and that no mark covers yet, of sessions that live."""
        histories = (self.histories[session] for session in self.sessions if session in self.histories)
        return sum(part.stop - part.start for history in histories for part in history.pending)

    def describe(self, *, index: bool = True) -> master.DatasetReply:
        """Return what a reader needs to know.

        Args:
            index: False for its absence: a source that grows line by line would have all of it copied for each.
        """
        reply = master.DatasetReply(dataset=self.name, spec=self.spec, units=self.cursor.units)
        reply.ended = not isinstance(self.cursor, StreamCursor) or self.cursor.ended
        if not index:
            reply.spec.ClearField("index")
        elif self.index:
            reply.spec.index = b"".join([self.spec.index, *self.index])
        return reply

    def take(self, most: int, session: ReaderSession) -> list[UnitRange]:
        """Take what is to be given to a session, `most` ranges at most."""
        taken: list[UnitRange] = []
        at_risk = bool(self.failures and self.returned) and any(
            self._is_at_risk((lease.epoch, lease.shard)) for lease in session.leases.values()
        )

        def may_take(key: ShardKey) -> bool:
            """Give one shard at a time that the next failure gives up: of several, all would go with the guilty one."""
            nonlocal at_risk
            if not self._is_at_risk(key):
                return True
            at_risk, refused = True, at_risk
            return not refused

        if len(self.returned):
            self._note_again(taken, self.returned.take(most, may_take), session)
        while len(taken) < most:
            taken += self.cursor.take(most - len(taken))
            if len(taken) < most and len(self.returned):
                alone = all(other.holder == session.holder for other in self.sessions.values())
                late = self.returned.take_late(
                    most - len(taken),
                    lambda key, alone=alone: self._may_retry(session, alone, key) and may_take(key),  # type: ignore[misc]
                )
                self._note_again(taken, late, session)
            if len(taken) == most or not self.cursor.begin_epoch():
                break
        return taken

    def _note_again(self, taken: list[UnitRange], again: list[UnitRange], session: ReaderSession) -> None:
        taken += again
        for part in again:
            self.given_again.pop(part[:2], None)
            self.given_again[part[:2]] = session.holder
            if len(self.given_again) > _MOST_GIVEN_AGAIN:
                del self.given_again[next(iter(self.given_again))]

    def _may_retry(self, session: ReaderSession, alone: bool, key: ShardKey) -> bool:
        """Whether a session may have a shard that failed: a broken machine alone should not have it given up."""
        failures = self.failures.get(key)
        return alone or not failures or failures[-1].holder != session.holder

    def _is_at_risk(self, key: ShardKey) -> bool:
        failures = self.failures.get(key)
        return failures is not None and len(failures) >= self.spec.max_failures - 1

    def finish(self, lease: ShardLease, stop: int) -> None:
        """Count the units of a lease up to `stop` as done; of the rest the caller disposes."""
        if stop <= lease.marked:
            return
        self.units_done += stop - lease.marked
        lease.session.units_done += stop - lease.marked
        if self.by_checkpoint:
            done = UnitRange(lease.epoch, lease.shard, lease.marked, stop)
            self.histories[lease.session.id].pending.append(done)
        lease.marked = stop

    def give_back(self, lease: ShardLease) -> None:
        """Have the rest of a lease wait for another holder."""
        if lease.marked < lease.stop:
            self.returned.add((lease.epoch, lease.shard), lease.marked, lease.stop)

    def fail(self, lease: ShardLease, failure: FailureRecord, *, late: bool) -> bool:
        """Count a failure of the rest of a lease, which goes back or is given up.

        Args:
            lease: that has ended.
            failure: of it.
            late: have it wait until nothing else is left.

        Returns:
            Whether the shard was given up.
        """
        if lease.marked >= lease.stop:
            return False
        key = (lease.epoch, lease.shard)
        failures = self.failures.setdefault(key, [])
        failures.append(
            FailureRecord(failure.holder, shown(failure.reason, _MOST_REASON) or "no reason was given", failure.time_ms)
        )
        if len(failures) < self.spec.max_failures:
            self.returned.add(key, lease.marked, lease.stop, late=late and not self.is_stream)
            return False
        del failures[: -self.spec.max_failures]
        join_bounds(self.poisoned.setdefault(key, []), lease.marked, lease.stop)
        return True

    def undo(self, parts: Iterable[UnitRange]) -> int:
        """Have ranges wait again that were done; how many units they have."""
        units = 0
        for epoch, shard, start, stop in parts:
            self.returned.add((epoch, shard), start, stop)
            units += stop - start
        self.units_done -= units
        return units

    def retry(self, shards: frozenset[int]) -> int:
        """Have shards wait again that were given up.

        Args:
            shards: in every epoch; empty for all.

        Returns:
            How many there were.

        Raises:
            ConflictError: one of them was not given up.
        """
        keys = [key for key in sorted(self.poisoned) if not shards or key[1] in shards]
        if missing := sorted(shards - {shard for _, shard in keys}):
            raise ConflictError(f"data set {self.name}: shard {missing[0]} is not poisoned")
        for key in keys:
            for start, stop in self.poisoned.pop(key):
                self.returned.add(key, start, stop)
            self.failures.pop(key, None)
        return len(keys)

    def find_history(self, session: str, holder: str, asking: str) -> ReaderHistory | None:
        """Return the history of a session, or without one the newest of a holder; None if none is kept.

        A holder's session that ended before it marked anything hides none of its earlier sessions.

        Args:
            session: any of those that are part of it; empty for none.
            holder: the name that people see.
            asking: the session that is to resume it, whose own is another.
        """
        for history in reversed(self.histories.values()):
            if history.session == asking:
                continue
            if session:
                if history.knows(session):
                    return history
            elif history.holder == holder and (history.session in self.sessions or not history.is_fresh):
                return history
        return None

    def trim_histories(self) -> None:
        """Forget the histories of readers that ended long ago."""
        spare = len(self.histories) - len(self.sessions) - _MOST_HISTORIES
        for session in [session for session in self.histories if session not in self.sessions][: max(spare, 0)]:
            del self.histories[session]
