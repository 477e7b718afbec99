"""A reader's conversation with its master: a thread takes turns, renews leases, and reconnects after an outage.

The caller's threads put reports and requests into an outbox and take shards from an inbox, so that a training loop
never waits for the network. Each turn sends the pending reports, requests as many shards as the reader has room for,
and renews all leases of the reader's session. Turns are numbered within a session. If a reply is lost, the same turn is
sent again, to this master or to its successor; the turn is applied only once. If the master no longer knows a session,
a new session replaces it. By then, the shards of the old session may belong to other readers.

No locks are used here, so a signal handler may close the reader in the middle of any call. The caller's threads and
the conversation's thread change shared state only in single steps that are atomic in Python.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

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
from edl.master.client.master_client import MasterClient, MasterConnection, MasterWait, NotCreatedError
from edl.master.naming import NotFoundError
from edl.notifier import Notifier
from edl.protocol import master as messages

logger = logging.getLogger(__name__)

_IDLE_S: Final = 3600.0  # new work wakes the thread
_CLOSE_S: Final = 3.0  # for `close` to send the last reports; an unclosed session expires by itself
_DONE_S: Final = 5.0  # without a master until a done job counts as over: another master may start
_RESUME_RETRY_S: Final = 1.0
"""Seconds between attempts to resume at a mark that another reader holds. If that reader is dead, its session will
expire."""
_ASK_S: Final = 0.01  # between requests for shards while there are none, so that the master is not flooded
_MOST_REPORTS: Final = 4096  # per turn, so that a turn is applied in milliseconds

Outcome: TypeAlias = Literal["done", "failed", "returned"]


@dataclass(frozen=True)
class Shard:
    """A part of a data set that this reader has leased: units [start, stop) of an epoch.

    Attributes:
        id: Number of the lease, never reused.
        term: Term of the master that granted the lease.
        epoch: The epoch, from 0.
        shard: Number of the shard in the data set.
        start: The first unit.
        stop: The unit after the last.
    """

    id: int
    term: int
    epoch: int
    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(eq=False, slots=True)
class Report:
    """A shard's outcome. If it is not done, its first `units` units are. `refused` says why the report was refused."""

    shard: Shard
    outcome: Outcome
    reason: str = ""
    units: int = 0
    refused: str | None = None
    answered: bool = False


@dataclass(eq=False)
class _Request:
    """A request that a caller waits for. `attempt` returns the seconds until the next attempt; 0 if none is needed."""

    attempt: Callable[[_Request], float]
    answered: bool = False
    answer: Any = None
    failure: EDLError | None = None
    retry_until: float | None = None
    opened: ShardSession | None = None  # the session opened for it; the same for each attempt


@dataclass(slots=True)
class _OpenShard:
    """A received shard that has not been reported yet, or whose report has not been answered yet."""

    shard: Shard
    touched_at: float
    taken: bool = False
    reported: bool = False


