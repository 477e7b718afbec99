"""Leases in the file, and the revision that tells watchers of a change. Every function works inside a transaction."""

from __future__ import annotations

import secrets
import sqlite3
import time

__all__ = ["expire", "first_expiry", "grant", "next_revision", "prolong", "renew", "renew_all", "revoke", "supersede"]

REMEMBERED_S = 60.0
"""How long instances whose lease has run out are kept, at least: as long as Consul keeps them. While nobody can write
the file, nothing is deleted, and they stay for longer, which is when it matters."""


def next_revision(connection: sqlite3.Connection) -> int:
    """Tell watchers that something has changed."""
    connection.execute("UPDATE state SET revision = revision + 1")
    return int(connection.execute("SELECT revision FROM state").fetchone()[0])


def expire(connection: sqlite3.Connection) -> None:
    """Delete leases that are over, with what hangs on them; instances' leases `REMEMBERED_S` later."""
    now = time.monotonic()
    # A lease that ends later than its length allows was granted by a clock that has started again since.
    over = (
        "expires > :now + ttl_s OR expires <= :now AND"
        " (expires <= :now - :remembered_s OR NOT EXISTS (SELECT 1 FROM instance WHERE instance.lease = lease.id))"
    )
    if connection.execute(f"DELETE FROM lease WHERE {over}", {"now": now, "remembered_s": REMEMBERED_S}).rowcount:
        next_revision(connection)


def supersede(connection: sqlite3.Connection, service: str, instance_id: str) -> None:
    """Delete lapsed leases of an instance that registers anew."""
    which = "SELECT lease FROM instance WHERE service = ? AND id = ?"
    now = time.monotonic()
    connection.execute(f"DELETE FROM lease WHERE expires <= ? AND id IN ({which})", (now, service, instance_id))


def grant(connection: sqlite3.Connection, ttl_s: float) -> int:
    """Grant a lease; return its id."""
    lease, expires = secrets.randbits(62), time.monotonic() + ttl_s
    connection.execute("INSERT INTO lease (id, ttl_s, expires) VALUES (?, ?, ?)", (lease, ttl_s, expires))
    return lease


def renew(connection: sqlite3.Connection, lease: int) -> bool:
    """Renew a lease; False if it is over."""
    now = time.monotonic()
    cursor = connection.execute("UPDATE lease SET expires = ttl_s + ? WHERE id = ? AND expires > ?", (now, lease, now))
    return cursor.rowcount == 1


def first_expiry(connection: sqlite3.Connection) -> float:
    """Return the monotonic time at which the first lease is over unless it is renewed; infinite without leases."""
    found = connection.execute("SELECT min(expires) FROM lease").fetchone()[0]
    return float("inf") if found is None else float(found)


def prolong(connection: sqlite3.Connection, by_s: float) -> None:
    """Let every lease end so much later, but not later than a lease that is granted now."""
    connection.execute("UPDATE lease SET expires = min(expires + ?, ttl_s + ?)", (by_s, time.monotonic()))


def renew_all(connection: sqlite3.Connection) -> None:
    """Renew every lease that is in the file, also what is over."""
    connection.execute("UPDATE lease SET expires = ttl_s + ?", (time.monotonic(),))


def revoke(connection: sqlite3.Connection, lease: int) -> None:
    """End a lease now, with what hangs on it."""
    if connection.execute("DELETE FROM lease WHERE id = ?", (lease,)).rowcount:
        next_revision(connection)
