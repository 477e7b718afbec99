"""A journal in a SQLite file: a group is a transaction, which is on the disk before `append` returns."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from typing_extensions import override

from edl.errors import JournalError, LeaseLostError, ProtocolError
from edl.master.journal.journal import Journal
from edl.sqlite_file import SqliteFile, Tables

__all__ = ["SqliteJournal"]

_WAL_NBYTES: Final = 64 << 20
"""Largest write-ahead log that is kept after a snapshot; SQLite would keep its largest size for ever."""
_TABLES: Final = Tables(
    kind="journal",
    application_id=0x45444C4A,  # "EDLJ"
    version=1,
    schema="""
        CREATE TABLE state (term INTEGER NOT NULL, covered INTEGER NOT NULL, snapshot BLOB, checksum INTEGER);
        CREATE TABLE record (number INTEGER PRIMARY KEY, data BLOB NOT NULL, checksum INTEGER NOT NULL);
        INSERT INTO state VALUES (0, 0, NULL, NULL)
    """,
    error=JournalError,
    remedy="name another file, or move this one away to start over",
    elsewhere="Name a file on a local disk, or keep the journal in the store (store:JOB)",
    pragmas=("synchronous = FULL", f"journal_size_limit = {_WAL_NBYTES}"),
)


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
        self._file = SqliteFile(path, _TABLES, timeout_s)

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
        try:
            with self._turn(what), self._file.transaction() as connection:
                yield connection
        finally:
            if self._closed and self._pid == os.getpid():
                self._file.close()

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

    def _release(self) -> None:
        if self._turns.acquire(blocking=False):  # a call under way, maybe of the thread that this interrupts, ends it
            try:
                self._file.close()
            finally:
                self._turns.release()