class ShardSession:
    """A reader's session: its shards, and the turn in flight. `restored` counts earlier resets of the data set."""

    def __init__(self, name: str, restored: int = 0) -> None:
        self.name: Final = name
        self.restored: Final = restored
        self.open: dict[int, _OpenShard] = {}  # by lease
        self.in_flight: messages.Turn | None = None  # not answered yet
        self._turns = 0
        self._sent: list[Report] = []

    def next_turn(self, want: int, outbox: deque[Any]) -> messages.Turn:
        """Return the turn in flight, or a new one that requests `want` shards and sends the first pending reports."""
        if self.in_flight is not None:
            return self.in_flight
        self._turns += 1
        turn = messages.Turn(session=self.name, request=self._turns, want=want)
        while len(self._sent) < _MOST_REPORTS and isinstance(report := _first_of(outbox), Report):
            outbox.popleft()
            self._sent.append(report)
            lease = messages.LeaseId(id=report.shard.id, term=report.shard.term)
            if report.outcome == "done":
                turn.done.append(lease.id)
                turn.done_terms.append(lease.term)
            elif report.outcome == "failed":
                reason = report.reason.encode(errors="backslashreplace").decode()  # a path may not be UTF-8
                turn.failed.append(messages.Failure(lease=lease, reason=reason, units=report.units))
            else:
                turn.returned.append(messages.Partial(lease=lease, units=report.units))
        self.in_flight = turn
        return turn

    def answer(self, refusals: Mapping[int, str]) -> list[Report]:
        """Note that the turn in flight was answered; return its reports. `refusals` maps refused leases to reasons."""
        self.in_flight = None
        reports, self._sent = self._sent, []
        for report in reports:
            report.refused = refusals.get(report.shard.id)
            report.answered = True
            self.open.pop(report.shard.id, None)
        return reports

    def add(self, leases: Iterable[messages.Lease], now: float) -> list[tuple[ShardSession, Shard]]:
        """Add leased shards; return them for the inbox."""
        given = [Shard(lease.id, lease.term, lease.epoch, lease.shard, lease.start, lease.stop) for lease in leases]
        self.open.update((shard.id, _OpenShard(shard, now)) for shard in given)
        return [(self, shard) for shard in given]

    def is_same(self, reply: messages.NextReply) -> bool:
        """Whether a reply to the reopening of this session describes this session, not a new one of the same name."""
        answered = self._turns - (self.in_flight is not None)
        return reply.last_request in (answered, self._turns)

    def abandon(self, why: str) -> list[Report]:
        """Mark the unanswered reports as refused, since the session is gone; return these reports."""
        self.open.clear()
        return self.answer({report.shard.id: why for report in self._sent})


def _first_of(outbox: deque[Any]) -> Report | _Request | None:
    try:
        first: Report | _Request = outbox[0]
    except IndexError:  # a caller withdrew its request
        return None
    return first


