"""Puts commands in an order, applies them, and answers what the journal has: many commands share a commit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from edl.background import BackgroundLoop
from edl.errors import ClosedError, EDLError
from edl.master.journal import Journal
from edl.protocol import master as messages

__all__ = ["CommandBook", "Sequencer"]

_IDLE_S: Final = 3600.0
"""How long the committing thread waits unless it is woken: it always is."""
_GROUP: Final = 512
"""Commands of a commit at most: with more, the first of them would wait for long."""
_SNAPSHOT_COMMANDS: Final = 100_000  # whichever comes first
_SNAPSHOT_NBYTES: Final = 32 << 20
"""After so many commands, or bytes of them, the journal begins anew with a snapshot: seconds of work to replay."""


class CommandBook(Protocol):
    """What the sequencer needs of the state: `edl.master.shards.ShardBook`."""

    @property
    def version(self) -> int:
        """Counts the commands that have changed anything."""

    def apply(self, command: messages.Command) -> Any:
        """Change the state, and return the answer; an EDLError changes nothing."""

    def snapshot(self) -> bytes:
        """Return the state."""


class _Entry:
    """What the committing thread has to do, and who waits for it."""

    __slots__ = ("answered", "record", "snapshot")

    def __init__(
        self, answered: asyncio.Future[None], record: bytes | None = None, snapshot: bytes | None = None
    ) -> None:
        self.answered = answered
        self.record = record
        self.snapshot = snapshot


class Sequencer:
    """Applies commands at once, and answers them when the journal has them.

    All methods are for the thread of the event loop that made it. A thread of its own commits: what comes while a
    commit is under way is the next group.

    Args:
        book: is changed by nothing else.
        journal: whose term has begun; not closed here.
        failed: called in the event loop, once, when the journal cannot be written: nothing is answered from then on.
        observe: called in the committing thread with the seconds of each commit.
    """

    def __init__(
        self,
        book: CommandBook,
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
        """Apply a command.

        Returns:
            The book's answer, once the journal has the command.

        Raises:
            EDLError: the book refuses the command, which has changed nothing.
            ClosedError: the journal cannot be written, or this is closed: what became of the command is unknown.
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
        """Wait until the journal has all that was applied until now.

        Raises:
            ClosedError: as for `submit`.
        """
        self._check()
        entry = _Entry(self._loop.create_future())
        self._append(entry)
        await entry.answered

    def take_snapshot(self) -> None:
        """Have the journal begin anew with the state as it is now."""
        self._since_snapshot = 0
        self._since_nbytes = 0
        self._append(_Entry(self._loop.create_future(), snapshot=self._book.snapshot()))

    def end(self, why: BaseException) -> None:
        """Answer nothing from now on, and let the thread end. What waits gets a ClosedError. Waits for nothing."""
        self._closing = True
        if self._failure is None:
            self._failure = why
        with self._lock:
            pending, self._pending = self._pending, []
        self._refuse(pending, why)
        self._thread.wake()

    def join(self) -> None:
        """Wait for the thread to end, after `end`. For another thread than the event loop's."""
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
                entry.answered.exception()  # a call that was cancelled asks for it no more


def _release(group: list[_Entry]) -> None:
    for entry in group:
        if not entry.answered.done():
            entry.answered.set_result(None)
