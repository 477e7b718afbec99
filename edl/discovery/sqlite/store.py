"""The store on a SQLite file: a row per key."""

from __future__ import annotations

import sqlite3
import time

from typing_extensions import override

from edl.discovery.common.election import StoreElection
from edl.discovery.common.renewal import Claim, RenewedLease
from edl.discovery.common.resource import Resource
from edl.discovery.keys import check_key, check_prefix, check_value
from edl.discovery.records import check_ttl
from edl.discovery.sqlite.entries import (
    delete_entry,
    has_lease,
    live_entries,
    read_entry,
    refuse_foreign,
    version_of,
    write_entry,
)
from edl.discovery.sqlite.file import SqliteFile
from edl.discovery.sqlite.leases import grant, renew, revoke
from edl.discovery.sqlite.watch import SqliteWatch
from edl.discovery.store import Election, Entry, Lease, Store, StoreSnapshot, StoreWatch
from edl.errors import LeaseLostError, SettingsError

__all__ = ["SqliteStore"]


class SqliteStore(Resource, Store):
    """See `Store`."""

    def __init__(self, path: str, *, timeout_s: float = 5.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._file = self._own(SqliteFile(path, timeout_s))

    def __repr__(self) -> str:
        return f"SqliteStore({self._file.path!r})"

    @override
    def lease(self, ttl_s: float = 10.0) -> Lease:
        self._check()
        ttl_s = check_ttl(ttl_s)
        granted = time.monotonic()
        with self._file.write() as connection:
            number = grant(connection, ttl_s)
        return self._own(RenewedLease(_RowClaim(self._file, number), ttl_s, granted))

    @override
    def get(self, key: str) -> Entry | None:
        self._check()
        check_key(key)
        with self._file.read() as connection:
            return read_entry(connection, key)

    @override
    def list(self, prefix: str) -> list[Entry]:
        self._check()
        check_prefix(prefix)
        with self._file.read() as connection:
            return live_entries(connection, prefix)[0]

    @override
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        self._check()
        check_key(key)
        check_value(value)
        with self._file.write() as connection:
            number = self._number(connection, lease)
            refuse_foreign(connection, key, number)
            return write_entry(connection, key, value, number)

    @override
    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        self._check()
        check_key(key)
        check_value(value)
        with self._file.write() as connection:
            number = self._number(connection, lease)
            if version_of(connection, key) != version:
                return None
            refuse_foreign(connection, key, number)
            return write_entry(connection, key, value, number)

    @override
    def delete(self, key: str, version: int | None = None) -> bool:
        self._check()
        check_key(key)
        with self._file.write() as connection:
            return delete_entry(connection, key, version)

    @override
    def watch(self, prefix: str) -> StoreWatch:
        self._check()
        return self._own(_PrefixWatch(self._file.path, self._timeout_s, check_prefix(prefix)))

    @override
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        self._check()
        return self._own(StoreElection(self, name, check_value(value), check_ttl(ttl_s)))

    def _number(self, connection: sqlite3.Connection, lease: Lease | None) -> int | None:
        """Return the lease's row, None without a lease."""
        if lease is None:
            return None
        if (
            not isinstance(lease, RenewedLease)
            or not isinstance(lease.claim, _RowClaim)
            or lease.claim.file != self._file
        ):
            raise SettingsError(f"{lease!r} is not a lease of {self!r}")
        number = lease.claim.number
        if lease.lost or not has_lease(connection, number):
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


class _PrefixWatch(SqliteWatch["dict[str, Entry]", StoreSnapshot], StoreWatch):
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
    entries, expires = live_entries(connection, prefix)
    return {entry.key: entry for entry in entries}, expires
