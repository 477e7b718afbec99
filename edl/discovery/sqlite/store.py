"""The store on a SQLite file: a row per key."""

from __future__ import annotations

import sqlite3
import time

from edl.discovery.election import StoreElection
from edl.discovery.keeping import Claim, KeptLease
from edl.discovery.keys import check_key, check_prefix, check_value
from edl.discovery.owned import Owned
from edl.discovery.records import check_ttl
from edl.discovery.sqlite.file import SqliteFile
from edl.discovery.sqlite.leases import grant, next_revision, renew, revoke
from edl.discovery.sqlite.watch import Poller
from edl.discovery.store import Election, Entry, Lease, Store, StoreSnapshot, StoreWatch
from edl.errors import ConflictError, LeaseLostError, SettingsError

__all__ = ["SqliteStore"]

# Bound to the monotonic time, twice: see `expire` for the second condition.
_LIVE = (
    "entry LEFT JOIN lease ON lease.id = entry.lease"
    " WHERE (entry.lease IS NULL OR lease.expires > ? AND lease.expires <= ? + lease.ttl_s)"
)


class SqliteStore(Owned, Store):
    """See `Store`."""

    def __init__(self, path: str, *, timeout_s: float = 5.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._file = self._own(SqliteFile(path, timeout_s))

    def __repr__(self) -> str:
        return f"SqliteStore({self._file.path!r})"

    def lease(self, ttl_s: float = 10.0) -> Lease:
        self._check()
        ttl_s = check_ttl(ttl_s)
        granted = time.monotonic()
        with self._file.write() as connection:
            number = grant(connection, ttl_s)
        return self._own(KeptLease(_RowClaim(self._file, number), ttl_s, granted))

    def get(self, key: str) -> Entry | None:
        self._check()
        check_key(key)
        with self._file.read() as connection:
            now = time.monotonic()
            row = connection.execute(f"SELECT value, version FROM {_LIVE} AND key = ?", (now, now, key)).fetchone()
        return None if row is None else Entry(key, row[0], row[1])

    def list(self, prefix: str) -> list[Entry]:
        self._check()
        check_prefix(prefix)
        with self._file.read() as connection:
            return _live_entries(connection, prefix)[0]

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        self._check()
        check_key(key)
        check_value(value)
        with self._file.write() as connection:
            number = self._number(connection, lease)
            _refuse_foreign(connection, key, number)
            return _set(connection, key, value, number)

    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        self._check()
        check_key(key)
        check_value(value)
        with self._file.write() as connection:
            number = self._number(connection, lease)
            if _version(connection, key) != version:
                return None
            _refuse_foreign(connection, key, number)
            return _set(connection, key, value, number)

    def delete(self, key: str, version: int | None = None) -> bool:
        self._check()
        check_key(key)
        with self._file.write() as connection:
            present = _version(connection, key)
            if present is None or version not in (None, present):
                return False
            connection.execute("DELETE FROM entry WHERE key = ?", (key,))
            next_revision(connection)
            return True

    def watch(self, prefix: str) -> StoreWatch:
        self._check()
        return self._own(_PrefixWatch(self._file.path, self._timeout_s, check_prefix(prefix)))

    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        self._check()
        return self._own(StoreElection(self, name, check_value(value), check_ttl(ttl_s)))

    def _number(self, connection: sqlite3.Connection, lease: Lease | None) -> int | None:
        """The lease's row, None without a lease."""
        if lease is None:
            return None
        if not isinstance(lease, KeptLease) or not isinstance(lease.claim, _RowClaim) or lease.claim.file != self._file:
            raise SettingsError(f"{lease!r} is not a lease of {self!r}")
        number = lease.claim.number
        if lease.lost or not connection.execute("SELECT 1 FROM lease WHERE id = ?", (number,)).fetchone():
            lease.forfeit()
            raise LeaseLostError("the lease has expired")
        return number


class _RowClaim(Claim):
    """A row of `lease`."""

    def __init__(self, file: SqliteFile, number: int) -> None:
        self.file = file
        self.number = number

    def renew(self) -> bool:
        with self.file.write() as connection:
            return renew(connection, self.number)

    def withdraw(self) -> None:
        with self.file.write() as connection:
            revoke(connection, self.number)


class _PrefixWatch(Poller["dict[str, Entry]", StoreSnapshot], StoreWatch):
    def __init__(self, path: str, timeout_s: float, prefix: str) -> None:
        self._last: dict[str, Entry] = {}
        super().__init__(
            path, timeout_s, read=lambda connection: _by_key(connection, prefix), answered=self._take, failed=self._fail
        )

    def _take(self, entries: dict[str, Entry]) -> StoreSnapshot:
        self._last = entries
        return StoreSnapshot(entries)

    def _fail(self, reason: str) -> StoreSnapshot:
        return StoreSnapshot(self._last, stale=reason)

    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        return self.take(timeout_s)


def _by_key(connection: sqlite3.Connection, prefix: str) -> tuple[dict[str, Entry], float]:
    entries, expires = _live_entries(connection, prefix)
    return {entry.key: entry for entry in entries}, expires


def _live_entries(connection: sqlite3.Connection, prefix: str) -> tuple[list[Entry], float]:
    """All entries under `prefix`, and when the first of their leases expires unless it is renewed."""
    now = time.monotonic()
    rows = connection.execute(
        # U+10FFFF sorts behind every other character, in UTF-8 as well, so that the range is the prefix.
        f"SELECT key, value, version, expires FROM {_LIVE} AND key >= ? AND key < ? ORDER BY key",
        (now, now, prefix, prefix + "\U0010ffff"),
    ).fetchall()
    first = min((expires for *_, expires in rows if expires is not None), default=float("inf"))
    return [Entry(key, value, version) for key, value, version, _ in rows], first


def _version(connection: sqlite3.Connection, key: str) -> int | None:
    row = connection.execute("SELECT version FROM entry WHERE key = ?", (key,)).fetchone()
    return None if row is None else int(row[0])


def _refuse_foreign(connection: sqlite3.Connection, key: str, lease: int | None) -> None:
    """Raise ConflictError if another lease than `lease` holds `key`."""
    row = connection.execute("SELECT lease FROM entry WHERE key = ?", (key,)).fetchone()
    if row is not None and row[0] is not None and row[0] != lease:
        raise ConflictError(f"key {key!r} is held by another lease: it can be written with that one only")


def _set(connection: sqlite3.Connection, key: str, value: bytes, lease: int | None) -> Entry:
    version = next_revision(connection)
    connection.execute(
        "INSERT OR REPLACE INTO entry (key, value, version, lease) VALUES (?, ?, ?, ?)", (key, value, version, lease)
    )
    return Entry(key, value, version)
