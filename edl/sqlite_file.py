"""A SQLite file that processes on one machine share: safe opening, transactions, and errors that say what to do.

SQLite keeps three files open: the database, its journal (`-wal`) and the memory that connections share (`-shm`). SQLite
never checks that these files still exist. A process whose `-wal` was removed writes to a file that no other process
reads, and later processes see an empty database. So a connection remembers the files that it opened, compares them with
those at the path (`SqliteFile.change`), and is opened while the folder is locked (`_opening`).

The file must be on a local file system: SQLite's locks and shared memory do not work across machines. Containers on a
machine may share the file through a common folder. If a process is stopped (SIGSTOP) in the microseconds of a write, it
blocks other writers until it continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from edl import mounts
from edl.errors import EDLError, SettingsError
from edl.quoting import shown
from edl.settings import allows_shared_file

logger = logging.getLogger(__name__)

_MOST_OPENINGS: Final = 10
"""Number of attempts to open a file that is replaced during each attempt."""
_SIDES: Final = ("-wal", "-shm")
_LOCK_WAIT_S: Final = 1.0
"""How long to wait for a process that is opening or removing a file, which takes a millisecond unless the process is
stopped."""

_Inode = tuple[int, int]


@dataclass(frozen=True)
class Tables:
    """Describes a kind of file: its tables, and parts of its error messages."""

    kind: str  # its name in messages, before the path
    application_id: int  # in the file's header; a file with another id or version is refused
    version: int
    schema: str  # statements that create the tables, separated by semicolons
    error: Callable[[str, bool], EDLError]
    """Builds the error for a temporary failure, from the message and whether another process holds the lock."""
    remedy: str  # what to do about a file that is damaged, or of another program or release
    elsewhere: str  # what to use if the folder is on a shared file system
    pragmas: tuple[str, ...]  # for every connection
    new_pragmas: tuple[str, ...] = ()  # for a new file, before its tables are created


class SqliteFile:
    """A connection to a file, in WAL mode: readers and the writer do not block each other.

    A forked child never closes the connection, not even at exit. By default, the file and its folder are created if
    missing. With another `mode` of SQLite's URIs, nothing is created or compared. `timeout_s` is how long to wait for
    the transactions of other processes.

    Raises:
        SettingsError: The file cannot be created or written, is not EDL's, or is on a shared file system.
        EDLError: The error from `tables.error`, if the file is busy or the disk is full.
    """

    sqlite: sqlite3.Connection

    def __init__(self, path: str, tables: Tables, timeout_s: float, mode: str = "rwc") -> None:
        self.path = path
        self._tables = tables
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._identity: _Identity | None = None
        self._ready = False
        if mode in ("rwc", "rw"):  # other modes have no file, or only read it
            self._check_place()
        with self.translated():
            if mode == "rwc":
                self._open()
            else:
                self._connect(mode)
                try:
                    if not self._has_tables() and mode == "memory":
                        self._make_tables()
                except BaseException:
                    self.close()
                    raise
        self._ready = True

    @property
    def writable(self) -> bool:
        """Whether the file was opened for writing."""
        return self._identity is not None

    @classmethod
    def opened(cls, path: str) -> list[SqliteFile]:
        """Return this process's open connections to the file at `path`."""
        # Copying a set is one step; a WeakSet cannot be iterated while another thread adds to it.
        files = [file for reference in tuple(_open_files) if (file := reference()) is not None]
        return [file for file in files if file.path == path]

    @contextlib.contextmanager
    def transaction(self, *, reads: bool = False) -> Iterator[sqlite3.Connection]:
        """Run a transaction; raise the error from `Tables.error` if it fails, or if the file was removed or replaced.

        A transaction that writes locks the file from the start. A transaction that only `reads` never waits for
        writers.
        """
        connection = self.sqlite
        with self.translated():
            try:
                connection.execute("BEGIN" if reads else "BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                raise
        if not reads and (change := self.change()) is not None:
            why = f"{change}. To go on, {self._tables.remedy}" if change else "it was removed or replaced while in use"
            raise self._tables.error(f"{self}: {why}", False)

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn SQLite's errors into EDL's."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as exc:  # UnicodeError if SQLite quotes damaged text
            words = shown(exc)
            is_damaged = type(exc) is sqlite3.DatabaseError or isinstance(exc, UnicodeError) or "malformed" in words
            is_closed = "readonly" in words or "unable to open" in words
            is_busy = "locked" in words
            if is_damaged:
                words = f"it is damaged ({words}): {self._tables.remedy}"
            elif is_closed:
                words += ": check the permissions of the file and its folder"
            elif is_busy:
                words += f": another process has been writing for {self._timeout_s:g} s"
            if not self._ready and (is_damaged or is_closed):  # these are permanent
                raise SettingsError(f"{self}: {words}") from exc
            raise self._tables.error(f"{self}: {words}", is_busy) from exc

    def change(self) -> str | None:
        """Return why the connection can no longer be used ("" if its file was replaced); None if nothing changed."""
        return self._identity.change(self.path) if self._identity is not None else None

    def discard(self) -> bool:
        """Remove the files unless another process has removed them; all processes then see that they were replaced.

        The database is removed first: at worst, the process that creates the next database finds an orphaned journal
        and memory. Raises OSError if the files cannot be removed.
        """
        assert self._identity is not None
        place = self._identity.place
        with _folder_lock(place) as locked:  # a second process must not remove the new file
            if not locked or not self.change():
                return False
            for side in ("", *_SIDES):
                Path(place + side).unlink(missing_ok=True)
            return True

    def close(self) -> None:
        """Close the connection. May be called twice; does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        with contextlib.suppress(sqlite3.Error):
            self.sqlite.close()
        _open_files.discard(weakref.ref(self))

    def __str__(self) -> str:
        return f"{self._tables.kind} {self.path}"

    def _check_place(self) -> None:
        place = os.path.realpath(self.path)
        kind = mounts.file_system(place, mounts.read_mounts())
        if not mounts.is_shared(kind):
            return
        what = (
            f"{self} is on {kind}, a shared file system. SQLite's locks and memory do not work between machines:"
            " each machine would overwrite the others' changes"
        )
        if not allows_shared_file():
            raise SettingsError(
                f"{what}. {self._tables.elsewhere}. If only this machine uses the file, set EDL_SHARED_FILE=1"
            )
        if place not in _warned:
            _warned.add(place)
            logger.warning("%s. EDL_SHARED_FILE allows this: make sure that no other machine opens the file", what)

    def _open(self) -> None:
        for _ in range(_MOST_OPENINGS):
            try:
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise SettingsError(f"{self}: its folder cannot be created: {exc.strerror}") from exc
            with _opening(self.path):
                before = _Identity.of(self.path).main
                self._connect("rwc")
                try:
                    self._prepare()
                    identity = _Identity.of(self.path)
                except BaseException as exc:
                    self.close()
                    if isinstance(exc, (sqlite3.Error, SettingsError)) and _Identity.of(self.path).main != before:
                        continue  # the error concerns a file that was replaced
                    raise
                if identity.main == before is not None:
                    self._identity = identity
                    return
                self.close()  # the file was replaced: it is unknown which one is open
        raise self._tables.error(f"{self}: another program replaces it each time it is opened", False)

    def _connect(self, mode: str) -> None:
        self.sqlite = sqlite3.connect(
            f"file:{quote(self.path)}?mode={mode}",
            uri=True,
            timeout=self._timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        _open_files.add(weakref.ref(self, _open_files.discard))
        # Invalid text in one row must not make other rows unreadable.
        self.sqlite.text_factory = lambda text: text.decode("utf-8", "replace")

    def _prepare(self) -> None:
        is_new = not self._has_tables()
        for pragma in self._tables.new_pragmas if is_new else ():
            self.sqlite.execute(f"PRAGMA {pragma}")
        self._use_wal()
        for pragma in self._tables.pragmas:
            self.sqlite.execute(f"PRAGMA {pragma}")
        if is_new:
            self.sqlite.execute("BEGIN IMMEDIATE")
            if not self._has_tables():  # another process may have been faster
                self._make_tables()
            self.sqlite.execute("COMMIT")

    def _use_wal(self) -> None:
        """Switch to a write-ahead log. Processes that do this at the same time may collide despite the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                mode = self._pragma("journal_mode = WAL")
                break
            except sqlite3.OperationalError as exc:
                if "locked" not in str(exc) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise SettingsError(f"{self}: its file system cannot share memory (journal mode {mode})")

    def _has_tables(self) -> bool:
        if not self.sqlite.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return False
        tables, version = self._tables, self._pragma("user_version")
        if self._pragma("application_id") != tables.application_id:
            raise SettingsError(f"{self} is another program's database, not EDL's: {tables.remedy}")
        if version != tables.version:
            raise SettingsError(
                f"{self} has format {version}, not {tables.version}: another release of EDL created it: {tables.remedy}"
            )
        return True

    def _make_tables(self) -> None:
        for statement in self._tables.schema.split(";"):
            self.sqlite.execute(statement)
        self.sqlite.execute(f"PRAGMA application_id = {self._tables.application_id}")
        self.sqlite.execute(f"PRAGMA user_version = {self._tables.version}")

    def _pragma(self, words: str) -> Any:
        return self.sqlite.execute(f"PRAGMA {words}").fetchone()[0]


@dataclass(frozen=True)
class _Identity:
    """The files at a path at one moment."""

    place: str  # the real path: SQLite follows links before it adds `-wal` and `-shm`
    main: _Inode | None  # the database; None if it did not exist
    sides: tuple[_Inode | None, ...]  # `-wal` and `-shm`, which exist as long as a connection is open

    @classmethod
    def of(cls, path: str) -> _Identity:
        """Return the current files. Call this after the connection has read and SQLite has created all three."""
        place = os.path.realpath(path)
        return cls(place, _inode(place)[0], tuple(_inode(place + side)[0] for side in _SIDES))

    def change(self, path: str) -> str | None:
        sides = [_inode(self.place + side)[0] for side in _SIDES]
        main, size = _inode(path)  # checked last: a file that has just replaced it has different sides
        if main != self.main or main is None:
            return ""
        if size == 0:
            return "it was truncated while in use"
        for side, inode, seen in zip(_SIDES, self.sides, sides, strict=True):
            if inode is None or seen != inode:
                return f"its {side} was removed or replaced while in use"
        return None


@contextlib.contextmanager
def _opening(path: str) -> Iterator[None]:
    """Keep other processes from creating or removing a file while it is opened; create it if it does not exist.

    SQLite finds the journal and memory by name, some time after it has opened the database. These files may belong to a
    later or earlier database at the same path. In that case, their owners lose what SQLite writes there, and if SQLite
    resets the memory, processes that read the memory are killed (SIGBUS).

    If the file cannot be created, SQLite raises the error.
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
    """Lock a file's folder against processes that open or remove files; yield False if the lock takes too long."""
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
            fcntl.flock(folder, fcntl.LOCK_UN)  # a child forked meanwhile also has the folder open
    finally:
        os.close(folder)


def _inode(path: str) -> tuple[_Inode | None, int]:
    """Return the device and inode of a file (None if it does not exist), and its size."""
    try:
        status = os.stat(path)  # noqa: PTH116 - four times a transaction, and pathlib is slow
    except OSError:
        return None, 0
    return (status.st_dev, status.st_ino), status.st_size


_warned: set[str] = set()  # shared files: each process opens one several times
_open_files: set[weakref.ref[SqliteFile]] = set()


def _leak_inherited() -> None:
    # SQLite forbids even closing a connection in a forked child: it would touch files that the parent uses.
    for reference in tuple(_open_files):
        if (file := reference()) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(file.sqlite))
    _open_files.clear()


os.register_at_fork(after_in_child=_leak_inherited)
