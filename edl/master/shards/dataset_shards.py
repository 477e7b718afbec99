"""A data set's state (units not handed out yet, returned units, units given up, and readers) and its messages.

A shard that was not handed out yet, or that is done, has no record: only the cursor's position tells these two apart.
So a million shards need no more memory than a thousand.

Readers of a data set with commit="checkpoint" make marks, and units covered by a mark are done. A reader's history
contains its last marks and the units consumed between them, so a new session can go back to one of these marks.

Snapshots and saved progress may be read by a different version of EDL, so the bytes start with their type and format,
and end with a checksum.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from edl.errors import ConflictError, ProtocolError, SettingsError
from edl.master.shards.units import (
    Bounds,
    ReturnedRanges,
    ShardKey,
    UnitCursor,
    UnitRange,
    is_same_spec,
    join_bounds,
)
from edl.protocol import master
from edl.quoting import shown

M = TypeVar("M", bound=Message)

_FORMAT: Final = 1  # of an envelope's contents: another version of EDL may refuse it, but never misreads it
_CHECKSUM_NBYTES: Final = 4  # a CRC-32
_PROGRESS: Final = b"EDL progress\0"
_MARKS_KEPT: Final = 16
"""Maximum number of marks kept for a reader. A job keeps a few checkpoints; each mark lists the units consumed since
the previous mark."""
_MOST_REASON: Final = 300  # characters: a million poisoned shards must fit into memory
_MOST_HISTORIES: Final = 1000  # more than a job has; a forgotten reader cannot be resumed
_MOST_POISONED: Final = 50  # shown with their reasons: a report must stay below 200 KB
_MOST_HOLDERS: Final = 500  # shown; about 100 bytes of JSON each


def seal(magic: bytes, message: Message) -> bytes:
    """Return a message as bytes that start with `magic`, which identifies the type of the message."""
    body = magic + bytes([_FORMAT]) + message.SerializeToString(deterministic=True)
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big")


def open_envelope(magic: bytes, what: str, data: bytes, kind: type[M]) -> M:
    """Return the message of type `kind` in bytes from `seal`, or raise a ProtocolError that calls the bytes `what`."""
    if data[: len(magic)] != magic:
        raise ProtocolError(f"{len(data):,} bytes are not a {what}")
    body, checksum = data[:-_CHECKSUM_NBYTES], data[-_CHECKSUM_NBYTES:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_NBYTES, "big") != checksum:
        raise ProtocolError(f"{what} of {len(data):,} bytes is damaged: its checksum does not match")
    found = body[len(magic)]
    if found != _FORMAT:
        raise ProtocolError(f"{what} of format {found}; this version of EDL reads {_FORMAT}")
    try:
        return kind.FromString(body[len(magic) + 1 :])
    except DecodeError as exc:
        raise ProtocolError(f"{what} cannot be read: {exc}") from exc


@dataclass(slots=True, eq=False)
class ShardLease:
    """A range [start, stop) of a shard, leased to a session."""

    id: int  # never reused
    term: int  # of the master that granted it
    session: ReaderSession
    epoch: int
    shard: int
    start: int
    stop: int
    marked: int  # units before it are covered by a mark of the reader; `start` until there is one

    def message(self) -> master.Lease:
        """Return this lease as a wire message."""
        return master.Lease(
            id=self.id, term=self.term, epoch=self.epoch, shard=self.shard, start=self.start, stop=self.stop
        )

    def part(self, start: int, stop: int) -> master.ShardRange:
        """Return a range of this lease's shard."""
        return master.ShardRange(epoch=self.epoch, shard=self.shard, start=start, stop=stop)


@dataclass(slots=True, eq=False)
class ReaderSession:
    """A reader's session, from its opening to its end."""

    id: str  # random
    holder: str  # the name that people see
    dataset: DatasetShards
    last_request: int = 0
    reply: master.NextReply | None = None  # reply to the last request
    leases: dict[int, ShardLease] = field(default_factory=dict)  # by id, in the order in which they were granted
    units_done: int = 0
    resume: tuple[master.Resume, master.ResumeReply] | None = None

    def open_parts(self) -> list[master.ShardRange]:
        """Return the parts of shards that the session has leased and not consumed."""
        leases = self.leases.values()
        return [lease.part(lease.marked, lease.stop) for lease in leases if lease.marked < lease.stop]


