"""A term of a leading master: the state, its journal, and the clocks of its sessions.

Commands get an order in the event loop, where they are applied to the book at once. A thread journals them in groups:
what comes while a commit is under way is the next group. Nothing is answered before the journal has it, a refusal
neither: its reason may be a command that the journal does not have yet.

Clocks are here and not in the book, so what has expired becomes a command as well.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from edl.background import BackgroundLoop, start_call
from edl.errors import ClosedError, EDLError, LeaseLostError
from edl.master.journal import Journal
from edl.master.shards import ShardBook
from edl.protocol import master as messages

__all__ = ["PAUSE_S", "TICK_S", "LeaseClock", "Term", "load_book"]

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""How often a leader looks for what has expired."""
PAUSE_S: Final = 1.0
"""A look this late means that the process stood still, and did not read what workers sent. So a pause counts for no
more than this."""
_IDLE_S: Final = 3600.0
"""How long the committing thread waits unless it is woken: it always is."""
_GROUP: Final = 512
"""Most commands in a commit: with more, the first of them would wait too long."""
_SNAPSHOT_COMMANDS: Final = 100_000  # whichever comes first
_SNAPSHOT_NBYTES: Final = 32 << 20
"""Commands, and bytes of them, after which a snapshot replaces them: seconds of work to replay."""
_REPLAYED: Final = 10_000
"""Commands, about half a second of replay, which the next start should not repeat."""
_EVENTS: Final = 50
"""Events that are shown; older ones are in the log."""


@dataclass(slots=True)
class _Watched:
    """A session: how many seconds it may be silent before its leases end, and before it ends itself."""

    lease_s: float
    session_s: float
    heard_s: float
    is_silent: bool = False  # its leases have ended


