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
from typing import Any, Final, NamedTuple

from edl.background import BackgroundLoop, start_call
from edl.errors import ClosedError, EDLError, LeaseLostError
from edl.master.journal import Journal
from edl.master.shards import ShardBook
from edl.protocol import master as messages

__all__ = ["PAUSE_S", "TICK_S", "LeaseClock", "Sequencer", "SessionLimits", "Term", "load_book"]

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


class SessionLimits(NamedTuple):
    """How many seconds a session may be silent before its leases end, and before it ends itself."""

    lease_s: float
    session_s: float


class LeaseClock:
    """Knows which sessions have been silent for too long. Stands still while the process does."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._seen = monotonic()
        self._now = 0.0
        self._heard: dict[str, float] = {}
        self._limits: dict[str, SessionLimits] = {}
        self._lease_ended: set[str] = set()

    def watch(self, session: str, limits: SessionLimits) -> None:
        """Begin to watch a session, as heard at this moment."""
        self._limits[session] = limits
        self.hear(session)

    def is_watched(self, session: str) -> bool:
        """Return whether the clock watches a session."""
        return session in self._limits

    def forget(self, session: str) -> None:
        """Stop watching a session."""
        self._limits.pop(session, None)
        self._heard.pop(session, None)
        self._lease_ended.discard(session)

    def hear(self, session: str) -> None:
        """Note a sign of life of a session."""
        if session in self._limits:
            self._heard[session] = self._now
        self._lease_ended.discard(session)

    def silence_s(self, session: str) -> float:
        """Return for how long a session was silent, as of the last look."""
        return self._now - self._heard.get(session, self._now)

    def due(self) -> tuple[list[str], list[str]]:
        """Advance; return sessions whose leases have ended since the last look, and sessions that have ended."""
        at = self._monotonic()
        self._now += min(at - self._seen, PAUSE_S)
        self._seen = at
        silent: list[str] = []
        over: list[str] = []
        for session, limits in self._limits.items():
            silence_s = self.silence_s(session)
            if silence_s > limits.session_s:
                over.append(session)
            elif silence_s > limits.lease_s and session not in self._lease_ended:
                silent.append(session)
        self._lease_ended.update(silent)
        return silent, over


class _Entry(NamedTuple):
    """Something for the committing thread to do, and who waits for it."""

    answered: asyncio.Future[None]
    record: bytes | None = None
    snapshot: bytes | None = None


class Sequencer:
    """Applies commands to the book at once, and answers them when the journal has them.

    For the thread of the event loop that made it. `failed` is called there, once, when the journal cannot be written:
    nothing is answered from then on. `observe` gets the seconds of each commit, in the committing thread.
    """

    def __init__(
        self,
        book: ShardBook,
        journal: Journal,
        failed: Callable[[BaseException], None],
        observe: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._book = book
        self._journal = journal
        self._failed = failed
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: list[_Entry] = []
        self._failure: BaseException | None = None
        self._closing = False
        self._since_snapshot = 0
        self._since_nbytes = 0
        self._thread = BackgroundLoop("edl-master-commit", self._commit)

    async def submit(self, command: messages.Command) -> Any:
        """Apply a command; return the book's answer once the journal has the command.

        Raises:
            EDLError: The book refuses the command, which has changed nothing.
            ClosedError: The journal cannot be written, or this is closed. What became of the command is unknown.
        """
        self._check()
        before = self._book.version
        try:
            answer = self._book.apply(command)
        except EDLError:
            await self.settled()  # the reason may be a command that the journal does not have yet
            raise
        if self._book.version == before:  # a request that came again
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
        self._append(_Entry(self._loop.create_future(), snapshot=self._book.snapshot()))

    def end(self, why: BaseException) -> None:
        """Answer nothing from now on. What waits gets a ClosedError. Waits for nothing."""
        self._closing = True
        if self._failure is None:
            self._failure = why
        with self._lock:
            pending, self._pending = self._pending, []
        self._refuse(pending, why)
        self._thread.wake()

    def join(self) -> None:
        """Wait for the thread to end, after `end`. Not for the event loop's thread."""
        self._thread.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise ClosedError(f"this master ends: {self._failure}")

    def _append(self, entry: _Entry) -> None:
        with self._lock:
            first = not self._pending
            self._pending.append(entry)
        if first:
            self._thread.wake()

    # --- In the committing thread. ---

    def _commit(self) -> float | None:
        """Write what waits, in order, until nothing waits."""
        while not self._closing:
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

    # --- In the event loop. ---

    def _fail(self, exc: BaseException, group: list[_Entry]) -> None:
        self._refuse(group, exc)
        if not self._closing:
            self.end(exc)
            self._failed(exc)

    def _snapshot_if_due(self) -> None:
        """Take the snapshot that the journal asks for, unless one is on its way to it."""
        with self._lock:
            coming = any(entry.snapshot is not None for entry in self._pending)
        if not coming and self._failure is None and self._journal.snapshot_due:
            self.take_snapshot()

    @staticmethod
    def _refuse(entries: list[_Entry], why: BaseException) -> None:
        for entry in entries:
            if not entry.answered.done():
                entry.answered.set_exception(ClosedError(f"this master ends: {why}"))
                entry.answered.exception()  # a call that was cancelled never asks for it


