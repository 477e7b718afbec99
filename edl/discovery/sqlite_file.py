"""SQLite files that processes share: the format of a store's file, and connections that survive what happens to a file.

SQLite keeps three files open: the database, its journal (`-wal`) and the memory that connections share (`-shm`). It
never looks whether they are still there. A process whose `-wal` was removed writes where no other process reads, and
later processes see an empty store. So every use of a connection first compares the files at the path with those that
the connection was made to (`FileIdentity`), and connections are opened under a lock of the folder (`opening`).

The file must lie on a local file system: SQLite's locks and shared memory do not work across machines. Containers of a
machine may share it through a common folder. Any process that may write the file may register anything. A process that
is stopped (SIGSTOP) in the microseconds in which it writes keeps the others from writing until it goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from typing import Any, Final
from urllib.parse import quote

from edl import mounts
from edl.discovery.resource import Resource
from edl.errors import DiscoveryError, SettingsError
from edl.quoting import shown
from edl.settings import allows_shared_file

__all__ = ["FileIdentity", "SqliteFile", "discard", "expire", "next_revision", "opening"]

log = logging.getLogger("edl.discovery")

APPLICATION_ID: Final = 0x45444C31  # "EDL1", in the file's header
FORMAT: Final = 2
"""The version of the tables below; files of other versions are refused."""

# `revision` counts changes of entries, not renewals: a watcher that finds it unchanged reads no further.
_SCHEMA: Final = """
CREATE TABLE state (boot TEXT NOT NULL, revision INTEGER NOT NULL);
CREATE TABLE lease (id INTEGER PRIMARY KEY, ttl_s REAL NOT NULL, expires REAL NOT NULL);
CREATE TABLE entry (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL,
    lease INTEGER REFERENCES lease (id) ON DELETE CASCADE
);
CREATE INDEX entry_lease ON entry (lease);
"""

_MOST_IDLE: Final = 2
"""Connections that are kept open: one for the program's own thread, and one for those that renew."""
_MOST_OPENINGS: Final = 10
"""How often to open a file that is replaced each time."""
_SIDES: Final = ("-wal", "-shm")
_LOCK_WAIT_S: Final = 1.0
"""How long to wait for a process that opens or removes a file: a millisecond, unless that process stands still."""

_Inode = tuple[int, int]


def next_revision(connection: sqlite3.Connection) -> int:
    """Tell watchers that something has changed, and return the new revision."""
    connection.execute("UPDATE state SET revision = revision + 1")
    return int(connection.execute("SELECT revision FROM state").fetchone()[0])


def expire(connection: sqlite3.Connection) -> None:
    """Delete leases that are over, with their entries."""
    over = "expires <= :now OR expires > :now + ttl_s"
    if connection.execute(f"DELETE FROM lease WHERE {over}", {"now": time.monotonic()}).rowcount:
        next_revision(connection)


@dataclass(frozen=True)
class FileIdentity:
    """The files at a path at one moment.

    Attributes:
        place: Where they lie: SQLite follows links before it adds `-wal` and `-shm`.
        main: The database; None if it was not there.
        sides: `-wal` and `-shm`, which are there as long as a connection is open.
    """

    place: str
    main: _Inode | None
    sides: tuple[_Inode | None, ...]

    @classmethod
    def of(cls, path: str) -> FileIdentity:
        """Return the files that are there now; ask after the connection has read, when SQLite has made all three."""
        place = os.path.realpath(path)
        return cls(place, _inode(place)[0], tuple(_inode(place + side)[0] for side in _SIDES))

    def change(self, path: str) -> str | None:
        """Return why a connection can no longer be used; None if nothing has changed.

        Empty if another file took the place of its own; words if the file that is there must not be used any longer.
        """
        sides = [_inode(self.place + side)[0] for side in _SIDES]
        main, size = _inode(path)  # looked at last: a file that has just taken the place has other sides
        if main != self.main or main is None:
            return ""
        if size == 0:
            return "it was truncated while in use"
        for side, inode, seen in zip(_SIDES, self.sides, sides, strict=True):
            if inode is None or seen != inode:
                return f"its {side} was removed or replaced while in use"
        return None


def discard(identity: FileIdentity, path: str) -> bool:
    """Remove the files unless another process has; every process sees that the database was replaced, and leaves it.

    The database goes first: at worst, the process that makes the next one finds a journal and memory without an owner.

    Raises:
        OSError: They cannot be removed.
    """
    with _folder_lock(identity.place) as locked:  # a second process must not remove the new file
        if not locked or not identity.change(path):
            return False
        for side in ("", *_SIDES):
            Path(identity.place + side).unlink(missing_ok=True)
        return True


@contextlib.contextmanager
def opening(path: str) -> Iterator[None]:
    """Keep other processes from making or removing a file while it is opened; make it if it does not exist.

    SQLite finds the journal and memory by their names, some time after it has opened the database. They may belong to a
    database that took its place, or was there before it: what SQLite writes there is lost to their owners, and where it
    starts the memory again, processes that read it are killed (SIGBUS).

    If the file cannot be made, SQLite is left to say why.
    """
    place = os.path.realpath(path)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            if held.enter_context(_folder_lock(place)) and _inode(place)[0] is None:
                for side in _SIDES:
                    Path(place + side).unlink(missing_ok=True)
                os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        yield