class Conversation:
    """Handles a reader's requests, in order. A shard that is left idle for `stuck_s` seconds goes to other readers."""

    def __init__(self, client: MasterClient, dataset: str, holder: str, prefetch: int, stuck_s: float) -> None:
        self.dataset: Final = dataset
        self.commit = False
        """With commit="checkpoint": whether `close` counts shards reported since the last mark as done."""
        self.poisoned = 0
        self.refused = 0
        self._client = client
        self._holder = holder
        self._prefetch = prefetch
        self._stuck_s = stuck_s
        self.wait: Final = MasterWait(client.job, client.timeout_s)
        self._outbox: deque[Report | _Request] = deque()
        self._inbox: deque[tuple[ShardSession, Shard]] = deque()
        self._hungry: deque[None] = deque()  # an entry for each caller that waits in `take`
        self._changed = Notifier()
        self._failure: EDLError | None = None
        self._finished = -1  # the value of `client.restored` at which the master had nothing left
        self._reading = False
        self._paused = False  # no prefetching until the caller asks for a shard
        self._asking = False  # a turn is in flight, or about to be
        self._none_left = False  # the master had no shard at the last request
        self._ending = False
        self._connection: MasterConnection | None = None
        self._session: ShardSession | None = None
        self._spec: messages.DatasetSpec | None = None
        self._mark = 0
        self._unmarked = 0  # shards done since the last mark
        self._ask_at = 0.0
        self._heard_at = 0.0
        self._thread = BackgroundLoop("edl-shards", self._work, self._interrupt)

    @property
    def spec(self) -> messages.DatasetSpec:
        """The data set's specification, which is known once a shard has been received."""
        assert self._spec is not None
        return self._spec

    @property
    def finished(self) -> bool:
        """Whether the master has nothing left for this reader."""
        return self._finished == self._restored

    @property
    def _restored(self) -> int:
        return self._client.restored[self.dataset]

    @property
    def by_checkpoint(self) -> bool:
        """Whether shards count as done only when a mark covers them; False until a master has said so."""
        return self._spec is not None and self._spec.commit == messages.COMMIT_CHECKPOINT

    # --- For callers. ---

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
        """Stop requesting shards until `take` is called; return whether neither this reader nor the master has any.

        Without this call, two readers that ask the master which other readers have shards could see each other's
        shards, and both would leave. Waits up to `timeout_s` seconds for the reply to a turn in flight.
        """
        self._paused = True
        self._changed.wait_for(lambda: not self._asking or self._failure is not None or self._ending, timeout_s)
        session = self._session
        if self._asking or self._inbox or self._outbox or session is None:
            return False
        return self._none_left and not session.open and session.in_flight is None

    def touch(self, shard: Shard) -> None:
        """Note that the caller works on a shard."""
        if (found := self._open(shard)) is not None:
            found.touched_at = time.monotonic()
            found.taken = True

    def tell(self, report: Report) -> None:
        """Queue a report for sending. Does not block."""
        self._note_reported(report.shard)
        self._outbox.append(report)
        self._thread.wake()

    def deliver(self, reports: Sequence[Report]) -> None:
        """Send reports, and wait until each is answered. If this raises an error, the reports are still sent later."""
        for report in reports:
            self.tell(report)
        self._await(lambda: all(report.answered for report in reports), _IDLE_S)

    def mark(self, consumed: Mapping[int, int]) -> tuple[str, int]:
        """Journal a position; return its session and mark number. `consumed` maps open leases to consumed units."""
        found: tuple[str, int] = self._demand(_Request(partial(self._set_mark, consumed)))
        return found

    def resume(self, holder: str, session: str, mark: int) -> None:
        """Go back to the position that `holder` marked in `session`."""
        if isinstance(self._failure, LeaseLostError):
            self._failure = None
        wanted = messages.Resume(dataset=self.dataset, of_holder=holder, of_session=session, mark=mark)
        self._demand(_Request(partial(self._resume, wanted)))

    def _demand(self, request: _Request) -> Any:
        """Wait until a request is done. If this raises an error, the request is withdrawn and not sent later."""
        self._outbox.append(request)
        self._thread.wake()
        try:
            self._await(lambda: request.answered, _IDLE_S)
        finally:
            self._withdraw(request)
        if request.failure is not None:
            raise request.failure
        return request.answer

    def close(self) -> None:
        """Send pending reports, return shards, and end the session. Waits a few seconds at most."""
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
                if session.restored == self._restored:
                    self.touch(shard)
                    return shard
        return None

    def _has_shard(self) -> bool:
        with contextlib.suppress(IndexError):
            return self._inbox[0][0].restored == self._restored
        return False

    def _await(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait up to `timeout_s` for a condition; fail if the master is unreachable for the client's `timeout_s`."""
        begun = time.monotonic()
        until = begun + timeout_s

        def settled() -> bool:
            return bool(condition()) or self._failure is not None or self._ending

        while not settled():
            away = self.wait.away_since
            now = time.monotonic()
            patience_s = self._client.timeout_s - (now - max(begun, away) if away is not None else 0.0)
            if patience_s <= 0:
                raise self.wait.error()
            if now >= until:
                return
            self._changed.wait_for(settled, min(until - now, patience_s))
        if self._failure is not None and not condition():
            raise type(self._failure)(str(self._failure)) from self._failure
        if self._ending and not condition():
            raise ClosedError("ShardReader was closed in the meantime")

    def _withdraw(self, request: Report | _Request) -> None:
        with contextlib.suppress(ValueError):
            self._outbox.remove(request)

    def _note_reported(self, shard: Shard) -> None:
        if (found := self._open(shard)) is not None:
            found.reported = True

    def _open(self, shard: Shard) -> _OpenShard | None:
        session = self._session
        return None if session is None else session.open.get(shard.id)

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
            wait_s = self.wait.failed(exc)
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
        while not self._ending:
            if self._session is not None and self._session.restored != self._restored:
                if self._connection is not None:  # this session may be newer than the progress and have shards
                    self._close_session(self._session)
                self._lose_session("the data set was reset to earlier progress")
            first = _first_of(self._outbox)
            if not (self._reading or first or self._session):
                return _IDLE_S
            if isinstance(first, _Request):
                if wait_s := first.attempt(first):
                    return wait_s
                continue
            session = self._attached()
            now = time.monotonic()
            self._release_idle(session, now)
            if self._ask(session, now):
                self._changed.notify()
            elif self._outbox:
                continue
            elif self.finished and not self.by_checkpoint:
                self._close_session(session)  # also after a failed attempt: the master does not end before
            elif now >= (renew_at := self._heard_at + self._renew_s):
                self._said(messages.NextRequest(turn=messages.Turn(session=session.name)))
            else:
                due_at = min(renew_at, self._ask_at) if self._room else renew_at
                return max(0.001, due_at - now)
        return 0.0

    def _owes(self, session: ShardSession) -> bool:
        return session.in_flight is not None or isinstance(_first_of(self._outbox), Report)

    def _release_idle(self, session: ShardSession, now: float) -> None:
        """Give up shards that the caller does not work on: otherwise this thread would renew their leases forever."""
        unreported = [lease for lease in session.open.values() if not lease.reported]
        idle = [lease for lease in unreported if now > lease.touched_at + self._stuck_s]
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
            if self.by_checkpoint:  # the caller's state may include samples of it
                raise LeaseLostError(f"shard {shard.shard}: {why}")
            logger.warning(
                "shard %d of %s was not reported, and goes to other readers: %s", shard.shard, self.dataset, why
            )
            self._outbox.appendleft(Report(shard, "returned" if self.spec.ignore_expiries else "failed", why))

    @property
    def _renew_s(self) -> float:
        """Seconds between renewals: a quarter of `lease_s` or `session_s` (the shorter), so three renewals may fail."""
        return max(0.05, min(self.spec.lease_s, self.spec.session_s) / 4)

    @property
    def _room(self) -> int:
        """How many more shards to request: none until half of the prefetched shards have been taken."""
        if not self._reading or self.finished or (self._paused and not self._hungry):
            return 0
        has, room = len(self._inbox), max(self._prefetch, len(self._hungry))
        return max(0, room - has) if has <= self._prefetch // 2 else 0

    def _ask(self, session: ShardSession, now: float) -> bool:
        self._asking = True  # before checking whether the caller rests
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
        reply = self._said(messages.NextRequest(turn=turn))
        for report in session.answer({refusal.lease.id: refusal.reason for refusal in reply.refused}):
            self._note_answer(report)
        if turn.want:
            self._none_left = not reply.leases
            if self._none_left:
                self._ask_at = self._heard_at + max(reply.wait_s, _ASK_S)
        self._inbox.extend(session.add(reply.leases, time.monotonic()))
        self.poisoned = reply.poisoned
        if reply.finished and not session.open and session.restored == self._restored:
            self._finished = session.restored
            self._reading = False

    def _said(self, request: messages.NextRequest) -> messages.NextReply:
        assert self._connection is not None
        reply = self._connection.exchange(request)
        self._heard_at = time.monotonic()
        self.wait.answered()
        return reply

    def _attached(self) -> ShardSession:
        """Return the session; if necessary, open it first at the master that leads now."""
        if self._connection is None:
            self._connection = self._client.connect()
            self._connection.on_stream_end = self._thread.wake  # notices at once if the master ends the session
        connection = self._connection
        if self._spec is None:
            self._spec = self._described(connection)
        if connection.has_stream and self._session is not None:
            return self._session
        if self._session is None:
            # Kept until it is answered: the master may have received it.
            self._session = ShardSession(secrets.token_hex(16), self._restored)
        session = self._session
        connection.end_stream()
        request = messages.OpenSession(dataset=self.dataset, session=session.name, holder=self._holder)
        try:
            reply = self._said(messages.NextRequest(open=request))
        except SettingsError:
            self._described(connection)  # the current leader may not have the data set
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
                f"the master of job {self._client.job!r} has lost data set {self.dataset!r}: the"
                " store lost the job's progress (an empty file, or `edl master --new`?). Run again"
                " under another --job, or another job name; `edl label` keeps the labels in its folder"
            ) from exc

    def _set_mark(self, consumed: Mapping[int, int], request: _Request) -> float:
        session = self._attached()
        self._flush(session)
        if not self.by_checkpoint:
            request.failure = SettingsError(
                f"shards of {self.dataset} are done when they are reported, so readers cannot go back: create the "
                'data set with commit="checkpoint" if readers are part of a checkpoint'
            )
            return self._settle(request)
        mark = messages.Mark(session=session.name, mark=self._mark + 1)
        for number, units in consumed.items():
            if (found := session.open.get(number)) is not None:
                lease = messages.LeaseId(id=number, term=found.shard.term)
                mark.partial.append(messages.Partial(lease=lease, units=units))
        assert self._connection is not None
        self._connection.call("Mark", mark, messages.MarkReply)
        self._mark += 1
        self._unmarked = 0
        request.answer = (session.name, self._mark)
        return self._settle(request)

    def _resume(self, wanted: messages.Resume, request: _Request) -> float:
        if self._session is not None and self._session is not request.opened:
            with contextlib.suppress(LeaseLostError):  # then nothing is left to report
                self._flush(self._attached())
            if self._session is not None:
                self._close_session(self._session)  # only a session that has read nothing can resume
        self._inbox.clear()
        self._unmarked = 0
        self._finished = -1
        self._none_left = False
        self._ask_at = 0.0
        session = request.opened = self._attached()
        wanted.session = session.name
        assert self._connection is not None
        try:
            reply = self._connection.call("Resume", wanted, messages.ResumeReply)
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
            self._mark = wanted.mark
            self._inbox.extend(session.add(reply.leases, time.monotonic()))
        return self._settle(request)

    def _settle(self, request: Report | _Request) -> float:
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
        for report in session.abandon("the session was closed"):
            self._note_answer(report)
        self._session = None

    def _say_goodbye(self) -> None:
        try:
            if self._session is not None and self.wait.away_since is None:
                session = self._attached()
                self._flush(session)
                self._close_session(session, self.commit)
                if self._unmarked and self.by_checkpoint and not self.commit:
                    logger.warning(
                        "%d shards of %s were done after the last state_dict(), and go to other readers:"
                        " save before close()",
                        *(self._unmarked, self.dataset),
                    )
        except EDLError as exc:
            logger.info("the session will expire, since it could not be closed at the master: %s", exc)
        self._drop_connection()

    def _lose_session(self, why: str) -> None:
        """Drop the session, whose shards go to other readers. With commit="checkpoint", this fails the reader."""
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
                    f"{why}: data read from {self.dataset} since the last checkpoint goes to other readers; load that "
                    "checkpoint"
                )
            )
        elif not self.finished:
            logger.warning("this reader's session of %s was lost, and a new one begins: %s", self.dataset, why)

    def _job_is_done(self) -> bool:
        """Finish if the job's master ended with all data sets done and has no successor; return whether this is so."""
        if self.wait.away_s < _DONE_S:
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
        self._finished = self._restored
        self._reading = False
        while (first := _first_of(self._outbox)) is not None:
            if isinstance(first, Report):
                first.refused = "the job is done"
            else:
                first.failure = NoMasterError("the job is done, and its master has ended")
            self._settle(first)
        self._changed.notify()
        return True

    def _fail(self, exc: EDLError) -> None:
        self._failure = exc
        self._changed.notify()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
