"""Leases in the file, and the revision that tells watchers of a change. Each function works inside a transaction."""

from __future__ import annotations

import secrets
import sqlite3
import time

__all__ = ["expire", "grant", "next_revision", "renew", "revoke"]


def next_revision(connection: sqlite3.Connection) -> int:
    """Tell watchers that something has changed."""
    connection.execute("UPDATE state SET revision = revision + 1")
    return int(connection.execute("SELECT revision FROM state").fetchone()[0])


def expire(connection: sqlite3.Connection) -> None:
    """Delete leases that are over, with what hangs on them."""
    now = time.monotonic()
    # A lease that ends later than its length allows was granted by a clock that has started again since.
    if connection.execute("DELETE FROM lease WHERE expires <= ? OR expires > ? + ttl_s", (now, now)).rowcount:
        next_revision(connection)


def grant(connection: sqlite3.Connection, ttl_s: float) -> int:
    """A new lease's id."""
    lease, expires = secrets.randbits(62), time.monotonic() + ttl_s
    connection.execute("INSERT INTO lease (id, ttl_s, expires) VALUES (?, ?, ?)", (lease, ttl_s, expires))
    return lease


def renew(connection: sqlite3.Connection, lease: int) -> bool:
    """Renew a lease; False if it is gone."""
    cursor = connection.execute("UPDATE lease SET expires = ttl_s + ? WHERE id = ?", (time.monotonic(), lease))
    return cursor.rowcount == 1


def revoke(connection: sqlite3.Connection, lease: int) -> None:
    """End a lease now, with what hangs on it."""
    if connection.execute("DELETE FROM lease WHERE id = ?", (lease,)).rowcount:
        next_revision(connection)
