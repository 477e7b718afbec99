"""All data sets of a job and their readers: a state that nothing but commands changes."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, TypeAlias

from edl.errors import ConflictError, SettingsError
from edl.master.shards import progress
from edl.master.shards.cursors import StreamCursor
from edl.master.shards.dataset import DatasetShards, FailureRecord, ReaderSession, ShardLease
from edl.master.shards.ended import BookEvent
from edl.master.shards.history import ReaderHistory
from edl.master.shards.ranges import UnitRange
from edl.master.shards.resuming import mark_session, resume_session
from edl.master.shards.specification import (
    MOST_UNITS,
    MOST_WANTED,
    check_name,
    check_spec,
    describe_difference,
    is_same_spec,
)
from edl.master.shards.tables import BookTables
from edl.protocol import master
from edl.quoting import shown

__all__ = ["Reply", "ShardBook"]

Reply: TypeAlias = (
    master.NextReply
    | master.DatasetReply
    | master.MarkReply
    | master.ResumeReply
    | master.RetryPoisonedReply
    | master.CloseSessionReply
    | None
)
"""What `ShardBook.apply` answers; None to commands of the master itself."""

_MOST_EVENTS: Final = 1000
"""Events that wait for `pop_events`: a master that asks for none does not grow by them."""
_WAIT_S: Final = 0.5
"""After how long a reader that got nothing asks again: the last shard of another is waited for at most so much longer,
and a thousand readers that wait cost 2,000 turns a second."""


class ShardBook(BookTables):
    """The shards of a job's data sets.

    Deterministic: there is no clock in it, no chance and no input but commands, so that the same commands make the same
    book, to the byte of its snapshot. A command that raises has changed nothing. Not thread-safe.

    - Every shard is leased to one session at a time, and done once, unless a reader goes back to an earlier mark.
    - A report is taken from the session that has the lease, by its id and term, and otherwise refused with the reason.
    - An epoch's shards are given as soon as nothing of the epoch before is left to give, while others may still work on
      that: a straggler stops nobody, and neither does a reader that waits to make a mark. What comes back of an older
      epoch is given first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        """Counts commands that changed anything. Not part of a snapshot."""
        self._events: deque[BookEvent] = deque(maxlen=_MOST_EVENTS)
        self._commands: dict[str, Any] = {
            "begin_term": self._begin_term,
            "create_dataset": self._create_dataset,
            "extend_dataset": self._extend_dataset,
            "end_dataset": self._end_dataset,
            "flush_dataset": self._flush_dataset,
            "open_session": self._open_session,
            "turn": self.turn,
            "expire": self._expire,
            "mark": self._mark,
            "resume": self._resume,
            "close_session": self._close_session,
            "retry_poisoned": self._retry_poisoned,
            "restore_progress": self._restore_progress,
        }

    # --- Commands. ---

    def apply(self, command: master.Command) -> Reply:
        """Apply a command.

        Args:
            command: as it came, or as the journal has it.

        Returns:
            The answer, which must not be changed: it is given again where the command is repeated.

        Raises:
            SettingsError: it names an unknown data set or session, or is malformed.
            ConflictError: another has the name, number or mark.
            LeaseLostError: the session has ended.
            ProtocolError: it holds progress that is damaged.
        """
        kind = command.WhichOneof("kind")
        if kind is None:
            raise SettingsError("a command that holds nothing, or is of a newer version of EDL")
        applier = self._commands[kind]
        reply: Reply = applier(getattr(command, kind), command.time_ms)
        return reply

    def turn(self, turn: master.Turn, time_ms: int = 0) -> master.NextReply:
        """Apply a reader's reports, and give it what it wants. What it costs does not depend on the data set's size.

        Args:
            turn: of a session.
            time_ms: the master's clock in milliseconds since 1970, for people.

        Returns:
            The answer, which must not be changed.

        Raises:
            SettingsError: the session is unknown, or the turn malformed.
            ConflictError: its number is neither the last nor the next.
            LeaseLostError: the session has ended.
        """
        session = self._session(turn.session)
        if session.reply is not None and turn.request == session.last_request:
            return session.reply
        if turn.request != session.last_request + 1:
            raise ConflictError(
                f"turn {turn.request} of session {session.id}: the last was {session.last_request}, and a session has"
                " a single turn under way"
            )
        _check_turn(turn, session)
        dataset = session.dataset
        reply = master.NextReply(request=turn.request)
        for lease_id, term in zip(turn.done, turn.done_terms, strict=True):
            lease = self._pop_lease(session, lease_id, term, reply)
            if lease is not None:
                dataset.finish(lease, lease.stop)
                if dataset.failures and (lease.epoch, lease.shard) not in dataset.poisoned:
                    dataset.failures.pop((lease.epoch, lease.shard), None)
        for part in turn.returned:
            lease = self._pop_lease(session, part.lease.id, part.lease.term, reply)
            if lease is not None:
                dataset.finish(lease, lease.start + part.units)
                dataset.give_back(lease)
        for failure in turn.failed:
            lease = self._pop_lease(session, failure.lease.id, failure.lease.term, reply)
            if lease is not None:
                dataset.finish(lease, lease.start + failure.units)
                self._fail(lease, FailureRecord(session.holder, failure.reason, time_ms), late=True)
        if turn.want > 0:
            self._grant(session, dataset.take(turn.want, session), reply)
        if len(reply.leases) < turn.want:
            reply.finished = dataset.is_finished
            reply.wait_s = 0.0 if reply.finished else _WAIT_S
        reply.poisoned = len(dataset.poisoned)
        reply.epoch = dataset.cursor.epoch
        session.last_request = turn.request
        session.reply = reply
        self.version += 1
        return reply

    def _begin_term(self, command: master.BeginTerm, time_ms: int) -> None:
        if command.term <= self.term:
            raise ConflictError(f"term {command.term}: {self.term} has begun")
        self.term = command.term
        self.version += 1

    def _create_dataset(self, command: master.CreateDataset, time_ms: int) -> master.DatasetReply:
        spec = check_spec(command.dataset, command.spec)
        present = self.sets.get(command.dataset)
        if present is None:
            present = self.sets[command.dataset] = DatasetShards.create(command.dataset, spec)
            self.version += 1
        elif not is_same_spec(present.spec, spec):
            raise ConflictError(
                f"data set {command.dataset} is there with another specification:"
                f" {describe_difference(present.spec, spec)}"
            )
        return present.describe()

    def _extend_dataset(self, command: master.ExtendDataset, time_ms: int) -> master.DatasetReply:
        dataset, cursor = self._stream(command.dataset)
        repeated = command.units == cursor.units and dataset.index[-1:] == [command.index]
        if command.HasField("known") and command.index and command.known != cursor.units and not repeated:
            raise ConflictError(
                f"data set {dataset.name} has {cursor.units} units, and a follower that knew of {command.known} adds to"
                " them: another one follows it as well. End one of the two"
            )
        if command.units > cursor.units:
            if cursor.ended:
                raise ConflictError(f"data set {dataset.name} has ended with {cursor.units} units")
            if command.units > MOST_UNITS:
                raise SettingsError(f"data set {dataset.name}: {command.units} units are too many")
            cursor.units = command.units
            if command.index:
                dataset.index.append(command.index)
            self.version += 1
        return dataset.describe(index=False)

    def _end_dataset(self, command: master.EndDataset, time_ms: int) -> master.DatasetReply:
        dataset, cursor = self._stream(command.dataset)
        if not cursor.ended:
            cursor.ended = True
            self._add_event("ended", dataset, f"the source has ended with {cursor.units} units", "its end was reported")
            self.version += 1
        return dataset.describe(index=False)

    def _flush_dataset(self, command: master.FlushDataset, time_ms: int) -> master.DatasetReply:
        dataset, cursor = self._stream(command.dataset)
        if cursor.flushed < cursor.units:
            cursor.flushed = cursor.units
            self.version += 1
        return dataset.describe(index=False)

    def _open_session(self, command: master.OpenSession, time_ms: int) -> master.NextReply:
        check_name("session", command.session)
        check_name("holder", command.holder)
        dataset = self._dataset(command.dataset)
        session = self.readers.get(command.session)
        if session is None:
            self.ended.check_session(command.session)
            session = ReaderSession(command.session, command.holder, dataset)
            self.readers[session.id] = dataset.sessions[session.id] = session
            if dataset.by_checkpoint:
                dataset.histories[session.id] = ReaderHistory.begin(session.id, session.holder)
            self.version += 1
        elif session.dataset is not dataset or session.holder != command.holder:
            raise ConflictError(
                f"session {session.id} is {shown(session.holder)}'s, for data set {session.dataset.name}: a session has"
                " a random name"
            )
        leases = [lease.message() for lease in session.leases.values()]
        return master.NextReply(leases=leases, last_request=session.last_request, epoch=dataset.cursor.epoch)

    def _expire(self, command: master.Expire, time_ms: int) -> None:
        for lease_id in command.leases:
            lease = self.leases.get(lease_id)
            if lease is None:
                continue
            reason = f"lease of {lease.session.holder} expired"
            if lease.session.dataset.by_checkpoint:
                # Its reader's state may hold units of it, which are another's now: the whole reader goes back.
                self._end_session(lease.session, reason, expired=True, time_ms=time_ms)
            else:
                self._expire_lease(lease, reason, time_ms)
            self.version += 1
        for session_id in command.sessions:
            session = self.readers.get(session_id)
            if session is not None:
                self._end_session(session, f"lease of {session.holder} expired", expired=True, time_ms=time_ms)
                self.version += 1

    def _mark(self, command: master.Mark, time_ms: int) -> master.MarkReply:
        session = self._session(command.session)
        if mark_session(session, command):
            self.version += 1
        return master.MarkReply(mark=command.mark)

    def _resume(self, command: master.Resume, time_ms: int) -> master.ResumeReply:
        session = self._session(command.session)
        dataset = self._dataset(command.dataset)
        if session.resume is not None and session.resume[0] == command:
            return session.resume[1]
        plan = resume_session(session, dataset, command)
        if plan is None:
            return master.ResumeReply()
        if plan.fenced is not None:
            # Who ends on purpose closes its session. One that crashes with the same shard again and again comes back
            # before its session expires, and would never have it given up if this were no failure.
            reason = f"{plan.fenced.holder} was lost; {session.holder} resumed it in session {session.id}"
            self._end_session(plan.fenced, reason, expired=True, time_ms=time_ms)
        dataset.undo(plan.undone)
        dataset.histories.pop(plan.history.session, None)
        plan.history.session = session.id
        plan.history.holder = session.holder
        plan.history.pending = []
        while len(plan.history.marks) > plan.index + 1:
            plan.history.marks.pop()
        dataset.histories[session.id] = plan.history
        parts = [
            UnitRange(part.epoch, part.shard, *bounds)
            for part in plan.open
            for bounds in dataset.returned.cut(part[:2], part.start, part.stop)
        ]
        granted = master.NextReply()
        self._grant(session, parts, granted)
        reply = master.ResumeReply(leases=granted.leases)
        session.resume = (command, reply)
        text = f"{session.holder} goes on at mark {command.mark}, with {len(parts)} open shards"
        self._add_event("resumed", dataset, text, f"{session.holder} was started with a state that was saved")
        self.version += 1
        return reply

    def _close_session(self, command: master.CloseSession, time_ms: int) -> master.CloseSessionReply:
        session = self.readers.get(command.session)
        if session is not None:
            reason = f"{session.holder} closed it"
            self._end_session(session, reason, keep=command.commit, time_ms=time_ms)
            self.version += 1
        return master.CloseSessionReply()

    def _retry_poisoned(self, command: master.RetryPoisoned, time_ms: int) -> master.RetryPoisonedReply:
        dataset = self._dataset(command.dataset)
        count = dataset.retry(frozenset(command.shards))
        if count:
            self._add_event("retried", dataset, f"{count} poisoned shards are to do again", "that was asked for")
            self.version += 1
        return master.RetryPoisonedReply(shards=count)

    def _restore_progress(self, command: master.RestoreProgress, time_ms: int) -> master.DatasetReply:
        dataset = self._dataset(command.dataset)
        restored = progress.decode_progress(dataset, command.progress)
        for session in list(dataset.sessions.values()):
            self._end_session(session, "the data set's progress was replaced", time_ms=time_ms)
        self.sets[dataset.name] = restored
        text = "its progress was replaced; all readers begin anew"
        self._add_event("restored", restored, text, "progress that was saved before was sent")
        self.version += 1
        return restored.describe()

    # --- What has happened, and what was. ---

    def pop_events(self) -> list[BookEvent]:
        """Return what has happened since the last call, the last thousand at most."""
        events = list(self._events)
        self._events.clear()
        return events

    @staticmethod
    def restore(data: bytes) -> ShardBook:
        """Return the book of a snapshot.

        Raises:
            ProtocolError: the bytes are no snapshot, or damaged, or of a newer version.
        """
        book = ShardBook()
        book.fill(data)
        return book

    # --- Parts of commands. ---

    def _stream(self, name: str) -> tuple[DatasetShards, StreamCursor]:
        dataset = self._dataset(name)
        if not isinstance(dataset.cursor, StreamCursor):
            raise SettingsError(f"data set {name} has {dataset.cursor.units} units: only a source without an end grows")
        return dataset, dataset.cursor

    def _session(self, session: str) -> ReaderSession:
        found = self.readers.get(session)
        if found is None:
            self.ended.check_session(session)
            raise SettingsError(f"session {shown(session, 100)!r} is not known: open it first")
        return found

    def _pop_lease(
        self, session: ReaderSession, lease_id: int, term: int, reply: master.NextReply
    ) -> ShardLease | None:
        """Take a lease from its session, if it is the session's; otherwise refuse the report."""
        lease = session.leases.get(lease_id)
        if lease is None or lease.term != term:
            reason = self._why_refused(lease_id, term, session)
            reply.refused.add(lease=master.LeaseId(id=lease_id, term=term), reason=reason)
            return None
        self._drop(lease)
        return lease

    def _drop(self, lease: ShardLease) -> None:
        del lease.session.leases[lease.id]
        del self.leases[lease.id]
        lease.session.dataset.leased -= 1

    def _why_refused(self, lease_id: int, term: int, session: ReaderSession) -> str:
        lease = self.leases.get(lease_id)
        if lease is not None and lease.session is not session:
            return f"it is another session's, of {lease.session.holder}"
        if lease is not None:
            return f"it was given in term {lease.term}, not in {term}"
        return self.ended.why(lease_id, self.last_lease, self.sets)

    def _grant(self, session: ReaderSession, parts: list[UnitRange], reply: master.NextReply) -> None:
        term, lease_id = self.term, self.last_lease
        add, leases, own = reply.leases.add, self.leases, session.leases
        for epoch, shard, start, stop in parts:
            lease_id += 1
            leases[lease_id] = own[lease_id] = ShardLease(lease_id, term, session, epoch, shard, start, stop, start)
            add(id=lease_id, term=term, epoch=epoch, shard=shard, start=start, stop=stop)
        session.dataset.leased += len(parts)
        self.last_lease = lease_id

    def _fail(self, lease: ShardLease, failure: FailureRecord, *, late: bool) -> None:
        dataset = lease.session.dataset
        if dataset.fail(lease, failure, late=late):
            failures = dataset.failures[lease.epoch, lease.shard]
            last = failures[-1]
            text = f"shard {lease.shard} of epoch {lease.epoch} is given up after {len(failures)} failures"
            self._add_event("poisoned", dataset, text, f"the last of {last.holder}: {last.reason}")

    def _expire_lease(self, lease: ShardLease, reason: str, time_ms: int) -> None:
        self._drop(lease)
        dataset = lease.session.dataset
        self.ended.add_lease(lease, reason)
        if dataset.spec.ignore_expiries:
            dataset.give_back(lease)
        else:
            self._fail(lease, FailureRecord(lease.session.holder, reason, time_ms), late=False)

    def _end_session(
        self, session: ReaderSession, reason: str, *, expired: bool = False, keep: bool = False, time_ms: int
    ) -> None:
        """End a session: its leases go back, and without `keep` what no mark covers."""
        dataset = session.dataset
        for lease in list(session.leases.values()):
            if expired:
                self._expire_lease(lease, reason, time_ms)
            else:
                self._drop(lease)
                self.ended.add_lease(lease, reason)
                dataset.give_back(lease)
        words = f"session {session.id} has ended: {reason}"
        history = dataset.histories.get(session.id)
        if history is not None:
            if not keep:
                dataset.undo(history.pending)
                history.pending = []
            dataset.histories[session.id] = dataset.histories.pop(session.id)  # the newest of those that ended
            last = history.marks[-1].number
            words += f". What it reported after its last mark, {last}, went back: resume at a mark that was saved"
        del self.readers[session.id]
        del dataset.sessions[session.id]
        dataset.trim_histories()
        self.ended.add_session(session.id, words)
        self._add_event("session_ended", dataset, f"the session of {session.holder} has ended", reason)

    def _add_event(self, kind: str, dataset: DatasetShards, text: str, cause: str) -> None:
        self._events.append(BookEvent(kind, dataset.name, text, cause))


def _check_turn(turn: master.Turn, session: ReaderSession) -> None:
    """Raise SettingsError for a turn that no reader sends."""
    reports = len(turn.done) + len(turn.failed) + len(turn.returned)
    if not 0 <= turn.want <= MOST_WANTED or reports > MOST_WANTED:
        raise SettingsError(f"a turn wants {turn.want} shards and reports {reports}: 0 to {MOST_WANTED:,} are possible")
    if len(turn.done) != len(turn.done_terms):
        raise SettingsError(f"a turn reports {len(turn.done)} leases with {len(turn.done_terms)} terms")
    reported = [(part.lease.id, part.units) for part in turn.returned]
    reported += [(failure.lease.id, failure.units) for failure in turn.failed]
    for lease_id, units in reported:
        lease = session.leases.get(lease_id)
        if units < 0 or (lease is not None and lease.start + units > lease.stop):
            raise SettingsError(f"a turn reports {units} units of lease {lease_id}, which cannot be")
