"""The thread of a reader: takes turns with the master, renews leases, and goes on where the master was away."""

from __future__ import annotations

import collections
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final

from edl.background import BackgroundLoop
from edl.errors import ClosedError, ConflictError, EDLError, LeaseLostError, NoMasterError, SettingsError
from edl.master.client.connection import MasterConnection, NotFoundError
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
        stuck_s: leases of a caller that does nothing for so long are not renewed.
    """

    def __init__(self, client: MasterClient, dataset: str, holder: str, prefetch: int, stuck_s: float) -> None:
        self.commit = False
        """Of a data set of commit="checkpoint": whether what was reported since the last mark counts, when closed."""
        self.finished = False
        self.poisoned = 0
        self.refused = 0
        self._client = client
        self._dataset = dataset
        self._holder = holder
        self._prefetch = prefetch
        self._stuck_s = stuck_s
        self._stuck = False
        self.touched_at = time.monotonic()
        """When the caller did something last."""
        self._wait = MasterWait(client.job, client.timeout_s)
        self._outbox: collections.deque[Report | MarkRequest | ResumeRequest] = collections.deque()
        self._inbox: collections.deque[Shard] = collections.deque()
        self._hungry: collections.deque[None] = collections.deque()  # a part for each caller that waits in `take`
        self._changed = Notifier()
        self._failure: EDLError | None = None
        self._reading = False
        self._ending = False
        self._connection: MasterConnection | None = None
        self._stream: TurnStream | None = None
        self._session: ShardSession | None = None
        self._spec: messages.DatasetSpec | None = None
        self._mark = 0
        self._ask_at = 0.0
        self._heard_at = 0.0
        self._thread = BackgroundLoop("edl-shards", self._work, self._interrupt)

    @property
    def spec(self) -> messages.DatasetSpec:
        """What the data set is made of; known once a shard was given."""
        assert self._spec is not None
        return self._spec

    # --- For callers. ---

    @property
    def away_s(self) -> float:
        """Seconds for which no master has answered; 0.0 while it does."""
        since = self._wait.away_since
        return 0.0 if since is None else time.monotonic() - since

    def take(self, timeout_s: float) -> Shard | None:
        """See `ShardReader.take`."""
        self.touched_at = time.monotonic()
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

    def tell(self, report: Report) -> None:
        """Have a report sent. Waits for nothing."""
        self.touched_at = time.monotonic()
        self._outbox.append(report)
        self._thread.wake()

    def demand(self, request: Report | MarkRequest | ResumeRequest) -> None:
        """Have something done at the master, and wait for it.

        Raises:
            EDLError: the master refuses, or is away for too long.
        """
        self.touched_at = time.monotonic()
        if isinstance(request, ResumeRequest) and isinstance(self._failure, LeaseLostError):
            self._failure = None
            self._thread.wake()
        self._outbox.append(request)
        self._thread.wake()
        self._await(lambda: request.answered, _IDLE_S)
        if not isinstance(request, Report) and request.failure is not None:
            raise request.failure

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
            return self._inbox.popleft()
        except IndexError:
            return None

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
            want = self._room if now >= self._ask_at else 0
            if session.owes or want:
                self._turn(session, want)
            elif self._outbox and isinstance(self._outbox[0], MarkRequest):
                self._set_mark(session, self._outbox[0])
            elif self._outbox:
                continue
            elif now >= (renew_at := self._heard_at + self._renew_s):
                if self._is_stuck(session, now):
                    return self._renew_s
                self._send(messages.Turn(session=session.name))
            else:
                due_at = min(renew_at, self._ask_at) if self._room else renew_at
                return max(0.001, due_at - now)
        return 0.0

    def _is_stuck(self, session: ShardSession, now: float) -> bool:
        """Whether the caller has shards, and has done nothing with them for so long that others should."""
        stuck = bool(session.open) and not self._hungry and now > self.touched_at + self._stuck_s
        if stuck and not self._stuck:
            logger.warning(
                "this process has not asked for a shard of %s, nor reported any, for %g s: its shards go to others",
                *(self._dataset, self._stuck_s),
            )
        self._stuck = stuck
        return stuck

    @property
    def _renew_s(self) -> float:
        """Return how often a session is renewed: four times in its length, so that three renewals may fail."""
        spec = self.spec
        return max(0.05, min(spec.lease_s, spec.session_s) / 4)

    @property
    def _room(self) -> int:
        """Return how many shards more the reader can use: none until half of those at hand are gone."""
        if not self._reading or self.finished:
            return 0
        has, room = len(self._inbox), max(self._prefetch, len(self._hungry))
        return max(0, room - has) if has <= self._prefetch // 2 else 0

    def _take_reports(self, session: ShardSession) -> None:
        while self._outbox and isinstance(report := self._outbox[0], Report):
            self._outbox.popleft()
            session.report(report)

    def _turn(self, session: ShardSession, want: int) -> None:
        given, reports = session.answer(self._send(session.next_turn(want)))
        for report in reports:
            if report.refused is not None:
                self._note_refusal(report)
        self._inbox.extend(given)
        self.poisoned = session.poisoned
        if session.finished and not session.open:
            self.finished = True
            self._reading = False
        self._changed.notify()
        if self.finished and self.spec.commit == messages.COMMIT_REPORT:
            self._close_session(session)

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
        request = messages.OpenSession(dataset=self._dataset, session=session.name, holder=self._holder)
        reply = self._stream.exchange(messages.NextRequest(open=request))
        self._heard_at = time.monotonic()
        self._wait.answered()
        if not session.is_same(reply):
            raise LeaseLostError("the master does not know this reader's session any more")
        return session

    def _described(self, connection: MasterConnection) -> messages.DatasetSpec:
        request = messages.DescribeDatasetRequest(dataset=self._dataset)
        try:
            return connection.call("DescribeDataset", request, messages.DatasetReply).spec
        except NotFoundError as exc:
            raise NoMasterError(f"{exc}; waiting for its creation") from exc

    def _set_mark(self, session: ShardSession, request: MarkRequest) -> None:
        assert self._connection is not None
        if self.spec.commit != messages.COMMIT_CHECKPOINT:
            self._outbox.popleft()
            request.failure = SettingsError(
                f"shards of {self._dataset} are done when they are reported, and cannot be gone back to: create the "
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
        self._outbox.popleft()
        request.session = session.name
        request.number = self._mark
        request.answered = True
        self._changed.notify()

    def _resume(self, request: ResumeRequest) -> float:
        """Go on from a mark in a new session; return the seconds until it is tried again, 0 when it is over."""
        if self._session is not None and self._session is not request.opened and self._connection is not None:
            self._close_session(self._session)
        self._inbox.clear()
        self.finished = False
        self._ask_at = 0.0
        session = request.opened = self._attached()  # the same for each attempt
        assert self._connection is not None
        resume = messages.Resume(
            dataset=self._dataset,
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
            self._inbox.extend(session.resume(reply.leases))
        self._outbox.popleft()
        request.answered = True
        self._changed.notify()
        return 0.0

    # --- Ends and losses. ---

    def _note_refusal(self, report: Report) -> None:
        self.refused += 1
        logger.warning(
            "shard %d of %s is this reader's no more, and its report was refused: %s",
            *(report.shard.shard, self._dataset, report.refused),
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
                    self._turn_quietly(session)
                self._close_session(session, self.commit)
        except EDLError as exc:
            logger.info("the session ends by itself, since the master was not told: %s", exc)
        self._drop_connection()

    def _turn_quietly(self, session: ShardSession) -> None:
        _, reports = session.answer(self._send(session.next_turn(0)))
        for report in reports:
            if report.refused is not None:
                self._note_refusal(report)

    def _lose_session(self, why: str) -> None:
        """Begin a new session; what the old one had is another's."""
        session, self._session = self._session, None
        self._inbox.clear()
        if session is not None:
            for report in session.abandon(why):
                self._note_refusal(report)
        self._drop_stream()
        if self._spec is not None and self._spec.commit == messages.COMMIT_CHECKPOINT:
            self._fail(
                LeaseLostError(
                    f"{why}: what was read of {self._dataset} since the last checkpoint is another reader's; load it"
                )
            )
        else:
            logger.warning("this reader's session of %s was lost, and it begins a new one: %s", self._dataset, why)

    def _job_is_done(self) -> bool:
        """End where the job's master ended since all was done, and no other has been started for a while."""
        away_since = self._wait.away_since
        if away_since is None or time.monotonic() < away_since + _DONE_S:
            return False
        report = self._client.last_report()
        datasets = [] if report is None else report.get("datasets", [])
        found = next((dataset for dataset in datasets if dataset.get("name") == self._dataset), None)
        if found is None:
            return False
        logger.warning(
            "job %r is done, and its master has ended: %s has no shard any more", self._client.job, self._dataset
        )
        if self._session is not None:
            self._session.abandon("the job is done")
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