@contextlib.contextmanager
def _folder_lock(place: str) -> Iterator[bool]:
    """Lock the folder of a file against others that open or remove files; yield False if one takes too long."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    folder = os.open(Path(place).parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.001)
        try:
            yield True
        finally:
            fcntl.flock(folder, fcntl.LOCK_UN)  # a child that was forked meanwhile has the folder open as well
    finally:
        os.close(folder)


def _inode(path: str) -> tuple[_Inode | None, int]:
    """Return device and inode of a file, and its size; None without a file."""
    try:
        status = Path(path).stat()
    except OSError:
        return None, 0
    return (status.st_dev, status.st_ino), status.st_size


@dataclass(eq=False)
class _Connection:
    """A connection, and which file it was made to. `number` tells it from others of this process."""

    sqlite: sqlite3.Connection
    identity: FileIdentity
    number: int


class SqliteFile(Resource):
    """A file, and connections to it: every transaction has its own, so that none waits for another's lock.

    A signal handler may close a registration in the middle of a transaction of its own thread. A lock around a single
    connection would never be released there, and the thread that renews, which `close` joins, would wait for it too.

    Args:
        path: Where it lies. Created if missing, with its folder.
        timeout_s: Seconds to wait for other processes' transactions.
        lazy: Whether to connect at the first use, when everything that is wrong with the file is a DiscoveryError.

    Raises:
        SettingsError: The file cannot be made or written, or is not EDL's.
        DiscoveryError: It is busy, or damaged.
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
        self, before: Callable[[sqlite3.Connection], object] = lambda connection: None
    ) -> Iterator[sqlite3.Connection]:
        """Run a transaction that writes. Expired leases are deleted first, after `before` was called."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            before(connection)
            expire(connection)
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that reads the state at its beginning; expired leases may still be there.

        Look at the clock inside: compared with an earlier time, a lease renewed in between would end later than it can.
        """
        with self._transaction("BEGIN") as connection:
            connection.execute("SELECT revision FROM state").fetchone()  # SQLite begins at the first read
            yield connection

    def data_version(self) -> tuple[int, int, int]:
        """Return a number that changes with a write of another connection, or when the file is replaced; cheap."""
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
        if self._closed:  # perhaps `_release` ran before it was back
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
                " Remove the file, and it is created again"
            ) from exc
        if removed:
            log.warning("discovery file %s: %s; it is created again, and all register again", self.path, why)

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
                        continue  # the error is about a file that has been replaced
                    raise
                if identity.main == before is not None:
                    self._open[connection] = identity
                    return _Connection(connection, identity, next(self._numbers))
                self._end(connection)  # the file was replaced: which one this connection has is unknown
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
        """Discard the file if an older connection of this process has lost its `-wal` or `-shm`.

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
            # These do not pass by themselves: not a database, no permission, a read-only disk.
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
            return self._is_this_boot(connection)
        if application_id == APPLICATION_ID:
            raise SettingsError(
                f"discovery file {self.path}: EDL's format {version}, not {FORMAT}: another release made it. Stop that"
                " release's processes and remove the file (teachers and jobs register again), or name another file"
            )
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise SettingsError(f"discovery file {self.path}: another program's database, not EDL's")
        return False

    @staticmethod
    def _is_this_boot(connection: sqlite3.Connection) -> bool:
        return bool(connection.execute("SELECT boot = ? FROM state", (_boot_id(),)).fetchone()[0])

    def _initialize(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or start a new boot, unless another process has just done it."""
        if self._is_ready(connection):
            return
        if connection.execute("PRAGMA user_version").fetchone()[0] == FORMAT:
            connection.execute("DELETE FROM lease")
            next_revision(connection)
            connection.execute("UPDATE state SET boot = ?", (_boot_id(),))
            return
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute("INSERT INTO state VALUES (?, 0)", (_boot_id(),))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")

    def _release(self) -> None:
        self._end_idle()  # one that is in use ends when its transaction does


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # a system without it has `expire`'s second condition only


def _never_close(connection: Any) -> None:
    """Keep a connection from ever being closed, even at the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


_warned: set[str] = set()  # of files that machines share, by path: each process opens one several times
_open_files: set[weakref.ref[SqliteFile]] = set()
"""Not a WeakSet, which cannot be iterated while another thread adds to it. Copying a set is one step."""


def _files() -> list[SqliteFile]:
    return [file for reference in tuple(_open_files) if (file := reference()) is not None]


def _leak_inherited() -> None:
    # SQLite forbids even closing a connection in a forked child: it would touch files that the parent works with.
    for file in _files():
        for connection in file._open:
            _never_close(connection)
    _open_files.clear()


os.register_at_fork(after_in_child=_leak_inherited)
