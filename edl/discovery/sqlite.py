"""Implements the store on a SQLite file: a row per lease and a row per key. No server is needed.

Leases are measured with CLOCK_MONOTONIC, which all processes on a machine share and which cannot be set. This clock
restarts at every boot, so opening the file ends the leases of an earlier boot. Lease ids are random: when a new file
replaces an old one, an id from the old file must not be the id of another process's lease in the new file. Any process
that can write to the file can register anything.

A file that was removed or replaced, or that lost its `-wal`, is recreated, and all instances register again
(`StoreFile`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from typing_extensions import override

from edl.discovery.store import Claim, Entries, Entry, Store, held_by_another
from edl.discovery.watching import Follower
from edl.errors import ClosedError, DiscoveryError, LeaseLostError, SettingsError
from edl.resource import Resource
from edl.sqlite_file import SqliteFile, Tables

logger = logging.getLogger("edl.discovery")

# `revision` counts changes of entries, not renewals: a watcher that finds it unchanged reads no further.
_TABLES: Final = Tables(
    kind="discovery file",
    application_id=0x45444C31,  # "EDL1"
    version=2,
    schema="""
        CREATE TABLE state (boot TEXT NOT NULL, revision INTEGER NOT NULL);
        INSERT INTO state VALUES ('', 0);
        CREATE TABLE lease (id INTEGER PRIMARY KEY, ttl_s REAL NOT NULL, expires REAL NOT NULL);
        CREATE TABLE entry (
            key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL,
            lease INTEGER REFERENCES lease (id) ON DELETE CASCADE
        );
        CREATE INDEX entry_lease ON entry (lease)
    """,
    error=lambda words, is_busy: DiscoveryError(words),
    remedy="stop its processes and remove the file (teachers and jobs register again), or name another file",
    elsewhere=(
        "For one machine, name a local file, such as EDL_DISCOVERY=sqlite:///var/tmp/NAME/edl.sqlite; for several"
        " machines, use consul://host:8500 or etcd://host:2379"
    ),
    pragmas=("synchronous = NORMAL", "foreign_keys = ON"),
)
_MOST_IDLE: Final = 2
"""How many idle connections are kept open: one for the program's own thread, and one for renewals."""

_POLL_S: Final = 0.1
"""Interval between checks: a process sees a change within this time. A check takes microseconds."""

# A lease that ends later than its length allows was granted before the clock restarted. A service's records stay
# visible until a process writes: while no process can write (a full disk), no lease can be renewed either, and students
# keep their teachers.
_VISIBLE: Final = (
    "entry LEFT JOIN lease ON lease.id = entry.lease"
    " WHERE (entry.lease IS NULL OR lease.expires <= :now + lease.ttl_s"
    " AND (lease.expires > :now OR key GLOB 'registry/*/records/*'))"
)


