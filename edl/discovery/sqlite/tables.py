"""The rows of leases and entries. Every function works inside a transaction.

Leases are measured with CLOCK_MONOTONIC, which all processes of a machine share and which cannot be set. It starts
again with every boot, so `file` ends the leases of an earlier boot. Leases have random ids: in a file that replaced
another, an old id must not be another process's.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable

from edl.discovery.base_store import held_by_another
from edl.discovery.store import Entry
from edl.errors import LeaseLostError

__all__ = [
    "delete_entry",
    "expire",
    "first_expiry",
    "grant",
    "next_revision",
    "prolong",
    "read_entries",
    "read_entry",
    "renew",
    "renew_all",
    "revoke",
    "write_entry",
]

# A lease that ends later than its length allows was granted before the clock started again. A service's records stay
# visible until a process writes: while no process can (a full disk), none can renew either, and students keep their
# teachers.
_VISIBLE = (
    "entry LEFT JOIN lease ON lease.id = entry.lease"
    " WHERE (entry.lease IS NULL OR lease.expires <= :now + lease.ttl_s"
    " AND (lease.expires > :now OR key GLOB 'registry/*/records/*'))"
)


# --- Leases ---


def next_revision(connection: sqlite3.Connection) -> int:
    """Tell watchers that something has changed; returns the new revision."""
    connection.execute("UPDATE state SET revision = revision + 1")
    return int(connection.execute("SELECT revision FROM state").fetchone()[0])


def expire(connection: sqlite3.Connection) -> None:
    """Delete leases that are over, with their entries."""
    over = "expires <= :now OR expires > :now + ttl_s"
    if connection.execute(f"DELETE FROM lease WHERE {over}", {"now": time.monotonic()}).rowcount:
        next_revision(connection)


def grant(connection: sqlite3.Connection, ttl_s: float) -> int:
    """Grant a lease; returns its id."""
    lease, expires = secrets.randbits(62), time.monotonic() + ttl_s
    connection.execute("INSERT INTO lease (id, ttl_s, expires) VALUES (?, ?, ?)", (lease, ttl_s, expires))
    return lease


def renew(connection: sqlite3.Connection, lease: int) -> bool:
    """Renew a lease; False if it is over."""
    now = time.monotonic()
    cursor = connection.execute("UPDATE lease SET expires = ttl_s + ? WHERE id = ? AND expires > ?", (now, lease, now))
    return cursor.rowcount == 1


def revoke(connection: sqlite3.Connection, lease: int) -> None:
    """End a lease now, with its entries."""
    if connection.execute("DELETE FROM lease WHERE id = ?", (lease,)).rowcount:
        next_revision(connection)


def first_expiry(connection: sqlite3.Connection) -> float:
    """Return the monotonic time at which the first lease ends unless it is renewed; infinite without leases."""
    found = connection.execute("SELECT min(expires) FROM lease").fetchone()[0]
    return float("inf") if found is None else float(found)


def prolong(connection: sqlite3.Connection, by_s: float) -> None:
    """Let every lease end that much later, but not later than a lease that is granted now."""
    connection.execute("UPDATE lease SET expires = min(expires + ?, ttl_s + ?)", (by_s, time.monotonic()))


def renew_all(connection: sqlite3.Connection) -> None:
    """Renew every lease in the file, even if it is over."""
    connection.execute("UPDATE lease SET expires = ttl_s + ?", (time.monotonic(),))


# --- Entries ---


def read_entry(connection: sqlite3.Connection, key: str) -> Entry | None:
    """Return the entry of `key`, None if there is none."""
    wanted = {"now": time.monotonic(), "key": key}
    row = connection.execute(f"SELECT value, version FROM {_VISIBLE} AND key = :key", wanted).fetchone()
    return None if row is None else Entry(key, row[0], row[1])


def read_entries(connection: sqlite3.Connection, prefix: str) -> tuple[list[Entry], float]:
    """Return all entries under `prefix`, sorted, and when the first of their leases ends unless it is renewed."""
    now = time.monotonic()
    rows = connection.execute(
        # U+10FFFF sorts behind every other character, in UTF-8 as well, so that the range is the prefix.
        f"SELECT key, value, version, expires FROM {_VISIBLE} AND key >= :first AND key < :last ORDER BY key",
        {"now": now, "first": prefix, "last": prefix + "\U0010ffff"},
    ).fetchall()
    first = min((expires for *_, expires in rows if expires is not None and expires > now), default=float("inf"))
    return [Entry(key, value, version) for key, value, version, _ in rows], first


def write_entry(
    connection: sqlite3.Connection,
    key: str,
    value: bytes,
    expected: int | None,
    lease: int | None,
    check_room: Callable[[bool], None] = lambda new: None,
) -> Entry | None:
    """Write an entry, after `expire`; see `BaseStore.write`. `check_room` is told whether the key is new."""
    if lease is not None and not connection.execute("SELECT 1 FROM lease WHERE id = ?", (lease,)).fetchone():
        raise LeaseLostError("the lease has expired")
    present = connection.execute("SELECT version, lease FROM entry WHERE key = ?", (key,)).fetchone()
    if expected is not None and expected != (0 if present is None else present[0]):
        return None
    if present is not None and present[1] not in (None, lease):
        raise held_by_another(key)
    check_room(present is None)
    version = next_revision(connection)
    connection.execute(
        "INSERT OR REPLACE INTO entry (key, value, version, lease) VALUES (?, ?, ?, ?)", (key, value, version, lease)
    )
    return Entry(key, value, version)


def delete_entry(connection: sqlite3.Connection, key: str, version: int | None) -> bool:
    """Delete an entry, at `version` if that is not None; whether it was deleted."""
    at = "" if version is None else " AND version = :version"
    if not connection.execute(f"DELETE FROM entry WHERE key = :key{at}", {"key": key, "version": version}).rowcount:
        return False
    next_revision(connection)
    return True
