"""The file: its format, its clock, and connections to it that survive what happens to the file.

Leases are measured with CLOCK_MONOTONIC, which all processes of a machine share and none can set. It starts again
with every boot, so the file remembers the boot it was used in, and leases of an earlier boot are over.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import sqlite3
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edl import mounts
from edl.discovery.common.resource import Resource
from edl.discovery.sqlite.identity import FileIdentity, discard, opening
from edl.discovery.sqlite.leases import expire, next_revision
from edl.errors import DiscoveryError, SettingsError
from edl.quoting import shown
from edl.settings import allows_shared_file

__all__ = ["SqliteFile"]

log = logging.getLogger("edl.discovery")

APPLICATION_ID = 0x45444C31  # "EDL1", in the file's header
FORMAT = 1
"""Of the tables below; a file with another one is refused rather than misread."""

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


_MOST_IDLE = 2
"""Connections that are kept open: one for the program's own thread, and one for those that renew."""

_MOST_OPENINGS = 10
"""A file is opened once more for each time that it is replaced meanwhile."""


@dataclass(eq=False)
class _Connection:
    """A connection, and which file it was made to. `number` tells it from others of this process."""

    sqlite: sqlite3.Connection
    identity: FileIdentity
    number: int


class SqliteFile(Resource):
    """A file, and connections to it: every transaction has its own, so that none waits for another's lock.

    A signal handler may close a registration in the middle of a transaction of its own thread. A lock around a single
    connection would never be let go there, and a thread that renews, and is to be joined, would wait for it as well.

    Args:
        path: made if it is not there, with its folder.
        timeout_s: how long to wait for other processes' transactions.
        lazy: connect at the first use, when everything that is wrong with the file is a DiscoveryError.

    Raises:
        SettingsError: the file cannot be made or written, or is not EDL's.
        DiscoveryError: it is busy, or damaged.
    """

    def __init__(self, path: str, timeout_s: float, lazy: bool = False) -> None:
        super().__init__()
        self.path = path
        self._timeout_s = timeout_s
        self._idle: deque[_Connection] = deque()
        self._open: dict[sqlite3.Connection, FileIdentity | None] = {}
        self._numbers = itertools.count()
        self._replaced = 0  # how many times
        if not lazy:
            with self._translated():
                self._give(self._connect())

    @contextlib.contextmanager
    def write(
        self, before: Callable[[sqlite3.Connection], None] = lambda connection: None
    ) -> Iterator[sqlite3.Connection]:
        """Run a transaction that writes; none else writes meanwhile. Expired leases are gone when it begins.

        Args:
            before: called in the transaction while expired leases are still there.
        """
        with self._transaction("BEGIN IMMEDIATE") as connection:
            before(connection)
            expire(connection)
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that reads a consistent state; expired leases may still be there.

        The state is that of the beginning. Ask for the time inside: by an earlier time, a lease that was renewed in
        between would end later than it can.
        """
        with self._transaction("BEGIN") as connection:
            connection.execute("SELECT revision FROM state").fetchone()  # SQLite puts the beginning off until a look
            yield connection

    def data_version(self) -> tuple[int, int, int]:
        """Return a number that is another after a write of another connection, or when the file was replaced.

        Costs no more than a look at shared memory.
        """
        self._check()
        with self._translated(), self._taken() as connection:
            version = connection.sqlite.execute("PRAGMA data_version").fetchone()[0]
            return self._replaced, connection.number, version

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        self._check()
        with self._translated(), self._taken() as taken:
            self._check()
            connection = taken.sqlite
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
            raise DiscoveryError(f"discovery file {self.path}: {shown(exc)}") from exc

    @contextlib.contextmanager
    def _taken(self) -> Iterator[_Connection]:
        connection = self._take()
        try:
            yield connection
        finally:
            self._give(connection)

    def _take(self) -> _Connection:
        """Return an idle connection; a new connection if there is none, or the file was removed or replaced."""
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                changed = connection.identity.change(self.path)
                if changed is None:
                    return connection
                self._replaced += 1
                try:
                    if changed:
                        self._discard(connection.identity, changed)
                finally:  # SQLite sees that the file was unlinked, and leaves its successor's journal alone
                    self._end(connection.sqlite)
        try:
            return self._connect()
        except SettingsError as exc:  # it was fine when this was opened, so it may be again
            raise DiscoveryError(str(exc)) from exc

    def _give(self, connection: _Connection) -> None:
        if len(self._idle) >= _MOST_IDLE:
            self._end(connection.sqlite)
            return
        self._idle.append(connection)
        if self._closed:  # maybe before it was there to be closed as well
            self._end_idle()

    def _end(self, connection: sqlite3.Connection) -> None:
        connection.close()
        self._open.pop(connection, None)

    def _end_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._end(self._idle.pop().sqlite)

    def _discard(self, identity: FileIdentity, why: str) -> None:
        """Remove a file that connections can no longer agree on; its users go over to its successor."""
        try:
            removed = discard(identity, self.path)
        except OSError as exc:
            raise DiscoveryError(
                f"discovery file {self.path}: {why}, and what is left cannot be removed: {exc.strerror}."
                " Remove the file, and it is made anew"
            ) from exc
        if removed:
            log.warning("discovery file %s: %s; it is made anew, and all register again", self.path, why)

    def _connect(self) -> _Connection:
        self._check_place()
        for _ in range(_MOST_OPENINGS):
            self._leave_broken()
            self._make_folder()
            with opening(self.path):
                before = FileIdentity.of(self.path).main
                connection = self._open_connection()
                try:
                    self._prepare(connection)
                    identity = FileIdentity.of(self.path)
                except BaseException as exc:
                    self._end(connection)
                    if isinstance(exc, (sqlite3.Error, SettingsError)) and FileIdentity.of(self.path).main != before:
                        continue  # it says nothing of the file that is there now
                    raise
                if identity.main == before is not None:
                    self._open[connection] = identity
                    return _Connection(connection, identity, next(self._numbers))
                self._end(connection)  # the file was replaced meanwhile: nobody can tell which one this has
        raise DiscoveryError(f"discovery file {self.path}: it is replaced each time it is opened")

    def _make_folder(self) -> None:
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SettingsError(f"discovery file {self.path}: its folder cannot be made: {exc.strerror}") from exc

    def _open_connection(self) -> sqlite3.Connection:
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
        _open_files.add(weakref.ref(self, _open_files.discard))
        self._open[connection] = None
        # Nonsense in one row must not make all others unreadable.
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        return connection

    def _leave_broken(self) -> None:
        """Make no connection beside an older connection of this process whose `-wal` or `-shm` is gone.

        SQLite lets all connections of a process to a file share their memory: a new one would read a new journal by
        the index of the old.
        """
        for file in _files():
            for identity in list(file._open.values()) if file.path == self.path else ():
                if identity is not None and (changed := identity.change(self.path)):
                    self._discard(identity, changed)

    def _check_place(self) -> None:
        path = os.path.realpath(self.path)
        kind = mounts.file_system(path, mounts.read_mounts())
        if not mounts.is_shared(kind):
            return
        what = (
            f"discovery file {self.path} lies on {kind}, which machines share. SQLite's locks and memory do not reach"
            " from one to another: each would end the leases of all others, and may damage the file"
        )
        if not allows_shared_file():
            raise SettingsError(
                f"{what}. For one machine name a local file, such as EDL_DISCOVERY=sqlite:///var/tmp/NAME/edl.sqlite;"
                " for several consul://host:8500 or etcd://host:2379. If only this machine uses it,"
                " EDL_SHARED_FILE=1 allows it"
            )
        if path not in _warned:
            _warned.add(path)
            log.warning("%s. EDL_SHARED_FILE allows it: see that no other machine opens it", what)

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
        """Readers and the writer must not block each other. Two processes that do this at once may collide."""
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
        """Make the tables, or start a new boot, unless another process has just done it."""
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
        self._end_idle()  # one that is in use ends when its transaction does


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # a system without it has `expire`'s second condition only


def _never_close(connection: Any) -> None:
    """Leak a connection, beyond the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


_warned: set[str] = set()  # of files that machines share, by path: each process opens one several times
_open_files: set[weakref.ref[SqliteFile]] = set()
"""Not a WeakSet: going through one fails when another thread adds to it meanwhile. Copying a set is one step."""


def _files() -> list[SqliteFile]:
    return [file for reference in tuple(_open_files) if (file := reference()) is not None]


def _leak_inherited() -> None:
    # SQLite forbids even closing a connection in a forked child: it would touch files that the parent works with.
    for file in _files():
        for connection in file._open:
            _never_close(connection)
    _open_files.clear()


os.register_at_fork(after_in_child=_leak_inherited)
