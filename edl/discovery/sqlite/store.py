"""The store on a SQLite file, a row per key. A watch looks at the file's change counter ten times a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from edl.discovery.base_store import BaseStore, Claim, Entries
from edl.discovery.sqlite.file import SqliteFile
from edl.discovery.sqlite.tables import (
    delete_entry,
    grant,
    read_entries,
    read_entry,
    renew,
    revoke,
    write_entry,
)
from edl.discovery.store import Entry
from edl.discovery.watching import Follower
from edl.errors import ClosedError, DiscoveryError
from edl.notifier import ReentrantEvent

__all__ = ["SqliteStore"]

_POLL_S: Final = 0.1
"""A process sees a change after this time at most; a look takes microseconds."""


class SqliteStore(BaseStore):
    """See `Store`."""

    def __init__(self, path: str, *, timeout_s: float = 5.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._file = self._own(SqliteFile(path, timeout_s))

    def __repr__(self) -> str:
        return f"SqliteStore({self._file.path!r})"

    @override
    def grant(self, ttl_s: float) -> Claim:
        return _RowClaim(self._file, ttl_s)

    @override
    def owns(self, claim: Claim) -> bool:
        return isinstance(claim, _RowClaim) and claim.file == self._file

    @override
    def read(self, key: str) -> Entry | None:
        with self._file.read() as connection:
            return read_entry(connection, key)

    @override
    def read_all(self, prefix: str) -> Sequence[Entry]:
        with self._file.read() as connection:
            return read_entries(connection, prefix)[0]

    @override
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        with self._file.write() as connection:
            number = claim.number if isinstance(claim, _RowClaim) else None
            return write_entry(connection, key, value, expected, number)

    @override
    def remove(self, key: str, version: int | None) -> bool:
        with self._file.write() as connection:
            return delete_entry(connection, key, version)

    @override
    def follow(self, prefix: str) -> Follower[Entries]:
        return _FileFollower(SqliteFile(self._file.path, self._timeout_s, lazy=True), prefix)


class _RowClaim(Claim):
    """A row of `lease`."""

    def __init__(self, file: SqliteFile, ttl_s: float) -> None:
        super().__init__()
        self.file = file
        with file.write() as connection:
            self.number = grant(connection, ttl_s)

    @override
    def renew(self) -> bool:
        with self.file.write() as connection:
            return renew(connection, self.number)

    @override
    def withdraw(self) -> None:
        with self.file.write() as connection:
            revoke(connection, self.number)


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
            entries, self._due = read_entries(connection, self._prefix)
        self._seen, self._revision = seen, revision
        return {entry.key: entry for entry in entries}

    @override
    def close(self) -> None:
        self._ended.set()
        self._file.close()
