"""The file: its format, its clock, and connections to it that survive whatever happens to the file.

Leases are measured with CLOCK_MONOTONIC, which all processes of one machine share and nobody can set. It starts again
with every boot, so the file remembers the boot it was used in, and leases of an earlier one are over.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edl.discovery.owned import Owned
from edl.discovery.sqlite.leases import expire, next_revision
from edl.errors import DiscoveryError, SettingsError

__all__ = ["SqliteFile"]

APPLICATION_ID = 0x45444C31  # "EDL1", in the file's header
FORMAT = 1

# `revision` counts changes of entries and instances, not renewals: a watcher that finds it unchanged reads no further.
# Leases have random ids: in a file that replaced another, an old id must not be somebody else's.
_SCHEMA = """
CREATE TABLE state (boot TEXT NOT NULL, revision INTEGER NOT NULL);
CREATE TABLE lease (id INTEGER PRIMARY KEY, ttl_s REAL NOT NULL, expires REAL NOT NULL);
CREATE TABLE entry (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL,
    lease INTEGER REFERENCES lease (id) ON DELETE CASCADE
);
CREATE INDEX entry_lease ON entry (lease);
CREATE TABLE instance (
    lease INTEGER PRIMARY KEY REFERENCES lease (id) ON DELETE CASCADE,
    service TEXT NOT NULL, id TEXT NOT NULL, registered INTEGER NOT NULL, record TEXT NOT NULL
);
CREATE INDEX instance_service ON instance (service);
"""


class SqliteFile(Owned):
    """One connection to the file, for one thread at a time.

    Args:
        path: made if it is not there, with its folder.
        timeout_s: how long to wait for other processes' transactions.
        lazy: connect at the first use, when everything that is wrong with the file is a DiscoveryError.

    Raises:
        SettingsError: the file cannot be made or written, or is not one of EDL's.
        DiscoveryError: it is busy, or damaged.
    """

    def __init__(self, path: str, timeout_s: float, lazy: bool = False) -> None:
        super().__init__()
        self.path = path
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        self._connected = 0  # how many times
        if not lazy:
            with self._turn, self._translated():
                self._connect()

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes; nobody else writes at the same time. Expired leases are gone when it begins."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            expire(connection)
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A transaction that reads one consistent state; expired leases may still be there.

        The state is that of the beginning. Ask for the time inside: by an earlier time, a lease that was renewed in
        between would end later than it can.
        """
        with self._transaction("BEGIN") as connection:
            connection.execute("SELECT revision FROM state").fetchone()  # SQLite puts the beginning off until a look
            yield connection

    def data_version(self) -> tuple[int, int]:
        """Changes whenever another connection has written; the first number also when the file was replaced.

        Costs no more than a look at shared memory.
        """
        self._check()
        with self._turn, self._translated():
            connection = self._current()
            return self._connected, connection.execute("PRAGMA data_version").fetchone()[0]

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        self._check()
        with self._turn, self._translated():
            self._check()
            connection = self._current()
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise DiscoveryError(f"discovery file {self.path}: {exc}") from exc

    def _current(self) -> sqlite3.Connection:
        """The connection, made anew if somebody removed or replaced the file."""
        if self._connection is not None and _inode(self.path) == self._inode:
            return self._connection
        if self._connection is not None:
            # SQLite sees that the file was unlinked, and leaves its successor's journal alone.
            self._connection.close()
            self._connection = None
        try:
            return self._connect()
        except SettingsError as exc:  # it was fine when this was opened, so it may be again
            raise DiscoveryError(str(exc)) from exc

    def _connect(self) -> sqlite3.Connection:
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SettingsError(f"discovery file {self.path}: its folder cannot be made: {exc.strerror}") from exc
        try:
            connection = sqlite3.connect(
                f"file:{quote(self.path)}?mode=rwc",
                uri=True,
                timeout=self._timeout_s,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as exc:
            raise SettingsError(f"discovery file {self.path}: {exc}") from exc
        # Nonsense in one row must not make all others unreadable.
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._inode = _inode(self.path)
        self._connection = connection
        self._connected += 1
        _open_files.add(self)
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        try:
            self._use_wal(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("BEGIN")  # one consistent look: another process may be making the tables
            ready = self._is_ready(connection)
            connection.execute("COMMIT")
            if not ready:
                connection.execute("BEGIN IMMEDIATE")
                self._initialize(connection)
                connection.execute("COMMIT")
        except sqlite3.DatabaseError as exc:
            # These are not going to pass: not a database, no permission, a read-only disk.
            if any(words in str(exc) for words in ("not a database", "readonly", "unable to open")):
                raise SettingsError(f"discovery file {self.path}: {exc}") from exc
            raise

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        """Readers and the writer must not block one another. Two processes that do this at once may collide."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as exc:
                if "locked" not in str(exc) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise SettingsError(
                f"discovery file {self.path}: its file system cannot share memory (journal mode {mode})"
            )

    def _is_ready(self, connection: sqlite3.Connection) -> bool:
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (application_id, version) == (APPLICATION_ID, FORMAT):
            return bool(connection.execute("SELECT boot = ? FROM state", (_boot_id(),)).fetchone()[0])
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            kind = f"EDL's format {version}" if application_id == APPLICATION_ID else "another program's database"
            raise SettingsError(f"discovery file {self.path}: {kind}, not EDL's format {FORMAT}")
        return False

    def _initialize(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or start a new boot, unless somebody else has just done it."""
        if self._is_ready(connection):
            return
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO state VALUES (?, 0)", (_boot_id(),))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        else:
            connection.execute("DELETE FROM lease")
            next_revision(connection)
            connection.execute("UPDATE state SET boot = ?", (_boot_id(),))

    def _release(self) -> None:
        with self._turn:
            _open_files.discard(self)
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # a system without it has `expire`'s second condition only


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _never_close(connection: Any) -> None:
    """Leak a connection, beyond the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


_open_files: weakref.WeakSet[SqliteFile] = weakref.WeakSet()


def _leak_inherited() -> None:
    # SQLite forbids even closing a connection in a forked child: it would touch files that the parent works with.
    for file in _open_files:
        if file._connection is not None:
            _never_close(file._connection)
    _open_files.clear()


os.register_at_fork(after_in_child=_leak_inherited)
