"""Entries in the file. Every function works inside a transaction."""

from __future__ import annotations

import sqlite3
import time

from edl.discovery.sqlite.leases import next_revision
from edl.discovery.store import Entry
from edl.errors import ConflictError

__all__ = ["delete_entry", "has_lease", "live_entries", "read_entry", "refuse_foreign", "version_of", "write_entry"]

# Bound to the monotonic time, twice: see `expire` for the second condition.
_LIVE = (
    "entry LEFT JOIN lease ON lease.id = entry.lease"
    " WHERE (entry.lease IS NULL OR lease.expires > ? AND lease.expires <= ? + lease.ttl_s)"
)


def read_entry(connection: sqlite3.Connection, key: str) -> Entry | None:
    """Return the entry of `key`, None if there is none."""
    now = time.monotonic()
    row = connection.execute(f"SELECT value, version FROM {_LIVE} AND key = ?", (now, now, key)).fetchone()
    return None if row is None else Entry(key, row[0], row[1])


def live_entries(connection: sqlite3.Connection, prefix: str) -> tuple[list[Entry], float]:
    """All entries under `prefix`, and when the first of their leases expires unless it is renewed."""
    now = time.monotonic()
    rows = connection.execute(
        # U+10FFFF sorts behind every other character, in UTF-8 as well, so that the range is the prefix.
        f"SELECT key, value, version, expires FROM {_LIVE} AND key >= ? AND key < ? ORDER BY key",
        (now, now, prefix, prefix + "\U0010ffff"),
    ).fetchall()
    first = min((expires for *_, expires in rows if expires is not None), default=float("inf"))
    return [Entry(key, value, version) for key, value, version, _ in rows], first


def version_of(connection: sqlite3.Connection, key: str) -> int | None:
    """Return the version of `key`, None if there is no such key."""
    row = connection.execute("SELECT version FROM entry WHERE key = ?", (key,)).fetchone()
    return None if row is None else int(row[0])


def refuse_foreign(connection: sqlite3.Connection, key: str, lease: int | None) -> None:
    """Raise ConflictError if another lease than `lease` holds `key`."""
    row = connection.execute("SELECT lease FROM entry WHERE key = ?", (key,)).fetchone()
    if row is not None and row[0] is not None and row[0] != lease:
        raise ConflictError(f"key {key!r} is held by another lease: it can be written with that one only")


def write_entry(connection: sqlite3.Connection, key: str, value: bytes, lease: int | None) -> Entry:
    """Set `key`, be it there or not."""
    version = next_revision(connection)
    connection.execute(
        "INSERT OR REPLACE INTO entry (key, value, version, lease) VALUES (?, ?, ?, ?)", (key, value, version, lease)
    )
    return Entry(key, value, version)


def delete_entry(connection: sqlite3.Connection, key: str, version: int | None) -> bool:
    """Delete `key`, only at `version` if that is not None; whether it was there and was deleted."""
    present = version_of(connection, key)
    if present is None or version not in (None, present):
        return False
    connection.execute("DELETE FROM entry WHERE key = ?", (key,))
    next_revision(connection)
    return True


def has_lease(connection: sqlite3.Connection, lease: int) -> bool:
    """Whether there is a lease of this id."""
    return connection.execute("SELECT 1 FROM lease WHERE id = ?", (lease,)).fetchone() is not None
