"""A data set: its specification, what was never given of it, what came back, what was given up, and who read what.

A shard that was not given yet, or is done, is recorded nowhere: the cursor stands before or behind it, and nothing else
names it. So a million shards cost what a thousand do.

Readers of a data set with commit="checkpoint" make marks, and what a mark covers is done. A reader's history has its
last marks with what was consumed between them, so that a new session can go back to one: what came after is undone.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from edl.errors import ConflictError, SettingsError
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
from edl.quoting import quote, shown

__all__ = [
    "MARKS_KEPT",
    "MOST_UNITS",
    "MOST_WANTED",
    "DatasetShards",
    "ReaderHistory",
    "ReaderSession",
    "ShardLease",
    "check_name",
    "check_spec",
    "dataset_status",
    "describe_difference",
    "is_same_spec",
]

MOST_WANTED: Final = 10_000
"""Shards in a turn, wanted or reported: a reply of some 300 KB, and a turn of 20 ms in which all others wait."""
_MOST_NAME: Final = 200
"""Characters of a name: those of keys of a store, where names end up, have 512 in all."""
MOST_UNITS: Final = 2**62
"""Units of a data set: sums of two such numbers are still 64-bit ones."""
_MOST_SHARDS: Final = 2**40
"""Shards of an epoch: a permutation of this many is computed, and tested."""
_MOST_SECONDS: Final = 30 * 86_400.0
"""Longest lease: a month without a sign of life is forever."""
MARKS_KEPT: Final = 16
"""Marks of a reader. A job keeps a few checkpoints; each mark holds what was consumed since the mark before."""
_MOST_REASON: Final = 300
"""Characters of a failure's reason. A million poisoned shards must fit into memory."""
_MOST_HISTORIES: Final = 1000
"""Histories of readers that ended: more than a job has. A reader that is forgotten cannot be resumed."""
_MOST_POISONED: Final = 50
"""Poisoned shards shown with their reasons: a page of them; all are counted. A report must stay below 200 KB."""
_MOST_HOLDERS: Final = 500
"""Sessions shown; some 100 bytes of JSON each."""


def check_name(what: str, name: str) -> None:
    """Raise SettingsError unless a name can be shown and stored; `what` has the name, for the error."""
    if not name or len(name) > _MOST_NAME or not name.isprintable():
        raise SettingsError(f"{what} {quote(name)}: 1 to {_MOST_NAME} printable characters are possible")


def check_spec(name: str, spec: master.DatasetSpec) -> master.DatasetSpec:
    """Return a copy of a data set's specification with its defaults: 3 failures, leases of 60 s, sessions of 30 s.

    Raises:
        SettingsError: It is invalid.
    """
    check_name("data set", name)
    checked = master.DatasetSpec()
    checked.CopyFrom(spec)
    checked.max_failures = spec.max_failures or 3
    checked.lease_s = spec.lease_s or 60.0
    checked.session_s = spec.session_s or 30.0
    bounded = spec.HasField("units")
    problems = {
        "kind: a name is needed": not spec.kind or len(spec.kind) > _MOST_NAME or not spec.kind.isprintable(),
        f"units={spec.units}: 0 to 2**62 are possible": not 0 <= spec.units <= MOST_UNITS,
        f"shard_size={spec.shard_size}: 1 to 2**62 are possible": not 1 <= spec.shard_size <= MOST_UNITS,
        f"epochs={spec.epochs}: 0 or more are possible": spec.epochs < 0,
        f"max_failures={spec.max_failures}: 1 or more are possible": spec.max_failures < 0,
        f"commit={spec.commit}: not known": spec.commit not in (master.COMMIT_REPORT, master.COMMIT_CHECKPOINT),
        "a source without an end is neither shuffled nor read several times": not bounded
        and (spec.shuffle or spec.epochs > 1),
        f"flush_s={spec.flush_s}: needs a source without an end, and seconds from 0 on": not (
            0 <= spec.flush_s < math.inf and (spec.flush_s == 0 or not bounded)
        ),
    }
    for name_s in ("lease_s", "session_s"):
        value = getattr(checked, name_s)
        problems[f"{name_s}={value}: 0.1 to {_MOST_SECONDS:.0f} are possible"] = not 0.1 <= value <= _MOST_SECONDS
    for problem, found in problems.items():
        if found:
            raise SettingsError(f"data set {shown(name)}: {problem}")
    if spec.units // spec.shard_size >= _MOST_SHARDS:
        raise SettingsError(
            f"data set {shown(name)}: shards of {spec.shard_size} make {spec.units // spec.shard_size:,} of"
            f" {spec.units:,} units; at most {_MOST_SHARDS:,} are possible"
        )
    return checked


