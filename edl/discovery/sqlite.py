"""The store on a SQLite file: a row per lease and a row per key. No server is needed.

Leases are measured with CLOCK_MONOTONIC, which all processes of a machine share and which cannot be set. It starts
again with every boot, so `sqlite_file` ends the leases of an earlier boot. Leases have random ids: in a file that
replaced another, an old id must not be another process's. A watch looks at the file's change counter ten times a
second.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from edl.discovery.sqlite_file import SqliteFile, next_revision
from edl.discovery.store import Claim, Entries, Entry, Store, held_by_another
from edl.discovery.watching import Follower
from edl.errors import ClosedError, DiscoveryError, LeaseLostError
from edl.notifier import ReentrantEvent

__all__ = ["RowClaim", "SqliteStore"]

_POLL_S: Final = 0.1
"""A process sees a change after this time at most; a look takes microseconds."""

# A lease that ends later than its length allows was granted before the clock started again. A service's records stay
# visible until a process writes: while no process can (a full disk), none can renew either, and students keep their
# teachers.
_VISIBLE: Final = (
    "entry LEFT JOIN lease ON lease.id = entry.lease"
    " WHERE (entry.lease IS NULL OR lease.expires <= :now + lease.ttl_s"
    " AND (lease.expires > :now OR key GLOB 'registry/*/records/*'))"
)


class SqliteStore(Store):
    """See `Store`. A server of the store runs transactions of its own in `file`."""

    def __init__(self, path: str, *, timeout_s: float = 5.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self.file: Final = self._own(SqliteFile(path, timeout_s))

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
            version = next_revision(connection)
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
            next_revision(connection)
            return True

    def first_expiry(self) -> float:
        """Return the monotonic time at which the first lease ends unless it is renewed; infinite without leases."""
        with self.file.read() as connection:
            found = connection.execute("SELECT min(expires) FROM lease").fetchone()[0]
        return float("inf") if found is None else float(found)

    @override
    def follow(self, prefix: str) -> Follower[Entries]:
        return _FileFollower(SqliteFile(self.file.path, self._timeout_s, lazy=True), prefix)


class RowClaim(Claim):
    """A row of `lease`, by its id."""

    def __init__(self, file: SqliteFile, number: int) -> None:
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
                next_revision(connection)


class _FileFollower(Follower[Entries]):
    def __init__(self, file: SqliteFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix
        self._ended = ReentrantEvent()
        self._replaced: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._seen: tuple[int, int, int] | None = None
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
    """Return all entries under `prefix`, sorted, and when the first of their leases ends unless it is renewed."""
    now = time.monotonic()
    rows = connection.execute(
        # U+10FFFF sorts behind every other character, in UTF-8 as well, so that the range is the prefix.
        f"SELECT key, value, version, expires FROM {_VISIBLE} AND key >= :first AND key < :last ORDER BY key",
        {"now": now, "first": prefix, "last": prefix + "\U0010ffff"},
    ).fetchall()
    first = min((expires for *_, expires in rows if expires is not None and expires > now), default=float("inf"))
    return [Entry(key, value, version) for key, value, version, _ in rows], first
