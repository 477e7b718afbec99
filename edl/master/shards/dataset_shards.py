"""The state of one data set: what was never given, what came back, what was given up, and who read what.

A shard that was not given yet, or is done, is recorded nowhere: the cursor stands before or behind it, and nothing else
names it. So a million shards cost what a thousand do.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from edl.errors import ConflictError
from edl.master.shards.units import (
    Bounds,
    ReturnedRanges,
    ShardKey,
    StreamCursor,
    UnitCursor,
    UnitRange,
    join_bounds,
    make_cursor,
)
from edl.protocol import master
from edl.quoting import shown

__all__ = [
    "MARKS_KEPT",
    "DatasetShards",
    "FailureRecord",
    "ReaderHistory",
    "ReaderMark",
    "ReaderSession",
    "ShardLease",
    "dataset_status",
]

MARKS_KEPT: Final = 16
"""Marks of a reader. A job keeps a few checkpoints; each mark holds what was consumed since the mark before."""
_MOST_REASON: Final = 300
"""Characters of a failure's reason. A million poisoned shards must fit into memory."""
_MOST_GIVEN_AGAIN: Final = 1024
"""Shards that came back of which is known who got them next, for late reports, which come within minutes."""
_MOST_HISTORIES: Final = 1000
"""Histories of readers that ended: more than a job has. A reader that is forgotten cannot be resumed."""
_MOST_POISONED: Final = 50
"""Poisoned shards shown with their reasons: a page of them; all are counted. A report must stay below 200 KB."""
_MOST_HOLDERS: Final = 500
"""Sessions shown; some 100 bytes of JSON each."""


@dataclass(slots=True, eq=False)
class ShardLease:
    """A range [start, stop) of a shard that a session has."""

    id: int  # never given twice
    term: int  # of the master that gave it
    session: ReaderSession
    epoch: int
    shard: int
    start: int
    stop: int
    marked: int  # units before it are covered by a mark of the reader; `start` until there is one

    def message(self) -> master.Lease:
        """Return it as it goes over the wire."""
        return master.Lease(
            id=self.id, term=self.term, epoch=self.epoch, shard=self.shard, start=self.start, stop=self.stop
        )


@dataclass(slots=True, eq=False)
class ReaderSession:
    """A reader's life, from its opening to its end."""

    id: str  # random
    holder: str  # the name that people see
    dataset: DatasetShards
    last_request: int = 0
    reply: master.NextReply | None = None  # to the last request
    leases: dict[int, ShardLease] = field(default_factory=dict)  # by id, in the order in which they were given
    units_done: int = 0
    resume: tuple[master.Resume, master.ResumeReply] | None = None

    @property
    def lease_s(self) -> float:
        """Seconds after which a lease ends that no turn renewed."""
        return self.dataset.spec.lease_s

    @property
    def session_s(self) -> float:
        """Seconds of silence after which the session ends."""
        return self.dataset.spec.session_s


@dataclass(slots=True)
class ReaderMark:
    """A moment of a reader that it may come back to."""

    session: str  # that made it
    number: int  # grows in a reader's history; 0 is the beginning
    consumed: list[UnitRange] = field(default_factory=list)  # since the mark before
    open: list[UnitRange] = field(default_factory=list)  # in hand, and not consumed


@dataclass(slots=True)
class ReaderHistory:
    """The ranges that a reader consumed, through all its sessions, as far back as it may go."""

    session: str  # the latest
    holder: str  # the name that people see
    marks: deque[ReaderMark]  # the last `MARKS_KEPT`
    pending: list[UnitRange] = field(default_factory=list)  # since the last mark; if the session is lost, it goes back

    @classmethod
    def begin(cls, session: str, holder: str) -> ReaderHistory:
        """Return the history of a reader that has consumed nothing."""
        return cls(session, holder, deque([ReaderMark(session, 0)], maxlen=MARKS_KEPT))

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was consumed and nothing marked."""
        return len(self.marks) == 1 and not self.marks[0].number and not self.pending

    def find(self, session: str, number: int) -> int | None:
        """Return the index of a mark; None if it is not kept. Without a session, marks of any session count."""
        for index, mark in enumerate(self.marks):
            if mark.number == number and session in ("", mark.session):
                return index
        return None

    def knows(self, session: str) -> bool:
        """Whether a session is part of it."""
        return session == self.session or any(mark.session == session for mark in self.marks)


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A failure of a shard that `holder` had. `time_ms` is the master's clock, in milliseconds since 1970."""

    holder: str
    reason: str
    time_ms: int


