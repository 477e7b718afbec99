"""The thread of a reader: takes turns with the master, renews leases, and goes on where the master was away."""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from edl.background import BackgroundLoop
from edl.errors import ClosedError, ConflictError, EDLError, LeaseLostError, NoMasterError, SettingsError
from edl.master.client.connection import MasterConnection, NotFoundError
from edl.master.client.lease_activity import LeaseActivity
from edl.master.client.master_client import MasterClient
from edl.master.client.master_wait import MasterWait
from edl.master.client.session_requests import MarkRequest, ResumeRequest
from edl.master.client.shard_session import Report, Shard, ShardSession
from edl.master.client.turn_stream import TurnStream
from edl.notifier import Notifier
from edl.protocol import master as messages

__all__ = ["SessionThread"]

logger = logging.getLogger(__name__)

_IDLE_S: Final = 3600.0
"""How long the thread waits where nothing is due: it is woken when something is."""
_CLOSE_S: Final = 3.0
"""What `close` waits for the last reports to reach the master; a session that is not closed expires by itself."""
_DONE_S: Final = 5.0
"""After so long without a master a job that was done is done; before, another may be started to go on with it."""
_RESUME_RETRY_S: Final = 1.0
"""Between two attempts to go on from a mark that a reader holds which may be dead: its session expires."""


