"""A term of a leading master: the state, its journal, and the clocks of its sessions."""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from edl.background import start_call
from edl.errors import ClosedError, LeaseLostError
from edl.master.journal import Journal
from edl.master.server.lease_clock import LeaseClock, SessionLimits
from edl.master.server.sequencer import Sequencer
from edl.master.shards import ShardBook
from edl.protocol import master as messages

__all__ = ["Term", "load_book"]

logger = logging.getLogger(__name__)

_EVENTS: Final = 50
"""Events that are shown; older ones are in the log."""


def load_book(journal: Journal) -> tuple[int, ShardBook, int]:
    """Begin a term, and put the state together from the journal. Takes as long as the journal is long.

    Returns:
        The term, the state, and how many commands were replayed.

    Raises:
        JournalError: the journal cannot be read or written.
        ProtocolError: it is damaged.
    """
    term = journal.begin_term()
    snapshot, records = journal.load()
    book = ShardBook.restore(snapshot) if snapshot is not None else ShardBook()
    for record in records:
        book.apply(messages.Command.FromString(record))
    book.pop_events()  # they were told by the master of that time
    return term, book, len(records)


class Term:
    """Takes commands, as long as the journal does. For the thread of the event loop that made it.

    Args:
        number: of the term, which the journal gave.
        book: the state as the journal has it.
        journal: closed by `close`.
        observe: called with the seconds of each commit.
        clock: Returns seconds, and never goes back.
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
        self._clock = LeaseClock(clock)
        self.sequencer: Final = Sequencer(book, journal, self._fail, observe)

    async def begin(self, replayed: int) -> None:
        """Journal that this term has begun, and give every session its full time.

        Args:
            replayed: commands that loading the state took: after many the journal begins anew with a snapshot.

        Raises:
            ClosedError: the journal cannot be written.
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
        """Open a session, or go on with it.

        Returns:
            The number of its last request, and its leases.

        Raises:
            EDLError: as for `Sequencer.submit`.
        """
        reply: messages.NextReply = await self.submit(messages.Command(open_session=request))
        self._watch(request.session)
        return reply

    async def turn(self, turn: messages.Turn) -> messages.NextReply:
        """Take a session's reports, and give it shards. With the number 0 a turn is a sign of life and nothing else.

        Returns:
            The answer. It must not be changed.

        Raises:
            EDLError: as for `Sequencer.submit`.
        """
        self._clock.hear(turn.session)
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
            if not self._clock.is_watched(session):
                self._watch(session)
        silent, over = self._clock.due()
        for session in over:
            self._clock.forget(session)
        leases = [lease for session in silent if (info := self.book.session(session)) for lease in info.leases]
        if leases or over:
            await self.submit(messages.Command(expire=messages.Expire(leases=leases, sessions=over)))
        for event in self.book.pop_events():
            self.add_event(event.kind, f"{event.dataset}: {event.text}", event.cause)

    def add_event(self, kind: str, text: str, cause: str) -> None:
        """Log an event, and keep it for the report.

        Args:
            kind: a word; those of `BookEvent`, and `takeover`.
            text: what happened.
            cause: why.
        """
        logger.info("%s: %s: %s", kind, text, cause)
        self.events.append({"time": round(time.time(), 3), "kind": kind, "text": text, "cause": cause})

    def hear(self, session: str) -> None:
        """Note a sign of life of a session."""
        self._clock.hear(session)

    def silence_s(self, session: str) -> float:
        """Return for how long a session was silent."""
        return self._clock.silence_s(session)

    async def close(self, why: str) -> None:
        """Answer nothing any more, and close the journal."""
        self.sequencer.end(ClosedError(why))
        self.ended.set()

        def close() -> None:
            self.sequencer.join()
            self._journal.close()

        await asyncio.wrap_future(start_call("edl-master-close", close))

    def _watch(self, session: str) -> None:
        info = self.book.session(session)
        if info is not None:
            self._clock.watch(session, SessionLimits(info.lease_s, info.session_s))

    def _fail(self, exc: BaseException) -> None:
        self.failure = exc
        self.ended.set()


_REPLAYED: Final = 10_000
"""Commands, about half a second of replay, which the next start should not take again."""
