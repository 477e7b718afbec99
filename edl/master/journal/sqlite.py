"""A journal in a SQLite file: a group is a transaction, which is on the disk before `append` returns."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from typing_extensions import override

from edl import mounts
from edl.discovery.sqlite_file import FileIdentity, opening
from edl.errors import JournalError, LeaseLostError, ProtocolError, SettingsError
from edl.master.journal.journal import Journal
from edl.quoting import shown
from edl.settings import allows_shared_file

__all__ = ["SqliteJournal"]

logger = logging.getLogger(__name__)

_APPLICATION_ID: Final = 0x45444C4A  # "EDLJ", in the file's header
_FORMAT: Final = 1
"""Format of the tables below; a file of another format is refused rather than misread."""
_WAL_NBYTES: Final = 64 << 20
"""Largest write-ahead log that is kept after a snapshot; SQLite would keep its largest size for ever."""
_MOST_OPENINGS: Final = 10
"""How often to open a file that is replaced while it is opened."""
_SCHEMA: Final = """
CREATE TABLE state (term INTEGER NOT NULL, covered INTEGER NOT NULL, snapshot BLOB, checksum INTEGER);
CREATE TABLE record (number INTEGER PRIMARY KEY, data BLOB NOT NULL, checksum INTEGER NOT NULL);
INSERT INTO state VALUES (0, 0, NULL, NULL)
"""


class SqliteJournal(Journal):
    """A file in WAL mode with `synchronous=FULL`: every commit is written through to the disk.

    Locks are held during a transaction only, so another process can begin a term at any time, which fences this one.
    See `open_journal`.

    Raises:
        SettingsError: The file cannot be created or written, is something else, or lies where machines share it.
        JournalError: It is busy, or the disk is full.
    """

    def __init__(self, path: str, *, timeout_s: float) -> None:
        super().__init__(path, timeout_s)
        self._term = 0
        self._last = 0  # number of the last record
        _check_place(path)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SettingsError(f"journal {path}: its folder cannot be made: {exc.strerror}") from exc
        self._connection, self._identity = self._open()
        _open_connections.add(self._connection)

    @override
    def begin_term(self) -> int:
        with self._transaction("begin a term") as connection:
            connection.execute("UPDATE state SET term = term + 1")
            term, covered = connection.execute("SELECT term, covered FROM state").fetchone()
            last = connection.execute("SELECT max(number) FROM record").fetchone()[0]
            self._term = term
            self._last = max(covered, last or 0)
        return int(term)

    @override
    def load(self) -> tuple[bytes | None, list[bytes]]:
        with self._transaction("read") as connection:
            covered, snapshot, checksum = connection.execute("SELECT covered, snapshot, checksum FROM state").fetchone()
            rows = connection.execute("SELECT number, data, checksum FROM record ORDER BY number").fetchall()
        if snapshot is not None:
            self._check_data("its snapshot", snapshot, checksum)
        for expected, (number, data, checksum) in enumerate(rows, covered + 1):
            if number != expected:
                raise ProtocolError(f"journal {self.name}: record {expected} is missing")
            self._check_data(f"record {number}", data, checksum)
        return snapshot, [data for _, data, _ in rows]

    @override
    def append(self, records: Sequence[bytes]) -> None:
        if not records:
            return
        with self._transaction("append") as connection:
            self._check_term(connection)
            rows = [(number, record, zlib.crc32(record)) for number, record in enumerate(records, self._last + 1)]
            connection.executemany("INSERT INTO record VALUES (?, ?, ?)", rows)
            self._last += len(rows)

    @override
    def snapshot(self, state: bytes) -> None:
        with self._transaction("write a snapshot") as connection:
            self._check_term(connection)
            row = (self._last, state, zlib.crc32(state))
            connection.execute("UPDATE state SET covered = ?, snapshot = ?, checksum = ?", row)
            connection.execute("DELETE FROM record")

    @contextlib.contextmanager
    def _transaction(self, what: str) -> Iterator[sqlite3.Connection]:
        """Run a transaction that writes; after an error nothing follows it."""
        connection = self._connection
        try:
            with self._turn(what):
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    yield connection
                    connection.execute("COMMIT")
                except BaseException as exc:
                    with contextlib.suppress(sqlite3.Error):
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                    if isinstance(exc, sqlite3.Error):
                        raise JournalError(str(exc), busy=_is_busy(exc)) from exc
                    raise
                if (change := self._identity.change(self.name)) is not None:
                    raise JournalError(change or "the file was removed or replaced while in use")
        finally:
            if self._closed and self._pid == os.getpid():
                self._end()

    def _check_term(self, connection: sqlite3.Connection) -> None:
        term = connection.execute("SELECT term FROM state").fetchone()[0]
        if not self._term or term != self._term:
            raise LeaseLostError(
                f"journal {self.name}: "
                + (f"term {term} has begun, this one is {self._term}" if self._term else "no term was begun")
            )

    def _check_data(self, what: str, data: Any, checksum: Any) -> None:
        if not isinstance(data, bytes) or zlib.crc32(data) != checksum:
            raise ProtocolError(f"journal {self.name}: {what} is damaged: its checksum does not match")

    def _open(self) -> tuple[sqlite3.Connection, FileIdentity]:
        """Return a connection, and which file it was made to."""
        try:
            for _ in range(_MOST_OPENINGS):
                with opening(self.name):
                    before = FileIdentity.of(self.name).main
                    connection = sqlite3.connect(
                        f"file:{quote(self.name)}?mode=rwc",
                        uri=True,
                        timeout=self._timeout_s,
                        isolation_level=None,
                        check_same_thread=False,
                    )
                    try:
                        self._prepare(connection)
                        identity = FileIdentity.of(self.name)
                    except (sqlite3.Error, SettingsError):
                        connection.close()
                        if FileIdentity.of(self.name).main != before:
                            continue  # it says nothing of the file that is there now
                        raise
                    if identity.main == before is not None:
                        return connection, identity
                    connection.close()  # the file was replaced, and which one this has is not known
        except sqlite3.Error as exc:
            words = f"journal {self.name}: {shown(exc)}"
            # These do not pass: another kind of file, no permission, a read-only disk.
            if any(cause in str(exc) for cause in ("not a database", "readonly", "unable to open")):
                raise SettingsError(words) from exc
            raise JournalError(words, busy=_is_busy(exc)) from exc
        raise JournalError(f"journal {self.name}: another program keeps replacing it while it is opened")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:  # two processes that do this at once may collide, in spite of the timeout
            try:
                mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as exc:
                if "locked" not in str(exc) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise SettingsError(f"journal {self.name}: its file system cannot share memory (journal mode {mode})")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_NBYTES}")
        connection.execute("BEGIN IMMEDIATE")
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_FORMAT}")
        elif (application_id, version) != (_APPLICATION_ID, _FORMAT):
            kind = f"a journal of format {version}" if application_id == _APPLICATION_ID else "another database"
            raise SettingsError(f"journal {self.name}: {kind}, not EDL's journal of format {_FORMAT}")
        connection.execute("COMMIT")

    def _release(self) -> None:
        if self._turns.acquire(blocking=False):  # a call under way, maybe of the thread that this interrupts, ends it
            try:
                self._end()
            finally:
                self._turns.release()

    def _end(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()
        _open_connections.discard(self._connection)


def _is_busy(exc: sqlite3.Error) -> bool:
    return isinstance(exc, sqlite3.OperationalError) and "locked" in str(exc)


def _check_place(path: str) -> None:
    kind = mounts.file_system(os.path.realpath(path), mounts.read_mounts())
    if not mounts.is_shared(kind):
        return
    what = f"journal {path} lies on {kind}, which machines share: SQLite's locks do not reach from one to another"
    if not allows_shared_file():
        raise SettingsError(
            f"{what}. Name a file on a local disk, or keep the journal in the store (store:JOB). If only this machine"
            " uses it, EDL_SHARED_FILE=1 allows it"
        )
    logger.warning("%s. EDL_SHARED_FILE allows it: see that no other machine opens it", what)


_open_connections: set[sqlite3.Connection] = set()


def _leak_inherited() -> None:
    # SQLite forbids even closing a connection in a forked child: it would touch files that the parent works with.
    for connection in _open_connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


os.register_at_fork(after_in_child=_leak_inherited)