@dataclass(slots=True)
class ReaderHistory:
    """The ranges that a reader consumed in all its sessions, since the earliest mark that it can still go back to."""

    session: str  # the latest
    holder: str  # the name that people see
    marks: deque[master.MarkState]  # the last ones; their numbers increase, from 0 for the beginning
    pending: list[master.ShardRange] = field(default_factory=list)  # since the last mark; requeued with the session

    @property
    def is_fresh(self) -> bool:
        """Whether the reader has consumed nothing and marked nothing."""
        return len(self.marks) == 1 and not self.marks[0].mark and not self.pending


@dataclass(eq=False)
class DatasetShards:
    """A data set's shards. Only `retry`, `mark`, `find_mark` and `at_progress` check that the command is valid."""

    name: str
    spec: master.DatasetSpec  # with defaults filled in; `index` as it was at the creation
    cursor: UnitCursor  # units not handed out yet
    index: list[bytes] = field(default_factory=list)  # parts added to the specification's
    returned: ReturnedRanges = field(default_factory=ReturnedRanges)
    poisoned: dict[ShardKey, list[Bounds]] = field(default_factory=dict)  # ranges given up
    failures: dict[ShardKey, list[master.FailureState]] = field(default_factory=dict)  # of shards that are not done
    sessions: dict[str, ReaderSession] = field(default_factory=dict)  # live ones
    histories: dict[str, ReaderHistory] = field(default_factory=dict)  # by the latest session; the oldest first
    leased: int = 0
    units_done: int = 0  # in all epochs, including provisional ones

    @property
    def by_checkpoint(self) -> bool:
        """Whether reported units are done only when a mark covers them."""
        return self.spec.commit == master.COMMIT_CHECKPOINT

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to hand out and no reader has a lease; shards given up do not count."""
        return not self.leased and not self.returned and self.cursor.at_end

    @property
    def is_done(self) -> bool:
        """Whether the data set is finished and a mark covers every reported unit."""
        return self.is_finished and not self.provisional_units

    @property
    def provisional_units(self) -> int:
        """Number of units that live sessions have reported and that no mark covers yet."""
        return sum(part.stop - part.start for part in self._provisional())

    def _provisional(self) -> list[master.ShardRange]:
        histories = (self.histories[session] for session in self.sessions if session in self.histories)
        return [part for history in histories for part in history.pending]

    def describe(self, *, index: bool = True) -> master.DatasetReply:
        """Return what a reader needs to know; without the index if not `index`, since each extension would copy it."""
        reply = master.DatasetReply(dataset=self.name, spec=self.spec, units=self.cursor.units, ended=self.cursor.ended)
        if not index:
            reply.spec.ClearField("index")
        elif self.index:
            reply.spec.index = b"".join([self.spec.index, *self.index])
        return reply

    def status(self) -> dict[str, Any]:
        """Return the status for people to read: counts, the poisoned shards with reasons, and the readers.

        A shard with parts in several states counts as poisoned if any part is, else as doing if any part is, else as
        todo.
        """
        spec, cursor = self.spec, self.cursor
        poisoned = set(self.poisoned)
        doing = {(lease.epoch, lease.shard) for session in self.sessions.values() for lease in session.leases.values()}
        doing -= poisoned
        waiting = {key for key, *_ in self.returned}
        given, left, begun = cursor.shards()
        if begun is not None:
            waiting.add((cursor.epoch, begun))
        waiting -= poisoned | doing
        given += cursor.epoch * -(-cursor.units // spec.shard_size)
        return {
            "name": self.name,
            "kind": spec.kind,
            "epoch": cursor.epoch,
            "epochs": spec.epochs or (1 if cursor.is_stream else 0),
            "units": cursor.units,
            "ended": cursor.ended,
            "units_done": self.units_done,
            "provisional_units": self.provisional_units,
            "finished": self.is_done,
            "shards": {
                "todo": len(waiting) + left,
                "doing": len(doing),
                "done": given - len(waiting) - len(doing) - len(poisoned),
                "poisoned": len(poisoned),
            },
            "poisoned": [
                {
                    "shard": key[1],
                    "epoch": key[0],
                    "start": self.poisoned[key][0][0],
                    "stop": self.poisoned[key][-1][1],
                    "failures": [
                        {"holder": failure.holder, "reason": failure.reason, "time": failure.time_ms / 1000}
                        for failure in self.failures.get(key, ())
                    ],
                }
                for key in itertools.islice(sorted(poisoned), _MOST_POISONED)
            ],
            "holders": [
                {
                    "holder": session.holder,
                    "session": session.id,
                    "leases": len(session.leases),
                    "units_done": session.units_done,
                }
                for session in itertools.islice(self.sessions.values(), _MOST_HOLDERS)
            ],
        }

    # --- Shards handed out and returned. ---

    def open_session(self, name: str, holder: str) -> ReaderSession:
        """Add a new reader."""
        session = self.sessions[name] = ReaderSession(name, holder, self)
        if self.by_checkpoint:
            beginning = deque([master.MarkState(session=name)], maxlen=_MARKS_KEPT)
            self.histories[name] = ReaderHistory(name, holder, beginning)
        return session

    def take(self, most: int, session: ReaderSession) -> list[UnitRange]:
        """Take up to `most` ranges for a session."""
        taken: list[UnitRange] = []
        alone = at_risk = False
        if self.failures and self.returned:
            at_risk = any(self._is_at_risk((lease.epoch, lease.shard)) for lease in session.leases.values())

        def may_take(key: ShardKey) -> bool:
            """Hand out at most one shard with only one attempt left: if the reader crashes, all its shards fail."""
            nonlocal at_risk
            if not self._is_at_risk(key):
                return True
            at_risk, refused = True, at_risk
            return not refused

        def may_retry(key: ShardKey) -> bool:
            """Withhold a shard from the holder where it failed: one broken machine must not use up all attempts."""
            failures = self.failures.get(key)
            return (alone or not failures or failures[-1].holder != session.holder) and may_take(key)

        if len(self.returned):
            taken += self.returned.take(most, may_take)
        while len(taken) < most:
            taken += self.cursor.take(most - len(taken))
            if len(taken) < most and len(self.returned):
                alone = all(other.holder == session.holder for other in self.sessions.values())
                taken += self.returned.take(most - len(taken), may_retry, late=True)
            if len(taken) == most or not self.cursor.begin_epoch():
                break
        return taken

    def _is_at_risk(self, key: ShardKey) -> bool:
        failures = self.failures.get(key)
        return failures is not None and len(failures) >= self.spec.max_failures - 1

    def finish(self, lease: ShardLease, stop: int) -> None:
        """Count the units of a lease up to `stop` as done. The caller handles the remaining units."""
        if stop <= lease.marked:
            return
        self.units_done += stop - lease.marked
        lease.session.units_done += stop - lease.marked
        if self.by_checkpoint:
            self.histories[lease.session.id].pending.append(lease.part(lease.marked, stop))
        lease.marked = stop

    def give_back(self, lease: ShardLease) -> None:
        """Requeue the rest of a lease."""
        if lease.marked < lease.stop:
            self.returned.add((lease.epoch, lease.shard), lease.marked, lease.stop)

    def fail(self, lease: ShardLease, reason: str, time_ms: int, *, late: bool) -> bool:
        """Count a failure of a lease; requeue its rest (last if `late`), or give the rest up and return True."""
        if lease.marked >= lease.stop:
            return False
        key = (lease.epoch, lease.shard)
        failures = self.failures.setdefault(key, [])
        reason = shown(reason, _MOST_REASON) or "no reason given"
        failures.append(master.FailureState(holder=lease.session.holder, reason=reason, time_ms=time_ms))
        if len(failures) < self.spec.max_failures:
            self.returned.add(key, lease.marked, lease.stop, late=late and not self.cursor.is_stream)
            return False
        del failures[: -self.spec.max_failures]
        join_bounds(self.poisoned.setdefault(key, []), lease.marked, lease.stop)
        return True

    def _undo(self, parts: Iterable[master.ShardRange]) -> None:
        for part in parts:
            self.returned.add((part.epoch, part.shard), part.start, part.stop)
            self.units_done -= part.stop - part.start

    def retry(self, shards: frozenset[int]) -> int:
        """Requeue `shards` given up in any epoch (empty: all); return their number. ConflictError if not given up."""
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
        """Add a mark that covers a session's reported units and parts of its leases; return False if it is repeated."""
        if not self.by_checkpoint:
            raise SettingsError(
                f"data set {self.name} commits by reports: create it with commit='checkpoint' to use marks"
            )
        history = self.histories[session.id]
        last = history.marks[-1]
        if (last.session, last.mark) == (session.id, command.mark) and last.mark:
            return False
        if command.mark <= last.mark:
            raise ConflictError(f"mark {command.mark} of session {session.id}: must be above {last.mark}")
        _check_parts(session, command)
        for part in command.partial:
            lease = session.leases[part.lease.id]
            self.finish(lease, lease.start + part.units)
        open_parts = session.open_parts()
        history.marks.append(
            master.MarkState(session=session.id, mark=command.mark, consumed=history.pending, open=open_parts)
        )
        history.pending = []
        return True

    def find_mark(self, session: ReaderSession, command: master.Resume) -> tuple[ReaderHistory, int] | None:
        """Return the history, and the index of the mark to resume from; None for a new holder."""
        if session.dataset is not self or not self.by_checkpoint:
            raise SettingsError(
                f"data set {self.name} has commit='report', or session {session.id} reads a different data set"
            )
        if session.leases or session.last_request or not self.histories[session.id].is_fresh:
            raise ConflictError(f"session {session.id} has begun to read: resume in a new one")
        history = self._find_history(command.of_session, command.of_holder, session.id)
        name = shown(command.of_session or command.of_holder, 200)
        if history is None and not command.of_session and not command.mark:
            return None
        if history is None:
            raise SettingsError(
                f"no history of {name}: it never read data set {self.name}, or ended too long ago."
                " Restore the data set's progress, or read without resuming"
            )
        kept = [mark.mark for mark in history.marks]
        index = kept.index(command.mark) if command.mark in kept else None
        # The beginning, mark 0, belongs to any session.
        if index is None or (command.mark and command.of_session not in ("", history.marks[index].session)):
            raise SettingsError(
                f"mark {command.mark} of {name} is not kept: its last {_MARKS_KEPT} marks are"
                f" {', '.join(map(str, kept))}, and marks after a resumed one are dropped. Load a checkpoint"
                " with one of them, or restore the data set's progress"
            )
        live = self.sessions.get(history.session)
        if live is not None and command.of_session != live.id:
            raise ConflictError(
                f"{shown(live.holder)} continues {name} in session {live.id}, which is live until it is closed"
                f" or silent for {self.spec.session_s:g} s"
            )
        return history, index

    def _find_history(self, session: str, holder: str, asking: str) -> ReaderHistory | None:
        """Return the newest history of `session` or, if that is empty, of `holder`, except that of `asking`.

        A session that ended before its first mark does not hide the holder's earlier sessions.
        """
        for history in reversed(self.histories.values()):
            if history.session == asking:
                continue
            if session:
                if session == history.session or any(mark.session == session for mark in history.marks):
                    return history
            elif history.holder == holder and (history.session in self.sessions or not history.is_fresh):
                return history
        return None

    def resume(self, session: ReaderSession, history: ReaderHistory, index: int) -> list[UnitRange]:
        """Give a history to a session, and undo everything after a mark; return the ranges then open at that mark."""
        while len(history.marks) > index + 1:
            self._undo(history.marks.pop().consumed)
        self._undo(history.pending)  # of a closed session that kept it
        history.pending = []
        self.histories.pop(history.session, None)
        history.session, history.holder = session.id, session.holder
        self.histories[session.id] = history
        return [
            UnitRange(part.epoch, part.shard, *bounds)
            for part in history.marks[-1].open
            for bounds in self.returned.cut((part.epoch, part.shard), part.start, part.stop)
        ]

    def end_session(self, session: ReaderSession, *, keep: bool) -> int | None:
        """Remove a reader without leases; requeue units that no mark covers, unless `keep`. Return its last mark."""
        history = self.histories.pop(session.id, None)
        del self.sessions[session.id]
        if history is None:
            return None
        if not keep:
            self._undo(history.pending)
            history.pending = []
        self.histories[session.id] = history  # the newest of the ended ones
        spare = len(self.histories) - len(self.sessions) - _MOST_HISTORIES
        for ended in [name for name in self.histories if name not in self.sessions][: max(spare, 0)]:
            del self.histories[ended]
        return int(history.marks[-1].mark)

    # --- As messages. ---

    def message(self) -> master.DatasetState:
        """Return the data set with its readers, for `of_message`."""
        cursor = self.cursor
        return master.DatasetState(
            dataset=self.name,
            spec=self.spec,
            index=self.index,
            units=cursor.units,
            ended=cursor.is_stream and cursor.ended,
            epoch=cursor.epoch,
            position=cursor.position,
            units_done=self.units_done,
            shards=self._shard_messages(()),
            sessions=[
                master.SessionState(
                    session=session.id,
                    holder=session.holder,
                    last_request=session.last_request,
                    reply=session.reply,
                    leases=[
                        master.LeaseState(lease=lease.message(), marked=lease.marked)
                        for lease in session.leases.values()
                    ],
                    units_done=session.units_done,
                    resume=session.resume and session.resume[0],
                    resume_reply=session.resume and session.resume[1],
                )
                for session in self.sessions.values()
            ],
            histories=[
                master.HistoryState(
                    session=history.session, holder=history.holder, marks=history.marks, pending=history.pending
                )
                for history in self.histories.values()
            ],
        )

    @classmethod
    def of_message(cls, message: master.DatasetState) -> DatasetShards:
        """Return the data set described by a message, with its readers."""
        cursor = UnitCursor(
            message.spec,
            message.units,
            ended=message.ended,
            epoch=message.epoch,
            position=message.position,
        )
        dataset = cls(message.dataset, message.spec, cursor, list(message.index), units_done=message.units_done)
        dataset._take_shards(message.shards)
        for state in message.sessions:
            session = ReaderSession(state.session, state.holder, dataset, state.last_request)
            session.units_done = state.units_done
            if state.HasField("reply"):
                session.reply = state.reply
            if state.HasField("resume"):
                session.resume = (state.resume, state.resume_reply)
            for given in state.leases:
                lease = given.lease
                session.leases[lease.id] = ShardLease(
                    *(lease.id, lease.term, session, lease.epoch, lease.shard, lease.start, lease.stop, given.marked)
                )
            dataset.sessions[session.id] = session
            dataset.leased += len(session.leases)
        for history in message.histories:
            marks = deque(history.marks, maxlen=_MARKS_KEPT)
            dataset.histories[history.session] = ReaderHistory(
                history.session, history.holder, marks, list(history.pending)
            )
        return dataset

    def progress(self) -> bytes:
        """Return which units are done, for `at_progress`: leased units and units that no mark covers do not count."""
        open_parts = [part for session in self.sessions.values() for part in session.open_parts()]
        state = master.ProgressState(
            spec=self.spec,
            units=self.cursor.units,
            epoch=self.cursor.epoch,
            position=self.cursor.position,
            units_done=self.units_done - self.provisional_units,
            shards=self._shard_messages(open_parts + self._provisional()),
        )
        return seal(_PROGRESS, state)

    def at_progress(self, data: bytes | None) -> DatasetShards:
        """Return the data set at the time of a `progress` call (None: the start), without readers, at its present size.

        ProtocolError if the bytes do not contain progress, are damaged, or are impossible for this data set;
        ConflictError if the progress belongs to a different specification, or to a source that has not grown that far
        here.
        """
        beginning = master.ProgressState(spec=self.spec, units=self.cursor.units)
        state = beginning if data is None else open_envelope(_PROGRESS, "progress of a data set", data, type(beginning))
        if not is_same_spec(state.spec, self.spec):
            raise ConflictError(f"data set {self.name}: the progress belongs to a different specification")
        now, size = self.cursor, self.spec.shard_size
        if now.is_stream and state.position > now.units:
            raise ConflictError(
                f"data set {self.name} has {now.units} units so far, but the progress is at {state.position}: extend"
                " its index first"
            )
        cursor = UnitCursor(self.spec, now.units, ended=now.ended, epoch=state.epoch, position=state.position)
        possible = state.units_done >= 0 and cursor.is_possible and (now.is_stream or state.units == now.units)
        for shard in state.shards:
            low, high = shard.shard * size, min((shard.shard + 1) * size, now.units)
            possible = possible and 0 <= shard.epoch <= cursor.epoch and 0 <= low < high
            for bounds in (shard.returned, shard.poisoned):
                pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
                possible = possible and len(bounds) % 2 == 0 and all(low <= a < b <= high for a, b in pairs)
        if not possible:
            raise ProtocolError(f"data set {self.name}: impossible progress")
        restored = DatasetShards(self.name, self.spec, cursor, list(self.index), units_done=state.units_done)
        restored._take_shards(state.shards)
        return restored

    def _shard_messages(self, more: Iterable[master.ShardRange]) -> list[master.ShardState]:
        """Return all shards, sorted, except untouched, leased and done ones; the ranges in `more` count as returned."""
        shards: dict[ShardKey, master.ShardState] = {}

        def of(key: ShardKey) -> master.ShardState:
            return shards.setdefault(key, master.ShardState(epoch=key[0], shard=key[1]))

        for key, parts, late, passed in self.returned:
            state = of(key)
            state.returned.extend(itertools.chain.from_iterable(parts))
            state.late = late
            state.passed = passed
        for part in more:
            of((part.epoch, part.shard)).returned.extend((part.start, part.stop))
        for key, parts in self.poisoned.items():
            of(key).poisoned.extend(itertools.chain.from_iterable(parts))
        for key, failures in self.failures.items():
            of(key).failures.extend(failures)
        return [shards[key] for key in sorted(shards)]

    def _take_shards(self, messages: Iterable[master.ShardState]) -> None:
        for message in messages:
            key = (message.epoch, message.shard)
            for start, stop in zip(message.returned[::2], message.returned[1::2], strict=True):
                self.returned.add(key, start, stop, late=message.late, passed=message.passed)
            if message.poisoned:
                self.poisoned[key] = list(zip(message.poisoned[::2], message.poisoned[1::2], strict=True))
            if message.failures:
                self.failures[key] = list(message.failures)


def _check_parts(session: ReaderSession, command: master.Mark) -> None:
    seen: set[int] = set()
    for part in command.partial:
        lease = session.leases.get(part.lease.id)
        if lease is None or lease.term != part.lease.term or lease.id in seen:
            raise SettingsError(
                f"mark {command.mark} of session {session.id} names lease {part.lease.id}, which the session does"
                " not have, or names it twice"
            )
        if part.units < 0 or not lease.marked <= lease.start + part.units <= lease.stop:
            raise SettingsError(
                f"mark {command.mark} of session {session.id}: {part.units} units of lease {lease.id}, of which"
                f" {lease.marked - lease.start} to {lease.stop - lease.start} can have been consumed"
            )
        seen.add(lease.id)