class SqliteStore(Store):
    """See `Store`. A server of the store runs its own transactions on `file`."""

    def __init__(self, path: str, *, timeout_s: float = 5.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self.file: Final = self._own(StoreFile(path, timeout_s))

    def __repr__(self) -> str:
        return f"SqliteStore({self.file.path!r})"

    @override
    def grant(self, ttl_s: float) -> RowClaim:
        claim = RowClaim(self.file, secrets.randbits(62))
        row = "INSERT INTO lease (id, ttl_s, expires) VALUES (?, ?, ?)"
        with self.file.write() as connection:
            connection.execute(row, (claim.number, ttl_s, time.monotonic() + ttl_s))
        return claim

    @override
    def owns(self, claim: Claim) -> bool:
        return isinstance(claim, RowClaim) and claim.file == self.file

    @override
    def read(self, key: str) -> Entry | None:
        with self.file.read() as connection:
            wanted = {"now": time.monotonic(), "key": key}
            row = connection.execute(f"SELECT value, version FROM {_VISIBLE} AND key = :key", wanted).fetchone()
        return None if row is None else Entry(key, row[0], row[1])

    @override
    def read_all(self, prefix: str) -> Sequence[Entry]:
        with self.file.read() as connection:
            return _read_entries(connection, prefix)[0]

    @override
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        lease = claim.number if isinstance(claim, RowClaim) else None
        with self.file.write() as connection:
            if lease is not None and not connection.execute("SELECT 1 FROM lease WHERE id = ?", (lease,)).fetchone():
                raise LeaseLostError("the lease has expired")
            present = connection.execute("SELECT version, lease FROM entry WHERE key = ?", (key,)).fetchone()
            if expected is not None and expected != (0 if present is None else present[0]):
                return None
            if present is not None and present[1] not in (None, lease):
                raise held_by_another(key)
            version = _next_revision(connection)
            row = "INSERT OR REPLACE INTO entry (key, value, version, lease) VALUES (?, ?, ?, ?)"
            connection.execute(row, (key, value, version, lease))
            return Entry(key, value, version)

    @override
    def remove(self, key: str, version: int | None) -> bool:
        at = "" if version is None else " AND version = :version"
        wanted = {"key": key, "version": version}
        with self.file.write() as connection:
            if not connection.execute(f"DELETE FROM entry WHERE key = :key{at}", wanted).rowcount:
                return False
            _next_revision(connection)
            return True

    def first_expiry(self) -> float:
        """Return the monotonic time at which the first lease ends unless it is renewed; infinite without leases."""
        with self.file.read() as connection:
            found = connection.execute("SELECT min(expires) FROM lease").fetchone()[0]
        return float("inf") if found is None else float(found)

    @override
    def follow(self, prefix: str) -> Follower[Entries]:
        return _FileFollower(StoreFile(self.file.path, self._timeout_s, lazy=True), prefix)


class StoreFile(Resource):
    """A file and its connections: each transaction has its own connection, so a read waits for no other transaction.

    With `lazy`, the file is opened on first use, and any problem with the file then raises DiscoveryError.

    Raises:
        SettingsError: The file cannot be created or written, is damaged, or is not EDL's.
        DiscoveryError: The file is busy.
    """

    def __init__(self, path: str, timeout_s: float, lazy: bool = False) -> None:
        super().__init__()
        self.path = path
        self._timeout_s = timeout_s
        self._idle: deque[SqliteFile] = deque()
        self._replaced = 0  # how many times
        if not lazy:
            self._give(self._connect())

    @contextlib.contextmanager
    def write(
        self, before: Callable[[sqlite3.Connection], object] = lambda connection: None
    ) -> Iterator[sqlite3.Connection]:
        """Run a transaction that writes. The transaction first calls `before`, then deletes expired leases."""
        with self._transaction(reads=False) as connection:
            before(connection)
            over = "expires <= :now OR expires > :now + ttl_s"
            if connection.execute(f"DELETE FROM lease WHERE {over}", {"now": time.monotonic()}).rowcount:
                _next_revision(connection)
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that reads the state as of its beginning, possibly with expired leases.

        Read the clock inside this transaction. If the clock is read before, a lease that is renewed in between seems to
        end later than it can.
        """
        with self._transaction(reads=True) as connection:
            connection.execute("SELECT revision FROM state").fetchone()  # SQLite begins at the first read
            yield connection

    def data_version(self) -> tuple[int, SqliteFile, int]:
        """Return a value that changes when another connection writes or the file is replaced. This call is cheap."""
        self._check()
        with self._taken() as file, file.translated():
            return self._replaced, file, file.sqlite.execute("PRAGMA data_version").fetchone()[0]

    @contextlib.contextmanager
    def _transaction(self, reads: bool) -> Iterator[sqlite3.Connection]:
        self._check()
        with self._taken() as file:
            self._check()
            with file.transaction(reads=reads) as connection:
                yield connection

    @contextlib.contextmanager
    def _taken(self) -> Iterator[SqliteFile]:
        file = self._take()
        try:
            yield file
        finally:
            self._give(file)

    def _take(self) -> SqliteFile:
        """Return an idle connection; a new connection if none is idle, or if the file was removed or replaced."""
        with contextlib.suppress(IndexError):
            while True:
                file = self._idle.pop()
                changed = file.change()
                if changed is None:
                    return file
                self._replaced += 1
                try:
                    self._discard(file, changed)
                finally:  # SQLite sees that the file was unlinked, and leaves its successor's journal alone
                    file.close()
        try:
            return self._connect()
        except SettingsError as exc:  # the file was usable when this was opened, so it may be again
            raise DiscoveryError(str(exc)) from exc

    def _give(self, file: SqliteFile) -> None:
        if len(self._idle) >= _MOST_IDLE:
            file.close()
            return
        self._idle.append(file)
        if self._closed:  # `_release` may have run before the file was returned
            self._release()

    def _connect(self) -> SqliteFile:
        # In SQLite, all connections of a process to a file share memory: a new connection would read a new journal by
        # the index of an older connection, which has lost its `-wal` or `-shm`.
        for older in SqliteFile.opened(self.path):
            self._discard(older, older.change())
        file = SqliteFile(self.path, _TABLES, self._timeout_s)
        try:
            self._end_earlier_boot(file)
        except BaseException:
            file.close()
            raise
        return file

    def _discard(self, file: SqliteFile, changed: str | None) -> None:
        """Remove a file that connections cannot share consistently any longer; its users switch to the new file."""
        if not changed:
            return
        try:
            removed = file.discard()
        except OSError as exc:
            raise DiscoveryError(
                f"{file}: {changed}, and the remaining file cannot be removed: {exc.strerror}."
                " Remove it, and EDL creates it again"
            ) from exc
        if removed:
            logger.warning("%s: %s; the file is created again, and all instances register again", file, changed)

    @staticmethod
    def _end_earlier_boot(file: SqliteFile) -> None:
        boot = _boot_id()

        def is_earlier(connection: sqlite3.Connection) -> bool:
            return bool(connection.execute("SELECT boot != ? FROM state", (boot,)).fetchone()[0])

        with file.transaction(reads=True) as connection:
            must_end = is_earlier(connection)
        if must_end:
            with file.transaction() as connection:
                if is_earlier(connection):  # no other process was faster
                    connection.execute("DELETE FROM lease")
                    _next_revision(connection)
                    connection.execute("UPDATE state SET boot = ?", (boot,))

    @override
    def _release(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()  # a connection in use closes when its transaction ends


class RowClaim(Claim):
    """A row of the table `lease`, given by its id."""

    def __init__(self, file: StoreFile, number: int) -> None:
        super().__init__()
        self.file = file
        self.number = number

    @override
    def renew(self) -> bool:
        row = "UPDATE lease SET expires = ttl_s + :now WHERE id = :id AND expires > :now"
        with self.file.write() as connection:
            return connection.execute(row, {"now": time.monotonic(), "id": self.number}).rowcount == 1

    @override
    def withdraw(self) -> None:
        with self.file.write() as connection:
            if connection.execute("DELETE FROM lease WHERE id = ?", (self.number,)).rowcount:
                _next_revision(connection)


class _FileFollower(Follower[Entries]):
    def __init__(self, file: StoreFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix
        self._ended = threading.Event()
        self._replaced: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._seen: tuple[int, SqliteFile, int] | None = None
        self._revision = -1
        self._due = 0.0

    @override
    def next(self, wait_s: float | None) -> Entries:
        deadline = float("inf") if wait_s is None else time.monotonic() + wait_s
        try:
            while not self._ended.is_set():
                found = self._look(deadline)
                if found is not None:
                    return found
                self._ended.wait(_POLL_S)
        except DiscoveryError:
            self._forget()
            raise
        raise ClosedError("the watch is closed")

    def _look(self, deadline: float) -> Entries | None:
        """Return the entries if they may have changed."""
        seen = self._file.data_version()
        replaced, self._replaced = self._replaced, seen[0]
        if replaced not in (None, seen[0]):
            raise DiscoveryError(f"discovery file {self._file.path} was removed or replaced")
        is_due = time.monotonic() >= min(self._due, deadline)
        if seen == self._seen and not is_due:
            return None
        with self._file.read() as connection:
            revision = connection.execute("SELECT revision FROM state").fetchone()[0]
            if revision == self._revision and not is_due:
                self._seen = seen
                return None
            entries, self._due = _read_entries(connection, self._prefix)
        self._seen, self._revision = seen, revision
        return {entry.key: entry for entry in entries}

    @override
    def close(self) -> None:
        self._ended.set()
        self._file.close()


def _read_entries(connection: sqlite3.Connection, prefix: str) -> tuple[list[Entry], float]:
    """Return all entries under `prefix`, sorted, and the time when the first of their leases ends unless renewed."""
    now = time.monotonic()
    rows = connection.execute(
        # U+10FFFF sorts after every other character, also in UTF-8, so the range is the prefix.
        f"SELECT key, value, version, expires FROM {_VISIBLE} AND key >= :first AND key < :last ORDER BY key",
        {"now": now, "first": prefix, "last": prefix + "\U0010ffff"},
    ).fetchall()
    first = min((expires for *_, expires in rows if expires is not None and expires > now), default=float("inf"))
    return [Entry(key, value, version) for key, value, version, _ in rows], first


def _next_revision(connection: sqlite3.Connection) -> int:
    """Notify watchers of a change, and return the new revision."""
    connection.execute("UPDATE state SET revision = revision + 1")
    return int(connection.execute("SELECT revision FROM state").fetchone()[0])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # a system without it relies on the second condition of `write`