def is_same_spec(first: master.DatasetSpec, second: master.DatasetSpec) -> bool:
    """Whether two specifications, their defaults filled in, are equal."""
    return first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def describe_difference(present: master.DatasetSpec, other: master.DatasetSpec) -> str:
    """Return in words which fields of two specifications differ, the present one's value first."""
    return ", ".join(
        f"{field.name} is {shown(repr(getattr(present, field.name)), 100)}"
        f" and not {shown(repr(getattr(other, field.name)), 100)}"
        for field in master.DatasetSpec.DESCRIPTOR.fields
        if (getattr(present, field.name), field.has_presence and present.HasField(field.name))
        != (getattr(other, field.name), field.has_presence and other.HasField(field.name))
    )


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

    def part(self, start: int, stop: int) -> master.ShardRange:
        """Return a range of it."""
        return master.ShardRange(epoch=self.epoch, shard=self.shard, start=start, stop=stop)


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


@dataclass(slots=True)
class ReaderHistory:
    """The ranges that a reader consumed, through all its sessions, as far back as it may go."""

    session: str  # the latest
    holder: str  # the name that people see
    marks: deque[master.MarkState]  # the last `MARKS_KEPT`; their numbers grow, from 0 for the beginning
    pending: list[master.ShardRange] = field(default_factory=list)  # since the last mark; goes back with the session

    @classmethod
    def begin(cls, session: str, holder: str) -> ReaderHistory:
        """Return the history of a reader that has consumed nothing."""
        return cls(session, holder, deque([master.MarkState(session=session)], maxlen=MARKS_KEPT))

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was consumed and nothing marked."""
        return len(self.marks) == 1 and not self.marks[0].mark and not self.pending

    def find(self, session: str, number: int) -> int | None:
        """Return the index of a mark; None if it is not kept. Without a session, marks of any session count."""
        for index, mark in enumerate(self.marks):
            if mark.mark == number and session in ("", mark.session):
                return index
        return None

    def knows(self, session: str) -> bool:
        """Whether a session is part of it."""
        return session == self.session or any(mark.session == session for mark in self.marks)


@dataclass(eq=False)
class DatasetShards:
    """A data set's shards. Only `retry`, `mark` and `find_mark` ask whether the command was right."""

    name: str
    spec: master.DatasetSpec  # with defaults filled in; `index` as it was at the creation
    cursor: UnitCursor  # what was never given
    index: list[bytes] = field(default_factory=list)  # parts that were added to the specification's
    returned: ReturnedRanges = field(default_factory=ReturnedRanges)
    poisoned: dict[ShardKey, list[Bounds]] = field(default_factory=dict)  # ranges that were given up
    failures: dict[ShardKey, list[master.FailureState]] = field(default_factory=dict)  # of shards that are not done
    sessions: dict[str, ReaderSession] = field(default_factory=dict)  # live ones
    histories: dict[str, ReaderHistory] = field(default_factory=dict)  # by the latest session; the oldest first
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
            taken += self.returned.take(most, may_take)
        while len(taken) < most:
            taken += self.cursor.take(most - len(taken))
            if len(taken) < most and len(self.returned):
                alone = all(other.holder == session.holder for other in self.sessions.values())
                taken += self.returned.take(
                    most - len(taken),
                    lambda key, alone=alone: self._may_retry(session, alone, key) and may_take(key),  # type: ignore[misc]
                    late=True,
                )
            if len(taken) == most or not self.cursor.begin_epoch():
                break
        return taken

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
            self.histories[lease.session.id].pending.append(lease.part(lease.marked, stop))
        lease.marked = stop

    def give_back(self, lease: ShardLease) -> None:
        """Have the rest of a lease wait for another holder."""
        if lease.marked < lease.stop:
            self.returned.add((lease.epoch, lease.shard), lease.marked, lease.stop)

    def fail(self, lease: ShardLease, reason: str, time_ms: int, *, late: bool) -> bool:
        """Count a failure of the rest of a lease, which goes back (a `late` one behind all others) or is given up.

        Return whether it was given up.
        """
        if lease.marked >= lease.stop:
            return False
        key = (lease.epoch, lease.shard)
        failures = self.failures.setdefault(key, [])
        reason = shown(reason, _MOST_REASON) or "no reason was given"
        failures.append(master.FailureState(holder=lease.session.holder, reason=reason, time_ms=time_ms))
        if len(failures) < self.spec.max_failures:
            self.returned.add(key, lease.marked, lease.stop, late=late and not self.is_stream)
            return False
        del failures[: -self.spec.max_failures]
        join_bounds(self.poisoned.setdefault(key, []), lease.marked, lease.stop)
        return True

    def undo(self, parts: Iterable[master.ShardRange]) -> None:
        """Have ranges wait again that were done."""
        for part in parts:
            self.returned.add((part.epoch, part.shard), part.start, part.stop)
            self.units_done -= part.stop - part.start

    def retry(self, shards: frozenset[int]) -> int:
        """Have `shards` of every epoch, or all if there are none, wait again that were given up; return their number.

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

    # --- Marks, of data sets with commit="checkpoint". ---

    def mark(self, session: ReaderSession, command: master.Mark) -> bool:
        """Cover what a session has reported, and parts of what it has, by a mark; return False for a repeated one.

        Raises:
            SettingsError: The data set commits by reports, or a part is impossible or of a lease of another session.
            ConflictError: A later mark was made.
        """
        if not self.by_checkpoint:
            raise SettingsError(
                f"data set {self.name} commits by reports: create it with commit='checkpoint' for marks"
            )
        history = self.histories[session.id]
        last = history.marks[-1]
        if (last.session, last.mark) == (session.id, command.mark) and last.mark:
            return False
        if command.mark <= last.mark:
            raise ConflictError(f"mark {command.mark} of session {session.id}: {last.mark} was made, and marks grow")
        _check_parts(session, command)
        for part in command.partial:
            lease = session.leases[part.lease.id]
            self.finish(lease, lease.start + part.units)
        in_hand = [lease.part(lease.marked, lease.stop) for lease in session.leases.values()]
        open_parts = [part for part in in_hand if part.start < part.stop]
        history.marks.append(
            master.MarkState(session=session.id, mark=command.mark, consumed=history.pending, open=open_parts)
        )
        history.pending = []
        return True

    def find_mark(self, session: ReaderSession, command: master.Resume) -> tuple[ReaderHistory, int] | None:
        """Return the history that a new session resumes, and the index of the mark in it. Changes nothing.

        The result is None for the beginning of a holder that has never read.

        Raises:
            SettingsError: The data set commits by reports, or is another than the session's; or the mark is not kept.
            ConflictError: Another session that lives has resumed it, or `session` is not new.
        """
        if session.dataset is not self or not self.by_checkpoint:
            raise SettingsError(
                f"data set {self.name}: session {session.id} reads another, or what is reported there is done at once"
            )
        if session.leases or session.last_request or not self.histories[session.id].is_fresh:
            raise ConflictError(f"session {session.id} has begun to read: resume in a new one")
        history = self._find_history(command.of_session, command.of_holder, session.id)
        name = shown(command.of_session or command.of_holder, 200)
        if history is None and not command.of_session and not command.mark:
            return None
        if history is None:
            raise SettingsError(
                f"nothing is kept of {name}: it never read data set {self.name}, or ended too long ago."
                " Restore the data set's progress, or read without resuming"
            )
        index = history.find(command.of_session, command.mark)
        if index is None and not command.mark:
            index = history.find("", 0)  # the beginning, of whichever session
        if index is None:
            kept = ", ".join(str(mark.mark) for mark in history.marks)
            raise SettingsError(
                f"mark {command.mark} of {name} is not kept: those of its history, the last {MARKS_KEPT}, are {kept},"
                " and marks after one that was resumed are dropped. Load a checkpoint with one of them, or restore the"
                " data set's progress"
            )
        live = self.sessions.get(history.session)
        if live is not None and command.of_session != live.id:
            raise ConflictError(
                f"{shown(live.holder)} continues {name} in session {live.id}, which is live: it ends when it is closed,"
                f" or is silent for {self.spec.session_s:g} s"
            )
        return history, index

    def resume(self, session: ReaderSession, history: ReaderHistory, index: int) -> list[UnitRange]:
        """Give a history to a session, and undo what came after a mark; return what was in hand at that mark."""
        while len(history.marks) > index + 1:
            self.undo(history.marks.pop().consumed)
        self.undo(history.pending)  # of a session that was closed and kept it
        history.pending = []
        self.histories.pop(history.session, None)
        history.session, history.holder = session.id, session.holder
        self.histories[session.id] = history
        return [
            UnitRange(part.epoch, part.shard, *bounds)
            for part in history.marks[-1].open
            for bounds in self.returned.cut((part.epoch, part.shard), part.start, part.stop)
        ]

    def _find_history(self, session: str, holder: str, asking: str) -> ReaderHistory | None:
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


def _check_parts(session: ReaderSession, command: master.Mark) -> None:
    seen: set[int] = set()
    for part in command.partial:
        lease = session.leases.get(part.lease.id)
        if lease is None or lease.term != part.lease.term or lease.id in seen:
            raise SettingsError(
                f"mark {command.mark} of session {session.id} names lease {part.lease.id}, which it does not have"
                " or names twice"
            )
        if part.units < 0 or not lease.marked <= lease.start + part.units <= lease.stop:
            raise SettingsError(
                f"mark {command.mark} of session {session.id}: {part.units} units of lease {lease.id}, of which"
                f" {lease.marked - lease.start} to {lease.stop - lease.start} can have been consumed"
            )
        seen.add(lease.id)


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
    if isinstance(cursor, StreamCursor) and cursor.begun_shard is not None:
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