@dataclass(eq=False)
class DatasetShards:
    """A data set's shards. Methods change the state without asking whether the command was right."""

    name: str
    spec: master.DatasetSpec  # with defaults filled in; `index` as it was at the creation
    cursor: UnitCursor  # what was never given
    index: list[bytes] = field(default_factory=list)  # parts that were added to the specification's
    returned: ReturnedRanges = field(default_factory=ReturnedRanges)
    poisoned: dict[ShardKey, list[Bounds]] = field(default_factory=dict)  # ranges that were given up
    failures: dict[ShardKey, list[FailureRecord]] = field(default_factory=dict)  # of shards that are not done
    sessions: dict[str, ReaderSession] = field(default_factory=dict)  # live ones
    histories: dict[str, ReaderHistory] = field(default_factory=dict)  # by the latest session; the oldest first
    given_again: dict[ShardKey, str] = field(default_factory=dict)  # holders of shards that came back, oldest first
    leased: int = 0
    units_done: int = 0  # in all epochs, including provisional ones

    @classmethod
    def create(cls, name: str, spec: master.DatasetSpec) -> DatasetShards:
        """Return a data set of which nothing was given; `spec` is checked and has its defaults filled in."""
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
        """Whether there is nothing to give and no reader has anything; shards that were given up do not count."""
        return not self.leased and not self.returned and self.cursor.at_end

    @property
    def provisional_units(self) -> int:
        """Units that live sessions reported and no mark covers yet."""
        histories = (self.histories[session] for session in self.sessions if session in self.histories)
        return sum(part.stop - part.start for history in histories for part in history.pending)

    def describe(self, *, index: bool = True) -> master.DatasetReply:
        """Return what a reader needs to know. Without the index where each line of a growing source would copy it."""
        reply = master.DatasetReply(dataset=self.name, spec=self.spec, units=self.cursor.units)
        reply.ended = not isinstance(self.cursor, StreamCursor) or self.cursor.ended
        if not index:
            reply.spec.ClearField("index")
        elif self.index:
            reply.spec.index = b"".join([self.spec.index, *self.index])
        return reply

    def take(self, most: int, session: ReaderSession) -> list[UnitRange]:
        """Take up to `most` ranges for a session."""
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
                late = self.returned.take(
                    most - len(taken),
                    lambda key, alone=alone: self._may_retry(session, alone, key) and may_take(key),  # type: ignore[misc]
                    late=True,
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
        """Count the units of a lease up to `stop` as done. The caller sees to the rest."""
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
        """Count a failure of the rest of a lease, which goes back (a `late` one behind all others) or is given up.

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
        """Have ranges wait again that were done; return how many units they have."""
        units = 0
        for epoch, shard, start, stop in parts:
            self.returned.add((epoch, shard), start, stop)
            units += stop - start
        self.units_done -= units
        return units

    def retry(self, shards: frozenset[int]) -> int:
        """Have `shards` of every epoch, or all if there are none, wait again that were given up.

        Returns:
            How many there were.

        Raises:
            ConflictError: One of them was not given up.
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
        """Return the history that `session` is part of, or without one the newest of `holder`; None if none is kept.

        The own history of the session that is `asking` does not count. A holder's session that ended before it marked
        anything does not hide earlier ones.
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


def dataset_status(dataset: DatasetShards) -> dict[str, Any]:
    """Return what people see of a data set: counts, its poisoned shards with the reasons, and who reads it.

    A shard with parts in several states counts as poisoned before doing before todo. Takes some milliseconds with ten
    thousand leases.
    """
    spec, cursor = dataset.spec, dataset.cursor
    poisoned = set(dataset.poisoned)
    doing = {(lease.epoch, lease.shard) for session in dataset.sessions.values() for lease in session.leases.values()}
    doing -= poisoned
    waiting = {key for key, *_ in dataset.returned}
    if cursor.begun_shard is not None:
        waiting.add((cursor.epoch, cursor.begun_shard))
    waiting -= poisoned | doing
    began = cursor.epoch * -(-cursor.units // spec.shard_size) + cursor.shards_given
    return {
        "name": dataset.name,
        "kind": spec.kind,
        "epoch": cursor.epoch,
        "epochs": spec.epochs or (0 if not dataset.is_stream else 1),
        "units": cursor.units,
        "ended": not isinstance(cursor, StreamCursor) or cursor.ended,
        "units_done": dataset.units_done,
        "provisional_units": dataset.provisional_units,
        "finished": dataset.is_finished and not dataset.provisional_units,
        "shards": {
            "todo": len(waiting) + cursor.shards_left,
            "doing": len(doing),
            "done": began - len(waiting) - len(doing) - len(poisoned),
            "poisoned": len(poisoned),
        },
        "poisoned": [_poisoned_shard(dataset, key) for key in itertools.islice(sorted(poisoned), _MOST_POISONED)],
        "holders": [
            {
                "holder": session.holder,
                "session": session.id,
                "leases": len(session.leases),
                "units_done": session.units_done,
            }
            for session in itertools.islice(dataset.sessions.values(), _MOST_HOLDERS)
        ],
    }


def _poisoned_shard(dataset: DatasetShards, key: tuple[int, int]) -> dict[str, Any]:
    parts = dataset.poisoned[key]
    return {
        "shard": key[1],
        "epoch": key[0],
        "start": parts[0][0],
        "stop": parts[-1][1],
        "failures": [
            {"holder": failure.holder, "reason": failure.reason, "time": failure.time_ms / 1000}
            for failure in dataset.failures.get(key, ())
        ],
    }
