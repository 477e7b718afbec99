"""A reader's conversation with its master: a thread takes turns, renews leases, and goes on after the master was away.

The caller's threads put reports and requests into an outbox and take shards from an inbox; the conversation's thread
does everything else, so that a training loop never waits for the network. With each turn it sends the reports that
wait, asks for as many shards as there is room for, and renews all leases of its session. Turns are numbered within a
session: if an answer is lost, the same turn is sent again, to this master or the next, and is applied once. A session
that the master no longer knows is replaced by a new one; shards of the old one are another reader's by then.

No lock is held here, so a signal handler may close the reader in the middle of any call. State that both sides change
is changed in single steps that are atomic in Python.

Not here: reading data, and counting what was consumed (`shard_reader`).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from edl.background import BackgroundLoop
from edl.errors import (
    ClosedError,
    ConflictError,
    EDLError,
    LeaseLostError,
    NoMasterError,
    PermanentError,
    SettingsError,
)
from edl.master.client.master_client import MasterClient, MasterConnection, MasterWait, NotCreatedError, NotFoundError
from edl.master.client.session import MarkRequest, Outbox, Report, ResumeRequest, Shard, ShardSession, first_of
from edl.notifier import Notifier
from edl.protocol import master as messages

__all__ = ["Conversation"]

logger = logging.getLogger(__name__)

_IDLE_S: Final = 3600.0
"""How long the thread waits if nothing is due: it is woken when something is."""
_CLOSE_S: Final = 3.0
"""How long `close` waits for the last reports to reach the master; a session that is not closed expires by itself."""
_DONE_S: Final = 5.0
"""After so long without a master, a job whose last report says "done" is done; before, another master may start."""
_RESUME_RETRY_S: Final = 1.0
"""Between two attempts to resume at a mark that another reader holds: it may be dead, and its session expires."""
_ASK_S: Final = 0.01
"""Shortest time between two requests for shards when there are none, so that the master is not flooded."""


class Conversation:
    """Does what a reader asks for, in the order in which it was asked.

    It keeps `prefetch` shards of `dataset` at hand. A shard with which the caller does nothing for `stuck_s` seconds
    goes to other readers.
    """

    def __init__(self, client: MasterClient, dataset: str, holder: str, prefetch: int, stuck_s: float) -> None:
        self.dataset: Final = dataset
        self.commit = False
        """With commit="checkpoint": whether `close` counts what was reported since the last mark as done."""
        self.finished = False
        self.poisoned = 0
        self.refused = 0
        self._client = client
        self._holder = holder
        self._prefetch = prefetch
        self._stuck_s = stuck_s
        self._wait = MasterWait(client.job, client.timeout_s)
        self._outbox: Outbox = collections.deque()
        self._inbox: collections.deque[tuple[ShardSession, Shard]] = collections.deque()
        self._revoked: ShardSession | None = None  # nothing that the master gave in this session is handed out
        self._hungry: collections.deque[None] = collections.deque()  # an entry for each caller that waits in `take`
        self._changed = Notifier()
        self._failure: EDLError | None = None
        self._reading = False
        self._paused = False  # no shards are kept at hand before the caller asks for one
        self._asking = False  # a turn is under way, or about to be
        self._none_left = False  # the master had no shard when it was asked last
        self._ending = False
        self._connection: MasterConnection | None = None
        self._session: ShardSession | None = None
        self._spec: messages.DatasetSpec | None = None
        self._mark = 0
        self._unmarked = 0  # shards done since the last mark
        self._ask_at = 0.0
        self._heard_at = 0.0
        self._look_at = 0.0
        self._thread = BackgroundLoop("edl-shards", self._work, self._interrupt)
        client.add_reader(self)

    @property
    def spec(self) -> messages.DatasetSpec:
        """The data set's specification; known once a shard was given."""
        assert self._spec is not None
        return self._spec

    @property
    def by_checkpoint(self) -> bool:
        """Whether shards are done with a mark; False also as long as no master has said so."""
        return self._spec is not None and self._spec.commit == messages.COMMIT_CHECKPOINT

    # --- For callers. ---

    @property
    def away_s(self) -> float:
        """Seconds for which no master has answered; 0.0 while it does."""
        since = self._wait.away_since
        return 0.0 if since is None else time.monotonic() - since

    def take(self, timeout_s: float) -> Shard | None:
        """See `ShardReader.take`."""
        self._paused = False
        if not self.finished:
            self._reading = True
        shard = self._pop()
        if shard is not None or (timeout_s <= 0 and self._failure is None):
            self._thread.wake()
            return shard
        self._hungry.append(None)
        self._thread.wake()
        try:
            self._await(lambda: self._has_shard() or self.finished or self._ending, timeout_s)
            return self._pop()
        finally:
            self._hungry.pop()

    def rest(self, timeout_s: float) -> bool:
        """Ask for no shard until `take` is called; return whether this reader has none because the master had none.

        So two readers that ask the master who else has shards do not find each other, and both leave. Waits up to
        `timeout_s` for an answer that is under way.
        """
        self._paused = True
        self._changed.wait_for(lambda: not self._asking or self._failure is not None or self._ending, timeout_s)
        session = self._session
        if self._asking or self._inbox or self._outbox or session is None:
            return False
        return self._none_left and not session.open and session.in_flight is None

    def touch(self, shard: Shard) -> None:
        """Note that the caller works on a shard."""
        session = self._session
        lease = None if session is None else session.open.get(shard.id)
        if lease is not None:
            lease.touched_at = time.monotonic()
            lease.taken = True

    def tell(self, report: Report) -> None:
        """Have a report sent. Waits for nothing."""
        self._note_reported(report.shard)
        self._outbox.append(report)
        self._thread.wake()

    def deliver(self, reports: Sequence[Report]) -> None:
        """Have reports sent, and wait until all are answered; each says whether it was refused.

        After an error, such as a master that is away for too long, they are sent all the same.
        """
        for report in reports:
            self.tell(report)
        self._await(lambda: all(report.answered for report in reports), _IDLE_S)

    def demand(self, request: MarkRequest | ResumeRequest) -> None:
        """Have something done at the master, and wait for it. After an error it is not done later."""
        if isinstance(request, ResumeRequest) and isinstance(self._failure, LeaseLostError):
            self._failure = None
        self._outbox.append(request)
        self._thread.wake()
        try:
            self._await(lambda: request.answered, _IDLE_S)
        finally:
            self._withdraw(request)  # if the caller gave up, it must not be done behind its back later
        if request.failure is not None:
            raise request.failure

    def begin_anew(self) -> None:
        """Hand out nothing that the master gave before the data set was put back."""
        self._revoked = self._session
        self.finished = False
        self._thread.wake()

    def close(self) -> None:
        """Send what waits, give shards back, and end. Waits for seconds at most."""
        self._ending = True
        self._changed.notify()
        self._thread.wake()
        self._thread.wait_ended(_CLOSE_S)
        self._thread.close()
        self._interrupt()

    def _pop(self) -> Shard | None:
        with contextlib.suppress(IndexError):
            while True:
                session, shard = self._inbox.popleft()
                if session is not self._revoked:
                    self.touch(shard)
                    return shard
        return None

    def _has_shard(self) -> bool:
        with contextlib.suppress(IndexError):
            return self._inbox[0][0] is not self._revoked
        return False

    def _await(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait, as long as the master is not away for more than the client's `timeout_s` of the wait."""
        begun = time.monotonic()
        until = begun + timeout_s

        def settled() -> bool:
            return bool(condition()) or self._failure is not None or self._ending

        while not settled():
            away = self._wait.away_since
            now = time.monotonic()
            patience_s = self._client.timeout_s - (now - max(begun, away) if away is not None else 0.0)
            if patience_s <= 0:
                raise self._wait.error()
            if now >= until:
                return
            self._changed.wait_for(settled, min(until - now, patience_s))
        if self._failure is not None and not condition():
            raise type(self._failure)(str(self._failure)) from self._failure
        if self._ending and not condition():
            raise ClosedError("ShardReader was closed meanwhile")

    def _withdraw(self, request: MarkRequest | ResumeRequest) -> None:
        with contextlib.suppress(ValueError):
            self._outbox.remove(request)

    def _note_reported(self, shard: Shard) -> None:
        session = self._session
        if session is not None and (lease := session.open.get(shard.id)) is not None:
            lease.reported = True

    # --- In the thread. ---

    def _interrupt(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.close()

    def _work(self) -> float | None:
        if self._ending:
            self._say_goodbye()
            return None
        try:
            wait_s = self._exchange()
        except NoMasterError as exc:
            self._drop_connection()
            wait_s = self._wait.failed(exc)
            if self._job_is_done():
                return _IDLE_S
        except LeaseLostError as exc:
            self._lose_session(str(exc))
            wait_s = 0.0
        except ClosedError as exc:
            if not self._ending:
                self._fail(exc)
            wait_s = 0.0
        except EDLError as exc:
            self._fail(exc)
            wait_s = _IDLE_S
        self._changed.notify()
        return wait_s

    def _exchange(self) -> float:
        """Do what is due; return the seconds until something is due again."""
        while not self._ending:
            if self._session is not None and self._session is self._revoked:
                self._lose_session("the data set was put back to earlier progress")
            first = first_of(self._outbox)
            if not (self._reading or first or self._session):
                return _IDLE_S
            if isinstance(first, ResumeRequest):
                wait_s = self._resume(first)
                if wait_s:
                    return wait_s
                continue
            session = self._attached()
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + self._renew_s
                self._release_idle(session, now)
            if self._ask(session, now):
                self._changed.notify()
            elif isinstance(first := first_of(self._outbox), MarkRequest):
                self._set_mark(session, first)
            elif first is not None:
                continue
            elif self.finished and not self.by_checkpoint:
                self._close_session(session)  # also after an attempt that failed: the master does not end before
            elif now >= (renew_at := self._heard_at + self._renew_s):
                self._send(messages.Turn(session=session.name))
            else:
                due_at = min(renew_at, self._ask_at) if self._room else renew_at
                return max(0.001, due_at - now)
        return 0.0

    def _owes(self, session: ShardSession) -> bool:
        """Whether there is a report to send, or a turn that was not answered."""
        return session.in_flight is not None or isinstance(first_of(self._outbox), Report)

    def _release_idle(self, session: ShardSession, now: float) -> None:
        """Let others have the shards with which the caller does nothing: this thread would renew them for ever."""
        leases = [lease for lease in session.open.values() if not lease.reported]
        idle = [lease for lease in leases if now > lease.touched_at + self._stuck_s]
        if any(not lease.taken for lease in idle):
            self._paused = True
            while (shard := self._pop()) is not None:
                self._note_reported(shard)
                self._outbox.appendleft(Report(shard, "returned"))
        for lease in idle:
            if not lease.taken or lease.reported:
                continue
            lease.reported = True
            shard = lease.shard
            why = f"{self._holder} has done nothing with it for {self._stuck_s:g} s (stuck_s)"
            if self.by_checkpoint:  # the caller's state may hold samples of it
                raise LeaseLostError(f"shard {shard.shard}: {why}")
            logger.warning("shard %d of %s was not reported, and goes to others: %s", shard.shard, self.dataset, why)
            self._outbox.appendleft(Report(shard, "returned" if self.spec.ignore_expiries else "failed", why))

    @property
    def _renew_s(self) -> float:
        """How often a session is renewed: four times in its length, so that three renewals may fail."""
        return max(0.05, min(self.spec.lease_s, self.spec.session_s) / 4)

    @property
    def _room(self) -> int:
        """How many more shards the reader can use: none until half of those at hand are gone."""
        if not self._reading or self.finished or (self._paused and not self._hungry):
            return 0
        has, room = len(self._inbox), max(self._prefetch, len(self._hungry))
        return max(0, room - has) if has <= self._prefetch // 2 else 0

    def _ask(self, session: ShardSession, now: float) -> bool:
        """Take a turn if there is something to report or to ask for; return whether there was."""
        self._asking = True  # before looking whether the caller rests
        try:
            want = self._room if now >= self._ask_at else 0
            if not (self._owes(session) or want):
                return False
            self._turn(session, want)
            return True
        finally:
            self._asking = False

    def _turn(self, session: ShardSession, want: int) -> None:
        turn = session.next_turn(want, self._outbox)
        reply = self._send(turn)
        for report in session.answer(reply):
            self._note_answer(report)
        if turn.want:
            self._none_left = not reply.leases
        self._inbox.extend((session, shard) for shard in session.add(reply.leases, time.monotonic()))
        self.poisoned = reply.poisoned
        if reply.finished and not session.open and session is not self._revoked:
            self.finished = True
            self._reading = False

    def _send(self, turn: messages.Turn) -> messages.NextReply:
        reply = self._said(messages.NextRequest(turn=turn))
        if turn.want and not reply.leases:
            self._ask_at = self._heard_at + max(reply.wait_s, _ASK_S)
        return reply

    def _said(self, request: messages.NextRequest) -> messages.NextReply:
        assert self._connection is not None
        reply = self._connection.exchange(request)
        self._heard_at = time.monotonic()
        self._wait.answered()
        return reply

    def _attached(self) -> ShardSession:
        """Return the session, open at the master that leads now."""
        if self._connection is None:
            self._connection = self._client.connect()
            self._connection.on_stream_end = self._thread.wake  # a session that the master ended is noticed at once
        connection = self._connection
        if self._spec is None:
            self._spec = self._described(connection)
        if connection.has_stream and self._session is not None:
            return self._session
        if self._session is None:
            self._session = ShardSession(secrets.token_hex(16))  # kept until it is answered: the master may have heard
        session = self._session
        connection.end_stream()
        request = messages.OpenSession(dataset=self.dataset, session=session.name, holder=self._holder)
        try:
            reply = self._said(messages.NextRequest(open=request))
        except SettingsError:
            self._described(connection)  # the master that leads now may not have the data set
            raise
        if not session.is_same(reply):
            raise LeaseLostError("the master no longer knows this reader's session")
        return session

    def _described(self, connection: MasterConnection) -> messages.DatasetSpec:
        request = messages.DescribeDatasetRequest(dataset=self.dataset)
        try:
            return connection.call("DescribeDataset", request, messages.DatasetReply).spec
        except NotFoundError as exc:
            if self._spec is None:
                raise NotCreatedError(str(exc)) from exc
            raise PermanentError(
                f"the master of job {self._client.job!r} has lost data set {self.dataset!r}, which it had before: the"
                " store lost the job's progress (was it started with an empty file, or the job begun anew?). Run again"
                " under another --job, or another name of the job; `edl label` keeps the labels that are in its folder"
            ) from exc

    def _set_mark(self, session: ShardSession, request: MarkRequest) -> None:
        assert self._connection is not None
        if self.by_checkpoint:
            mark = messages.Mark(session=session.name, mark=self._mark + 1)
            for number, units in request.consumed.items():
                if (lease := session.open.get(number)) is not None:
                    lease_id = messages.LeaseId(id=number, term=lease.shard.term)
                    mark.partial.append(messages.Partial(lease=lease_id, units=units))
            self._connection.call("Mark", mark, messages.MarkReply)
            self._mark += 1
            self._unmarked = 0
            request.session = session.name
            request.number = self._mark
        else:
            request.failure = SettingsError(
                f"shards of {self.dataset} are done when they are reported, and cannot be gone back to: create the "
                'data set with commit="checkpoint" where readers are part of a checkpoint'
            )
        self._settle(request)

    def _resume(self, request: ResumeRequest) -> float:
        """Resume at a mark in a new session; return the seconds until the next attempt, 0 if there is none."""
        if self._session is not None and self._session is not request.opened:
            with contextlib.suppress(LeaseLostError):  # then there is nothing left to report
                self._flush(self._attached())
            if self._session is not None:
                self._close_session(self._session)  # only a session that was never read from can resume
        self._inbox.clear()
        self._unmarked = 0
        self.finished = False
        self._none_left = False
        self._ask_at = 0.0
        session = request.opened = self._attached()
        assert self._connection is not None
        resume = messages.Resume(
            dataset=self.dataset,
            session=session.name,
            of_holder=request.holder,
            of_session=request.session,
            mark=request.mark,
        )
        try:
            reply = self._connection.call("Resume", resume, messages.ResumeReply)
        except ConflictError as exc:
            now = time.monotonic()
            if request.retry_until is None:
                request.retry_until = now + 1.5 * self.spec.session_s + _RESUME_RETRY_S
                logger.warning("another reader may hold the position, until its session ends: %s", exc)
            if now < request.retry_until:
                return min(_RESUME_RETRY_S, self._renew_s)
            request.failure = exc
        except (SettingsError, LeaseLostError) as exc:
            request.failure = exc
        else:
            self._mark = request.mark
            self._inbox.extend((session, shard) for shard in session.add(reply.leases, time.monotonic()))
        self._settle(request)
        return 0.0

    def _settle(self, request: MarkRequest | ResumeRequest) -> None:
        self._withdraw(request)
        request.answered = True
        self._changed.notify()

    # --- Ends and losses. ---

    def _note_answer(self, report: Report) -> None:
        if report.refused is None:
            self._unmarked += report.outcome == "done"
            return
        self.refused += 1
        logger.warning(
            "shard %d of %s no longer belongs to this reader, and its report was refused: %s",
            *(report.shard.shard, self.dataset, report.refused),
        )

    def _flush(self, session: ShardSession) -> None:
        while self._owes(session):
            self._turn(session, 0)

    def _close_session(self, session: ShardSession, commit: bool = False) -> None:
        assert self._connection is not None
        request = messages.CloseSession(session=session.name, commit=commit)
        self._connection.call("CloseSession", request, messages.CloseSessionReply, timeout_s=_CLOSE_S)
        session.abandon("the session was closed")
        self._session = None

    def _say_goodbye(self) -> None:
        """Send the last reports and close the session, if the master is there."""
        try:
            if self._session is not None and self._wait.away_since is None:
                session = self._attached()
                self._flush(session)
                self._close_session(session, self.commit)
                if self._unmarked and self.by_checkpoint and not self.commit:
                    logger.warning(
                        "%d shards of %s were done after the last state_dict(), and go to others: save before close()",
                        *(self._unmarked, self.dataset),
                    )
        except EDLError as exc:
            logger.info("the session will expire, since the master could not be told of its end: %s", exc)
        self._drop_connection()

    def _lose_session(self, why: str) -> None:
        """Begin a new session; the shards of the old one are another reader's."""
        session, self._session = self._session, None
        self._none_left = False
        self._inbox.clear()
        if session is not None:
            for report in session.abandon(why):
                self._note_answer(report)
        if self._connection is not None:
            self._connection.end_stream()
        if self.by_checkpoint:
            self._fail(
                LeaseLostError(
                    f"{why}: what was read of {self.dataset} since the last checkpoint goes to other readers; load it"
                )
            )
        elif not self.finished:
            logger.warning("this reader's session of %s was lost, and it begins a new one: %s", self.dataset, why)

    def _job_is_done(self) -> bool:
        """End if the job's master ended with all data sets done, and no other was started for a while."""
        away_since = self._wait.away_since
        if away_since is None or time.monotonic() < away_since + _DONE_S:
            return False
        report = self._client.final_report()
        datasets = [] if report is None else report.get("datasets", [])
        found = next((dataset for dataset in datasets if dataset.get("name") == self.dataset), None)
        if found is None:
            return False
        logger.warning(
            "job %r is done, and its master has ended: %s has no shards left", self._client.job, self.dataset
        )
        if self._session is not None:
            self._session.abandon("the job is done")
            self._session = None
        self.poisoned = int(found["shards"]["poisoned"])
        self.finished = True
        self._reading = False
        while (request := first_of(self._outbox)) is not None:
            if isinstance(request, Report):
                self._outbox.popleft()
                request.refused = "the job is done"
                request.answered = True
            else:
                request.failure = NoMasterError("the job is done, and its master has ended")
                self._settle(request)
        self._changed.notify()
        return True

    def _fail(self, exc: EDLError) -> None:
        """Have callers get an error from now on."""
        self._failure = exc
        self._changed.notify()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end_stream()
            connection.close()