def _release(group: list[_Entry]) -> None:
    for entry in group:
        if not entry.answered.done():
            entry.answered.set_result(None)


def load_book(journal: Journal) -> tuple[int, ShardBook, int]:
    """Begin a term, and put the state together from the journal. Takes as long as the journal is long.

    Returns:
        The term, the state, and how many commands were replayed.

    Raises:
        JournalError: The journal cannot be read or written.
        ProtocolError: It is damaged.
    """
    term = journal.begin_term()
    snapshot, records = journal.load()
    book = ShardBook.restore(snapshot) if snapshot is not None else ShardBook()
    for record in records:
        book.apply(messages.Command.FromString(record))
    book.pop_events()  # the master of that time has told them
    return term, book, len(records)


class Term:
    """Takes commands as long as the journal does. For the thread of the event loop that made it.

    Term `number` came from `journal`, which `close` closes; `book` is the state as the journal has it.
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
        self._journal = journal
        self.clock: Final = LeaseClock(clock)
        self.sequencer: Final = Sequencer(book, journal, self._fail, observe)

    async def begin(self, replayed: int) -> None:
        """Journal that this term has begun, and give every session its full time.

        After many `replayed` commands a snapshot replaces them.

        Raises:
            ClosedError: The journal cannot be written.
        """
        await self.submit(messages.Command(begin_term=messages.BeginTerm(term=self.number)))
        if replayed > _REPLAYED:
            self.sequencer.take_snapshot()
        for session in self.book.sessions():
            self._watch(session)

    async def submit(self, command: messages.Command) -> Any:
        """See `Sequencer.submit`."""
        command.time_ms = round(time.time() * 1000)
        return await self.sequencer.submit(command)

    async def open_session(self, request: messages.OpenSession) -> messages.NextReply:
        """Open a session, or go on with it; return the number of its last request, and its leases.

        Raises:
            EDLError: See `Sequencer.submit`.
        """
        reply: messages.NextReply = await self.submit(messages.Command(open_session=request))
        self._watch(request.session)
        return reply

    async def turn(self, turn: messages.Turn) -> messages.NextReply:
        """Take a session's reports, and give it shards. A turn with the number 0 is only a sign of life.

        Returns:
            The answer, which must not be changed.

        Raises:
            EDLError: See `Sequencer.submit`.
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
        """Stop answering, and close the journal."""
        self.sequencer.end(ClosedError(why))
        self.ended.set()

        def close() -> None:
            self.sequencer.join()
            self._journal.close()

        await asyncio.wrap_future(start_call("edl-master-close", close))

    def _watch(self, session: str) -> None:
        info = self.book.session(session)
        if info is not None:
            self.clock.watch(session, SessionLimits(info.lease_s, info.session_s))

    def _fail(self, exc: BaseException) -> None:
        self.failure = exc
        self.ended.set()
