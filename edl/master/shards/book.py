"""The state of all data sets of a job and of their readers, which only commands change.

A command is a message from a worker, or one that the master derives from its clocks. The book has no other input, so
the same commands give the same book, down to the bytes of its snapshot.

A new command needs a kind of `Command` in master.proto and a method of `ShardBook` named after the field.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from edl.errors import ConflictError, LeaseLostError, SettingsError
from edl.master.shards.dataset_shards import DatasetShards, ReaderSession, ShardLease, open_envelope, seal
from edl.master.shards.units import (
    MOST_UNITS,
    UnitCursor,
    UnitRange,
    check_name,
    check_spec,
    describe_difference,
    is_same_spec,
)
from edl.protocol import master
from edl.quoting import shown

_SNAPSHOT: Final = b"EDL book\0"
_MOST_WANTED: Final = 10_000
"""Maximum number of shards requested or reported per turn: the reply then has about 300 KB, and all other turns wait
for 20 ms."""
_MOST_EVENTS: Final = 1000  # a replay of commands, which removes none, must not accumulate them
_MOST_ENDED: Final = 1024  # ended sessions and leases remembered: late reports arrive within minutes
_MOST_EXPLAINED: Final = 20
"""Maximum number of refusals per turn that name the shard's current holder: with ten thousand leases, each search for
it takes 1 ms."""
_WAIT_S: Final = 0.5
"""Interval at which a reader that got no shard asks again: a thousand waiting readers send 2,000 turns a second."""


class ShardBook:
    """The shards of a job's data sets. A command that raises an error has changed nothing. Not thread-safe.

    - Every shard is leased to only one session at a time, and is done only once unless a reader goes back to an earlier
      mark.
    - A report identifies its lease by id and term. It is accepted from the session that holds the lease, and otherwise
      refused with a reason.
    - An epoch's shards are leased once the previous epoch has no shards left to lease, even if shards of the previous
      epoch are still in progress. So neither a straggler nor a reader that has yet to make a mark stops other readers.
      Returned ranges of older epochs are leased first.

    Attributes:
        term: Term of the present master; 0 before the first.
        version: Number of commands that changed anything. Not part of a snapshot.
        datasets: Data sets by name, in the order of their creation. Only commands change them.
        sessions: Live sessions by id. Only commands change them.
        events: The last thousand events, for people to read: each has its kind (`ended`, `poisoned`, `restored`,
            `resumed`, `retried` or `session_ended`), the data set, what happened, and why. The caller removes the
            events.
    """

    def __init__(self) -> None:
        self.term = 0
        self.version = 0
        self._time_ms = 0  # when the master received the current command, for people
        self._last_lease = 0
        self.datasets: dict[str, DatasetShards] = {}
        self.sessions: dict[str, ReaderSession] = {}
        self._leases: dict[int, ShardLease] = {}
        self._ended_sessions: dict[str, str] = {}  # id -> why; the oldest first
        self._ended_leases: dict[int, master.EndedLease] = {}  # ended without a report; the oldest first
        self.events: deque[tuple[str, str, str, str]] = deque(maxlen=_MOST_EVENTS)

    def snapshot(self) -> bytes:
        """Return the whole state; equal states give equal bytes."""
        message = master.BookState(
            term=self.term,
            last_lease=self._last_lease,
            datasets=[dataset.message() for dataset in self.datasets.values()],
            ended_sessions=[
                master.EndedSession(session=session, reason=reason) for session, reason in self._ended_sessions.items()
            ],
            ended_leases=self._ended_leases.values(),
        )
        return seal(_SNAPSHOT, message)

    @staticmethod
    def restore(data: bytes) -> ShardBook:
        """Return the book in a snapshot; ProtocolError if the bytes are not a snapshot, or are damaged or newer."""
        message = open_envelope(_SNAPSHOT, "snapshot of a book of shards", data, master.BookState)
        book = ShardBook()
        book.term = message.term
        book._last_lease = message.last_lease
        for state in message.datasets:
            dataset = book.datasets[state.dataset] = DatasetShards.of_message(state)
            for session in dataset.sessions.values():
                book.sessions[session.id] = session
                book._leases.update(session.leases)
        book._ended_sessions = {ended.session: ended.reason for ended in message.ended_sessions}
        book._ended_leases = {ended.id: ended for ended in message.ended_leases}
        return book

    # --- Commands. ---

    def apply(self, command: master.Command) -> Any:
        """Apply a command, new or from the journal; return the reply, which must not be changed.

        Commands from the master itself have no reply. A refused command raises a SettingsError (the command is
        malformed, or refers to an unknown data set or session), ConflictError (the name, number or mark is taken),
        LeaseLostError (the session has ended) or ProtocolError (the command contains damaged progress).
        """
        kind = command.WhichOneof("kind")
        if kind is None:
            raise SettingsError("the command is empty, or from another version of EDL")
        applier = self.turn if kind == "turn" else getattr(self, f"_{kind}")
        self._time_ms = command.time_ms
        return applier(getattr(command, kind))

    def turn(self, turn: master.Turn) -> master.NextReply:
        """Apply a reader's reports, and lease it shards. A repeated turn gets the same reply."""
        session = self._session(turn.session)
        if session.reply is not None and turn.request == session.last_request:
            return session.reply
        if turn.request != session.last_request + 1:
            raise ConflictError(
                f"turn {turn.request} of session {session.id}: the last was {session.last_request}, and a session has"
                " one turn at a time"
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
                self._fail(lease, failure.reason, late=True)
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

    def _begin_term(self, command: master.BeginTerm) -> None:
        if command.term <= self.term:
            raise ConflictError(f"term {command.term}: term {self.term} has already begun")
        self.term = command.term
        self.version += 1

    def _create_dataset(self, command: master.CreateDataset) -> master.DatasetReply:
        spec = check_spec(command.dataset, command.spec)
        present = self.datasets.get(command.dataset)
        if present is None:
            cursor = UnitCursor(spec, spec.units)
            present = self.datasets[command.dataset] = DatasetShards(command.dataset, spec, cursor)
            self.version += 1
        elif not is_same_spec(present.spec, spec):
            raise ConflictError(
                f"data set {command.dataset} exists with a different specification:"
                f" {describe_difference(present.spec, spec)}"
            )
        return present.describe()

    def _extend_dataset(self, command: master.ExtendDataset) -> master.DatasetReply:
        dataset, cursor = self._stream(command.dataset)
        repeated = command.units == cursor.units and dataset.index[-1:] == [command.index]
        if command.HasField("known") and command.index and command.known != cursor.units and not repeated:
            raise ConflictError(
                f"data set {dataset.name} has {cursor.units} units, and a follower that knew of {command.known} extends"
                " it: another follower extends it too. Stop one of the two"
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

    def _end_dataset(self, command: master.EndDataset) -> master.DatasetReply:
        dataset, cursor = self._stream(command.dataset)
        if not cursor.ended:
            cursor.ended = True
            self._add_event("ended", dataset, f"the source has ended with {cursor.units} units", "its end was reported")
            self.version += 1
        return dataset.describe(index=False)

    def _open_session(self, command: master.OpenSession) -> master.NextReply:
        check_name("session", command.session)
        check_name("holder", command.holder)
        dataset = self._dataset(command.dataset)
        session = self.sessions.get(command.session)
        if session is None:
            self._check_ended(command.session)
            session = self.sessions[command.session] = dataset.open_session(command.session, command.holder)
            self.version += 1
        elif session.dataset is not dataset or session.holder != command.holder:
            raise ConflictError(
                f"session {session.id} belongs to {shown(session.holder)}, for data set {session.dataset.name}: use"
                " a random session id"
            )
        leases = [lease.message() for lease in session.leases.values()]
        return master.NextReply(leases=leases, last_request=session.last_request, epoch=dataset.cursor.epoch)

    def _expire(self, command: master.Expire) -> None:
        for lease_id in command.leases:
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            reason = f"lease of {lease.session.holder} expired"
            if lease.session.dataset.by_checkpoint:
                # Its reader's state may include units of it, which now belong to another: the whole reader goes back.
                self._end_session(lease.session, reason, expired=True)
            else:
                self._end_lease(lease, reason, expired=True)
            self.version += 1
        for session_id in command.sessions:
            session = self.sessions.get(session_id)
            if session is not None:
                self._end_session(session, f"lease of {session.holder} expired", expired=True)
                self.version += 1

    def _mark(self, command: master.Mark) -> master.MarkReply:
        session = self._session(command.session)
        if session.dataset.mark(session, command):
            self.version += 1
        return master.MarkReply(mark=command.mark)

    def _resume(self, command: master.Resume) -> master.ResumeReply:
        session = self._session(command.session)
        dataset = self._dataset(command.dataset)
        if session.resume is not None and session.resume[0] == command:
            return session.resume[1]
        found = dataset.find_mark(session, command)
        if found is None:
            return master.ResumeReply()
        history, index = found
        if (live := dataset.sessions.get(history.session)) is not None:
            # A reader that ends on purpose closes its session. One that crashes with the same shard again and again
            # returns before its session expires: if that did not count as a failure, the shard would never be given up.
            reason = f"{live.holder} was lost; {session.holder} resumed it in session {session.id}"
            self._end_session(live, reason, expired=True)
        parts = dataset.resume(session, history, index)
        granted = master.NextReply()
        self._grant(session, parts, granted)
        reply = master.ResumeReply(leases=granted.leases)
        session.resume = (command, reply)
        text = f"{session.holder} resumes at mark {command.mark}, with {len(parts)} open shards"
        self._add_event("resumed", dataset, text, f"{session.holder} was started with a saved state")
        self.version += 1
        return reply

    def _close_session(self, command: master.CloseSession) -> master.CloseSessionReply:
        session = self.sessions.get(command.session)
        if session is not None:
            reason = f"{session.holder} closed it"
            self._end_session(session, reason, keep=command.commit)
            self.version += 1
        return master.CloseSessionReply()

    def _retry_poisoned(self, command: master.RetryPoisoned) -> master.RetryPoisonedReply:
        dataset = self._dataset(command.dataset)
        count = dataset.retry(frozenset(command.shards))
        if count:
            self._add_event("retried", dataset, f"{count} poisoned shards are requeued", "a user requested it")
            self.version += 1
        return master.RetryPoisonedReply(shards=count)

    def _restore_progress(self, command: master.RestoreProgress) -> master.DatasetReply:
        dataset = self._dataset(command.dataset)
        restored = dataset.at_progress(command.progress if command.HasField("progress") else None)
        for session in list(dataset.sessions.values()):
            self._end_session(session, "the data set's progress was replaced")
        self.datasets[dataset.name] = restored
        text = "its progress was replaced; all readers start again"
        self._add_event("restored", restored, text, "a user sent saved progress")
        self.version += 1
        return restored.describe()

    # --- Parts of commands. ---

    def _stream(self, name: str) -> tuple[DatasetShards, UnitCursor]:
        dataset = self._dataset(name)
        if not dataset.cursor.is_stream:
            raise SettingsError(
                f"data set {name} has {dataset.cursor.units} units and cannot grow: only an endless source can"
            )
        return dataset, dataset.cursor

    def _dataset(self, name: str) -> DatasetShards:
        found = self.datasets.get(name)
        if found is None:
            raise SettingsError(f"data set {shown(name, 100)!r} is not known: create it first")
        return found

    def _session(self, session: str) -> ReaderSession:
        found = self.sessions.get(session)
        if found is None:
            self._check_ended(session)
            raise SettingsError(f"session {shown(session, 100)!r} is not known: open it first")
        return found

    def _check_ended(self, session: str) -> None:
        if session in self._ended_sessions:
            raise LeaseLostError(self._ended_sessions[session])

    def _pop_lease(
        self, session: ReaderSession, lease_id: int, term: int, reply: master.NextReply
    ) -> ShardLease | None:
        """Remove a lease from its session; if the session does not hold the lease, refuse the report."""
        lease = session.leases.get(lease_id)
        if lease is None or lease.term != term:
            reason = self._why_refused(lease_id, search=len(reply.refused) < _MOST_EXPLAINED)
            reply.refused.add(lease=master.LeaseId(id=lease_id, term=term), reason=reason)
            return None
        self._drop(lease)
        return lease

    def _drop(self, lease: ShardLease) -> None:
        del lease.session.leases[lease.id]
        del self._leases[lease.id]
        lease.session.dataset.leased -= 1

    def _why_refused(self, lease_id: int, *, search: bool) -> str:
        lease = self._leases.get(lease_id)
        if lease is not None:
            return f"it belongs to {lease.session.holder}, in term {lease.term}"
        ended = self._ended_leases.get(lease_id)
        if ended is None:
            return "it was already reported, ended long ago, or was never granted"
        dataset, key = self.datasets[ended.dataset], (ended.epoch, ended.shard)
        if key in dataset.poisoned:
            return f"{ended.reason}; the shard is poisoned"
        if key in dataset.returned:
            return f"{ended.reason}; the shard waits for another holder"
        sessions = dataset.sessions.values() if search else ()
        leases = (lease for other in sessions for lease in other.leases.values() if (lease.epoch, lease.shard) == key)
        now = next(leases, None)
        return f"{ended.reason}; {now.session.holder} has the shard now" if now is not None else ended.reason

    def _grant(self, session: ReaderSession, parts: list[UnitRange], reply: master.NextReply) -> None:
        term, lease_id = self.term, self._last_lease
        add, leases, own = reply.leases.add, self._leases, session.leases
        for epoch, shard, start, stop in parts:
            lease_id += 1
            leases[lease_id] = own[lease_id] = ShardLease(lease_id, term, session, epoch, shard, start, stop, start)
            add(id=lease_id, term=term, epoch=epoch, shard=shard, start=start, stop=stop)
        session.dataset.leased += len(parts)
        self._last_lease = lease_id

    def _fail(self, lease: ShardLease, reason: str, *, late: bool) -> None:
        dataset = lease.session.dataset
        if dataset.fail(lease, reason, self._time_ms, late=late):
            failures = dataset.failures[lease.epoch, lease.shard]
            last = failures[-1]
            text = f"shard {lease.shard} of epoch {lease.epoch} is given up after {len(failures)} failures"
            self._add_event("poisoned", dataset, text, f"the last failure was at {last.holder}: {last.reason}")

    def _end_lease(self, lease: ShardLease, reason: str, *, expired: bool) -> None:
        self._drop(lease)
        dataset = lease.session.dataset
        ended = master.EndedLease(
            id=lease.id, dataset=dataset.name, epoch=lease.epoch, shard=lease.shard, reason=reason
        )
        _remember(self._ended_leases, lease.id, ended)
        if expired and not dataset.spec.ignore_expiries:
            self._fail(lease, reason, late=False)
        else:
            dataset.give_back(lease)

    def _end_session(self, session: ReaderSession, reason: str, *, expired: bool = False, keep: bool = False) -> None:
        """End a session and requeue its leases; without `keep`, also requeue units that no mark covers."""
        dataset = session.dataset
        for lease in list(session.leases.values()):
            self._end_lease(lease, reason, expired=expired)
        words = f"session {session.id} has ended: {reason}"
        del self.sessions[session.id]
        last = dataset.end_session(session, keep=keep)
        if last is not None:
            words += f". Units reported after its last mark, {last}, were requeued: resume at a saved mark"
        _remember(self._ended_sessions, session.id, words)
        self._add_event("session_ended", dataset, f"the session of {session.holder} has ended", reason)

    def _add_event(self, kind: str, dataset: DatasetShards, text: str, cause: str) -> None:
        self.events.append((kind, dataset.name, text, cause))


def _check_turn(turn: master.Turn, session: ReaderSession) -> None:
    reports = len(turn.done) + len(turn.failed) + len(turn.returned)
    if not 0 <= turn.want <= _MOST_WANTED or reports > _MOST_WANTED:
        raise SettingsError(f"a turn requests {turn.want} shards and reports {reports}: must be 0 to {_MOST_WANTED:,}")
    if len(turn.done) != len(turn.done_terms):
        raise SettingsError(f"a turn reports {len(turn.done)} leases with {len(turn.done_terms)} terms")
    reported = [(part.lease.id, part.units) for part in turn.returned]
    reported += [(failure.lease.id, failure.units) for failure in turn.failed]
    for lease_id, units in reported:
        lease = session.leases.get(lease_id)
        if units < 0 or (lease is not None and lease.start + units > lease.stop):
            raise SettingsError(f"a turn reports {units} units of lease {lease_id}, which is impossible")


def _remember(records: dict[Any, Any], key: object, value: object) -> None:
    records.pop(key, None)
    records[key] = value
    if len(records) > _MOST_ENDED:
        del records[next(iter(records))]