class SessionThread:
    """Does what a reader asks for, in the order in which it was asked for.

    Holds no lock, so that a signal handler may close the reader in the middle of any of its calls.

    Args:
        client: of the job.
        dataset: its name.
        holder: the reader's name.
        prefetch: shards to keep at hand.
        stuck_s: a shard with which the caller does nothing for so long goes to others.
    """

    def __init__(self, client: MasterClient, dataset: str, holder: str, prefetch: int, stuck_s: float) -> None:
        self.commit = False
        """Of a data set of commit="checkpoint": whether what was reported since the last mark counts, when closed."""
        self._unmarked = 0  # shards done since the last mark
        self.finished = False
        self.poisoned = 0
        self.refused = 0
        self._client = client
        self.dataset: Final = dataset
        self._holder = holder
        self._prefetch = prefetch
        self._activity = LeaseActivity(stuck_s)
        self._wait = MasterWait(client.job, client.timeout_s)
        self._outbox: collections.deque[Report | MarkRequest | ResumeRequest] = collections.deque()
        self._inbox: collections.deque[Shard] = collections.deque()
        self._hungry: collections.deque[None] = collections.deque()  # a part for each caller that waits in `take`
        self._restarts: collections.deque[None] = collections.deque()  # an entry for each caller of `begin_anew`
        self._changed = Notifier()
        self._failure: EDLError | None = None
        self._reading = False
        self._paused = False  # no shards are kept at hand before the caller asks for one
        self._asking = False  # a turn is under way, or about to be
        self._none_left = False  # the master had no shard when it was asked last
        self._ending = False
        self._connection: MasterConnection | None = None
        self._stream: TurnStream | None = None
        self._session: ShardSession | None = None
        self._spec: messages.DatasetSpec | None = None
        self._mark = 0
        self._ask_at = 0.0
        self._heard_at = 0.0
        self._look_at = 0.0
        self._thread = BackgroundLoop("edl-shards", self._work, self._interrupt)

    @property
    def spec(self) -> messages.DatasetSpec:
        """What the data set is made of; known once a shard was given."""
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
            self._await(lambda: bool(self._inbox) or self.finished or self._ending, timeout_s)
            return self._pop()
        finally:
            self._hungry.pop()

    def rest(self, timeout_s: float) -> bool:
        """Ask for no shard until `take` is called; return whether this reader has none since the master had none.

        So two readers that look at the master who else has shards do not find each other, and leave both.

        Args:
            timeout_s: how long to wait for an answer that is under way, in seconds.
        """
        self._paused = True
        self._changed.wait_for(lambda: not self._asking or self._failure is not None or self._ending, timeout_s)
        session = self._session
        if self._asking or self._inbox or self._outbox or session is None:
            return False
        return self._none_left and not (session.open or session.owes)

    def touch(self, shard: Shard) -> None:
        """Note that the caller goes on with a shard."""
        self._activity.touch(shard.id, time.monotonic())

    def tell(self, report: Report) -> None:
        """Have a report sent. Waits for nothing."""
        self._activity.remove(report.shard.id)
        self._outbox.append(report)
        self._thread.wake()

    def demand(self, request: MarkRequest | ResumeRequest) -> None:
        """Have something done at the master, and wait for it.

        Raises:
            EDLError: the master refuses, or is away for too long.
        """
        if isinstance(request, ResumeRequest) and isinstance(self._failure, LeaseLostError):
            self._failure = None
        self._outbox.append(request)
        self._thread.wake()
        try:
            self._await(lambda: request.answered, _IDLE_S)
        finally:
            self._withdraw(request)  # given up: it is not to be done behind the caller's back later
        if request.failure is not None:
            raise request.failure

    def _withdraw(self, request: MarkRequest | ResumeRequest) -> None:
        with contextlib.suppress(ValueError):
            self._outbox.remove(request)

    def deliver(self, reports: Sequence[Report]) -> None:
        """Have reports sent, and wait until all are answered; each says whether it was refused.

        Raises:
            EDLError: the master is away for too long: what was not answered is sent when it is back.
        """
        for report in reports:
            self._activity.remove(report.shard.id)
        self._outbox.extend(reports)
        self._thread.wake()
        self._await(lambda: all(report.answered for report in reports), _IDLE_S)

    def begin_anew(self) -> None:
        """Drop what the master gave before its data set was put back. Returns when nothing of that is handed out.

        Raises:
            NoMasterError: the thread waits for an answer for longer than the client's `timeout_s`.
        """
        self._restarts.append(None)
        self._thread.wake()
        if not self._changed.wait_for(lambda: not self._restarts or self._ending, self._client.timeout_s):
            raise self._wait.error()

    def close(self) -> None:
        """Send what waits, give shards back, and end. Waits for seconds at most."""
        self._ending = True
        self._changed.notify()
        self._thread.wake()
        self._thread.wait_ended(_CLOSE_S)
        self._thread.close()
        connection = self._connection
        if connection is not None:
            connection.close()

    def _pop(self) -> Shard | None:
        try:
            shard = self._inbox.popleft()
        except IndexError:
            return None
        self.touch(shard)
        return shard

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

    # --- In the thread. ---

    def _interrupt(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.close()

    def _work(self) -> float | None:
        if self._ending:
            self._say_goodbye()
            return None
        if self._failure is not None:
            return _IDLE_S
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
            if self._restarts:
                if self._session is not None:
                    self._lose_session("the data set was put back to earlier progress")
                self._restarts.clear()
                self._changed.notify()
            if not (self._reading or self._outbox or self._session):
                return _IDLE_S
            if self._outbox and isinstance(self._outbox[0], ResumeRequest):
                wait_s = self._resume(self._outbox[0])
                if wait_s:
                    return wait_s
                continue
            session = self._attached()
            self._take_reports(session)
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + self._renew_s
                self._release_idle(session, now)
            if self._ask(session, now):
                self._changed.notify()
            elif self._outbox and isinstance(self._outbox[0], MarkRequest):
                self._set_mark(session, self._outbox[0])
            elif self._outbox:
                continue
            elif self.finished and not self.by_checkpoint:
                self._close_session(session)  # also after an attempt that failed: the master does not end before
            elif now >= (renew_at := self._heard_at + self._renew_s):
                self._send(messages.Turn(session=session.name))
            else:
                due_at = min(renew_at, self._ask_at) if self._room else renew_at
                return max(0.001, due_at - now)
        return 0.0

    def _release_idle(self, session: ShardSession, now: float) -> None:
        """Let others have the shards with which the caller does nothing: a session that lives renews all of its own."""
        idle = self._activity.idle(now)
        if idle.unused:
            self._paused = True
            while (shard := self._pop()) is not None:
                self._activity.remove(shard.id)
                session.report(Report(shard, "returned"))
        for lease in idle.held:
            self._activity.remove(lease)
            if (shard := session.open.get(lease)) is None:
                continue
            why = f"{self._holder} has done nothing with it for {self._activity.idle_s:g} s (stuck_s)"
            if self.by_checkpoint:  # the caller's state may hold samples of it
                raise LeaseLostError(f"shard {shard.shard}: {why}")
            logger.warning("shard %d of %s was not reported, and goes to others: %s", shard.shard, self.dataset, why)
            session.report(Report(shard, "returned" if self.spec.ignore_expiries else "failed", why))
        if self._hungry and (quiet := self._activity.newly_quiet(now, _QUIET_S, session.open)):
            logger.warning(
                "this process waits for a shard of %s, and has not reported %d that it has (%s): others get those %g s"
                " after it did something with them last",
                *(self.dataset, len(quiet), ", ".join(str(session.open[lease].shard) for lease in quiet[:8])),
                self._activity.idle_s,
            )

    @property
    def _renew_s(self) -> float:
        """Return how often a session is renewed: four times in its length, so that three renewals may fail."""
        spec = self.spec
        return max(0.05, min(spec.lease_s, spec.session_s) / 4)

    @property
    def _room(self) -> int:
        """Return how many shards more the reader can use: none until half of those at hand are gone."""
        if not self._reading or self.finished or (self._paused and not self._hungry):
            return 0
        has, room = len(self._inbox), max(self._prefetch, len(self._hungry))
        return max(0, room - has) if has <= self._prefetch // 2 else 0

    def _take_reports(self, session: ShardSession) -> None:
        while self._outbox and isinstance(report := self._outbox[0], Report):
            self._outbox.popleft()
            session.report(report)

    def _ask(self, session: ShardSession, now: float) -> bool:
        """Take a turn where there is something to report or to ask for; return whether there was."""
        self._asking = True  # before the look whether the caller rests
        try:
            want = self._room if now >= self._ask_at else 0
            if not (session.owes or want):
                return False
            self._turn(session, want)
            return True
        finally:
            self._asking = False

    def _turn(self, session: ShardSession, want: int) -> None:
        turn = session.next_turn(want)
        given, reports = session.answer(self._send(turn))
        if turn.want:
            self._none_left = not given
        for report in reports:
            self._note_answer(report)
        self._add_given(given)
        self.poisoned = session.poisoned
        if session.finished and not session.open:
            self.finished = True
            self._reading = False

    def _add_given(self, given: Sequence[Shard]) -> None:
        now = time.monotonic()
        for shard in given:
            self._activity.give(shard.id, now)
        self._inbox.extend(given)

    def _send(self, turn: messages.Turn) -> messages.NextReply:
        assert self._stream is not None
        reply = self._stream.exchange(messages.NextRequest(turn=turn))
        self._heard_at = time.monotonic()
        self._wait.answered()
        if turn.want and not reply.leases:
            self._ask_at = self._heard_at + max(reply.wait_s, _ASK_S)
        return reply

    def _attached(self) -> ShardSession:
        """Return the session, open at the master that leads now."""
        if self._stream is not None and self._stream.is_old:
            self._drop_stream()
        if self._connection is None:
            self._connection = self._client.connect()
        connection = self._connection
        if self._spec is None:
            self._spec = self._described(connection)
        session = self._session
        if self._stream is not None and session is not None:
            return session
        self._stream = self._stream or TurnStream(connection)
        if session is None:  # kept also where there is no answer: the master may have heard
            session = self._session = ShardSession(secrets.token_hex(16))
        request = messages.OpenSession(dataset=self.dataset, session=session.name, holder=self._holder)
        reply = self._stream.exchange(messages.NextRequest(open=request))
        self._heard_at = time.monotonic()
        self._wait.answered()
        if not session.is_same(reply):
            raise LeaseLostError("the master does not know this reader's session any more")
        return session

    def _described(self, connection: MasterConnection) -> messages.DatasetSpec:
        request = messages.DescribeDatasetRequest(dataset=self.dataset)
        try:
            return connection.call("DescribeDataset", request, messages.DatasetReply).spec
        except NotFoundError as exc:
            raise NoMasterError(f"{exc}; waiting for its creation") from exc

    def _set_mark(self, session: ShardSession, request: MarkRequest) -> None:
        assert self._connection is not None
        if not self.by_checkpoint:
            self._withdraw(request)
            request.failure = SettingsError(
                f"shards of {self.dataset} are done when they are reported, and cannot be gone back to: create the "
                'data set with commit="checkpoint" where readers are part of a checkpoint'
            )
            request.answered = True
            return
        mark = messages.Mark(session=session.name, mark=self._mark + 1)
        for number, units in request.consumed.items():
            if (shard := session.open.get(number)) is not None:
                mark.partial.append(messages.Partial(lease=messages.LeaseId(id=number, term=shard.term), units=units))
        self._connection.call("Mark", mark, messages.MarkReply)
        self._mark += 1
        self._unmarked = 0
        self._withdraw(request)
        request.session = session.name
        request.number = self._mark
        request.answered = True
        self._changed.notify()

    def _resume(self, request: ResumeRequest) -> float:
        """Go on from a mark in a new session; return the seconds until it is tried again, 0 when it is over."""
        if self._session is not None and self._session is not request.opened:
            self._connection = self._connection or self._client.connect()
            self._close_session(self._session)  # also after an attempt that failed before: it has been read from
        self._inbox.clear()
        self._activity.clear()
        self._unmarked = 0
        self.finished = False
        self._none_left = False
        self._ask_at = 0.0
        session = request.opened = self._attached()  # the same for each attempt
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
            self._add_given(session.resume(reply.leases))
        self._withdraw(request)
        request.answered = True
        self._changed.notify()
        return 0.0

    # --- Ends and losses. ---

    def _note_answer(self, report: Report) -> None:
        if report.refused is None:
            self._unmarked += report.outcome == "done"
            return
        self.refused += 1
        logger.warning(
            "shard %d of %s is this reader's no more, and its report was refused: %s",
            *(report.shard.shard, self.dataset, report.refused),
        )

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
                self._take_reports(session)
                while session.owes:
                    _, reports = session.answer(self._send(session.next_turn(0)))
                    for report in reports:
                        self._note_answer(report)
                self._close_session(session, self.commit)
                if self._unmarked and self.by_checkpoint and not self.commit:
                    logger.warning(
                        "%d shards of %s were done after the last state_dict(), and go to others: save before close()",
                        *(self._unmarked, self.dataset),
                    )
        except EDLError as exc:
            logger.info("the session ends by itself, since the master was not told: %s", exc)
        self._drop_connection()

    def _lose_session(self, why: str) -> None:
        """Begin a new session; what the old one had is another's."""
        session, self._session = self._session, None
        self._none_left = False
        self._inbox.clear()
        self._activity.clear()
        if session is not None:
            for report in session.abandon(why):
                self._note_answer(report)
        self._drop_stream()
        if self.by_checkpoint:
            self._fail(
                LeaseLostError(
                    f"{why}: what was read of {self.dataset} since the last checkpoint is another reader's; load it"
                )
            )
        elif not self.finished:
            logger.warning("this reader's session of %s was lost, and it begins a new one: %s", self.dataset, why)

    def _job_is_done(self) -> bool:
        """End where the job's master ended since all was done, and no other has been started for a while."""
        away_since = self._wait.away_since
        if away_since is None or time.monotonic() < away_since + _DONE_S:
            return False
        report = self._client.last_report()
        datasets = [] if report is None else report.get("datasets", [])
        found = next((dataset for dataset in datasets if dataset.get("name") == self.dataset), None)
        if found is None:
            return False
        logger.warning(
            "job %r is done, and its master has ended: %s has no shard any more", self._client.job, self.dataset
        )
        if self._session is not None:
            self._session.abandon("the job is done")
            self._session = None
        self.poisoned = int(found["shards"]["poisoned"])
        self.finished = True
        self._reading = False
        while self._outbox:
            request = self._outbox.popleft()
            if isinstance(request, Report):
                request.refused = "the job is done"
            else:
                request.failure = NoMasterError("the job is done, and its master has ended")
            request.answered = True
        self._changed.notify()
        return True

    def _fail(self, exc: EDLError) -> None:
        """Have callers get an error from now on."""
        self._failure = exc
        self._changed.notify()

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _drop_connection(self) -> None:
        self._drop_stream()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


_ASK_S: Final = 0.01
"""Between two questions for shards where there are none: a master that gives no time is not to be flooded."""
_QUIET_S: Final = 60.0
"""A caller that waits for a shard, and has done nothing with its own for so long, may have forgotten to report it."""