class LeaseClock:
    """Knows which sessions have been silent for too long. Stands still while the process does."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._seen = monotonic()
        self._now = 0.0
        self._sessions: dict[str, _Watched] = {}

    def watch(self, session: str, lease_s: float, session_s: float) -> None:
        """Begin to watch a session, as heard at this moment."""
        self._sessions[session] = _Watched(lease_s, session_s, self._now)

    def is_watched(self, session: str) -> bool:
        """Return whether the clock watches a session."""
        return session in self._sessions

    def forget(self, session: str) -> None:
        """Stop watching a session."""
        self._sessions.pop(session, None)

    def hear(self, session: str) -> None:
        """Note a sign of life of a session."""
        if (watched := self._sessions.get(session)) is not None:
            watched.heard_s = self._now
            watched.is_silent = False

    def silence_s(self, session: str) -> float:
        """Return for how long a session was silent, as of the last look."""
        watched = self._sessions.get(session)
        return 0.0 if watched is None else self._now - watched.heard_s

    def due(self) -> tuple[list[str], list[str]]:
        """Advance; return sessions whose leases have ended since the last look, and sessions that have ended."""
        at = self._monotonic()
        self._now += min(at - self._seen, PAUSE_S)
        self._seen = at
        silent: list[str] = []
        over: list[str] = []
        for session, watched in self._sessions.items():
            silence_s = self._now - watched.heard_s
            if silence_s > watched.session_s:
                over.append(session)
            elif silence_s > watched.lease_s and not watched.is_silent:
                watched.is_silent = True
                silent.append(session)
        return silent, over


class _Entry(NamedTuple):
    """Something for the committing thread to do, and who waits for it."""

    answered: asyncio.Future[None]
    record: bytes | None = None
    snapshot: bytes | None = None


def load_book(journal: Journal) -> tuple[int, ShardBook, int]:
    """Begin a term; return its number, the state as the journal has it, and how many commands were replayed."""
    term = journal.begin_term()
    snapshot, records = journal.load()
    book = ShardBook.restore(snapshot) if snapshot is not None else ShardBook()
    for record in records:
        book.apply(messages.Command.FromString(record))
    book.pop_events()  # the master of that time has told them
    return term, book, len(records)


class Term:
    """Takes commands as long as the journal does. For the thread of the event loop that made it.

    Term `number` came from `journal`, which `close` closes; `book` is the state as the journal has it. When the journal
    cannot be written, `failure` says why, `ended` is set, and nothing is answered from then on. `observe` gets the
    seconds of each commit, in the committing thread.
    """

    def __init__(
        self,
        number: int,
        book: ShardBook,
        journal: Journal,
        observe: Callable[[float], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number: Final = number
        self.book: Final = book
        self.failure: BaseException | None = None
        self.ended = asyncio.Event()
        self.events: collections.deque[dict[str, Any]] = collections.deque(maxlen=_EVENTS)
        self.clock: Final = LeaseClock(clock)
        self._journal = journal
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: list[_Entry] = []
        self._why_closed: BaseException | None = None
        self._since_snapshot = 0
        self._since_nbytes = 0
        self._thread = BackgroundLoop("edl-master-commit", self._commit)

    async def begin(self, replayed: int) -> None:
        """Journal that this term has begun, and give every session its full time.

        After many `replayed` commands a snapshot replaces them.
        """
        await self.submit(messages.Command(begin_term=messages.BeginTerm(term=self.number)))
        if replayed > _REPLAYED:
            self.take_snapshot()
        for session in self.book.sessions():
            self._watch(session)

    async def submit(self, command: messages.Command) -> Any:
        """Apply a command; return the book's answer once the journal has the command.

        Raises:
            EDLError: The book refuses the command, which has changed nothing.
            ClosedError: The journal cannot be written, or this is closed. What became of the command is unknown.
        """
        self._check()
        command.time_ms = round(time.time() * 1000)
        before = self.book.version
        try:
            answer = self.book.apply(command)
        except EDLError:
            await self.settled()  # the reason may be a command that the journal does not have yet
            raise
        if self.book.version == before:  # a request that came again
            await self.settled()
            return answer
        record = command.SerializeToString()
        entry = _Entry(self._loop.create_future(), record)
        self._append(entry)
        self._since_snapshot += 1
        self._since_nbytes += len(record)
        if self._since_snapshot >= _SNAPSHOT_COMMANDS or self._since_nbytes >= _SNAPSHOT_NBYTES:
            self.take_snapshot()
        await entry.answered
        return answer

    async def settled(self) -> None:
        """Wait until the journal has all that was applied until now; ClosedError as for `submit`."""
        self._check()
        entry = _Entry(self._loop.create_future())
        self._append(entry)
        await entry.answered

    def take_snapshot(self) -> None:
        """Have a snapshot of the present state replace the records before it."""
        self._since_snapshot = 0
        self._since_nbytes = 0
        self._append(_Entry(self._loop.create_future(), snapshot=self.book.snapshot()))

    async def open_session(self, request: messages.OpenSession) -> messages.NextReply:
        """Open a session, or go on with it; return the number of its last request, and its leases."""
        reply: messages.NextReply = await self.submit(messages.Command(open_session=request))
        self._watch(request.session)
        return reply

    async def turn(self, turn: messages.Turn) -> messages.NextReply:
        """Take a session's reports, and give it shards. A turn with the number 0 is only a sign of life.

        The answer must not be changed.
        """
        self.clock.hear(turn.session)
        if turn.request == 0:
            if self.book.session(turn.session) is None:
                raise LeaseLostError(f"session {turn.session!r} has ended: it was silent for too long")
            return messages.NextReply()
        reply: messages.NextReply = await self.submit(messages.Command(turn=turn))
        return reply

    async def tick(self) -> None:
        """Expire what was not renewed, and note what has happened."""
        # gRPC cancels the call of a worker that died: its session may be open though `open_session` did not return.
        for session in self.book.sessions():
            if not self.clock.is_watched(session):
                self._watch(session)
        silent, over = self.clock.due()
        for session in over:
            self.clock.forget(session)
        leases = [lease for session in silent if (info := self.book.session(session)) for lease in info.leases]
        if leases or over:
            await self.submit(messages.Command(expire=messages.Expire(leases=leases, sessions=over)))
        for event in self.book.pop_events():
            self.add_event(event.kind, f"{event.dataset}: {event.text}", event.cause)

    def add_event(self, kind: str, text: str, cause: str) -> None:
        """Log an event and keep it for the report. Kinds are those of `BookEvent`, and `takeover`."""
        logger.info("%s: %s: %s", kind, text, cause)
        self.events.append({"time": round(time.time(), 3), "kind": kind, "text": text, "cause": cause})

    async def close(self, why: str) -> None:
        """Stop answering, and close the journal. What waits gets a ClosedError."""
        self._end(ClosedError(why))

        def close() -> None:
            self._thread.close()
            self._journal.close()

        await asyncio.wrap_future(start_call("edl-master-close", close))

    def _watch(self, session: str) -> None:
        info = self.book.session(session)
        if info is not None:
            self.clock.watch(session, info.dataset.spec.lease_s, info.dataset.spec.session_s)

    def _check(self) -> None:
        if self._why_closed is not None:
            raise ClosedError(f"this master ends: {self._why_closed}")

    def _append(self, entry: _Entry) -> None:
        with self._lock:
            first = not self._pending
            self._pending.append(entry)
        if first:
            self._thread.wake()

    def _end(self, why: BaseException) -> None:
        """Answer nothing from now on."""
        self._why_closed = self._why_closed or why
        with self._lock:
            pending, self._pending = self._pending, []
        _refuse(pending, why)
        self._thread.wake()
        self.ended.set()

    def _fail(self, exc: BaseException, group: list[_Entry]) -> None:
        _refuse(group, exc)
        if self._why_closed is None:
            self.failure = exc
            self._end(exc)

    def _snapshot_if_due(self) -> None:
        """Take the snapshot that the journal asks for, unless one is on its way to it."""
        with self._lock:
            coming = any(entry.snapshot is not None for entry in self._pending)
        if not coming and self._why_closed is None and self._journal.snapshot_due:
            self.take_snapshot()

    # --- In the committing thread. ---

    def _commit(self) -> float | None:
        """Write what waits, in order, until nothing waits."""
        while self._why_closed is None:
            with self._lock:
                group, self._pending = self._pending[:_GROUP], self._pending[_GROUP:]
            if not group:
                return _IDLE_S
            try:
                self._write(group)
            except Exception as exc:  # noqa: BLE001 - whatever it is: what is not journalled must not be answered
                self._loop.call_soon_threadsafe(self._fail, exc, group)
                return None
            self._loop.call_soon_threadsafe(_release, group)
            if self._journal.snapshot_due and not any(entry.snapshot is not None for entry in group):
                self._loop.call_soon_threadsafe(self._snapshot_if_due)
        return None

    def _write(self, group: list[_Entry]) -> None:
        records: list[bytes] = []
        for entry in group:
            if entry.record is not None:
                records.append(entry.record)
            if entry.snapshot is not None:
                self._append_records(records)
                self._journal.snapshot(entry.snapshot)
                records = []
        self._append_records(records)

    def _append_records(self, records: list[bytes]) -> None:
        if records:
            begun = time.perf_counter()
            self._journal.append(records)
            self._observe(time.perf_counter() - begun)


def _release(group: list[_Entry]) -> None:
    for entry in group:
        if not entry.answered.done():
            entry.answered.set_result(None)


def _refuse(group: list[_Entry], why: BaseException) -> None:
    for entry in group:
        if not entry.answered.done():
            entry.answered.set_exception(ClosedError(f"this master ends: {why}"))
            entry.answered.exception()  # a call that was cancelled never asks for it
