"""The registry on a SQLite file: a row per registration, which goes with its lease."""

from __future__ import annotations

import sqlite3
import time

from typing_extensions import override

from edl.discovery.common.renewal import InstanceClaim, RenewedRegistration
from edl.discovery.common.resource import Resource
from edl.discovery.common.service_view import ServiceView, build_snapshot
from edl.discovery.records import check_service, check_ttl, from_json, to_json, validated
from edl.discovery.registry import Instance, Registration, Registry, Snapshot, Watch
from edl.discovery.sqlite.file import SqliteFile
from edl.discovery.sqlite.leases import grant, next_revision, renew, revoke, supersede
from edl.discovery.sqlite.watch import SqliteWatch

__all__ = ["SqliteRegistry"]

# Bound to the monotonic time: see `expire` for the condition.
_HELD = "instance JOIN lease ON lease.id = instance.lease AND lease.expires <= ? + lease.ttl_s"


class SqliteRegistry(Resource, Registry):
    """See `Registry`."""

    def __init__(self, path: str, *, timeout_s: float = 5.0) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._file = self._own(SqliteFile(path, timeout_s))

    def __repr__(self) -> str:
        return f"SqliteRegistry({self._file.path!r})"

    @override
    def register(self, instance: Instance, ttl_s: float = 10.0) -> Registration:
        self._check()
        instance, ttl_s = validated(instance), check_ttl(ttl_s)
        return self._own(RenewedRegistration(_RowClaim(self._file, ttl_s), instance, ttl_s))

    @override
    def snapshot(self, service: str) -> Snapshot:
        self._check()
        service = check_service(service)
        with self._file.read() as connection:
            return _instances(connection, service)[0]

    @override
    def services(self) -> tuple[str, ...]:
        self._check()
        with self._file.read() as connection:
            now = time.monotonic()
            rows = connection.execute(f"SELECT DISTINCT service FROM {_HELD} ORDER BY service", (now,))
            return tuple(service for (service,) in rows)

    @override
    def watch(self, service: str) -> Watch:
        self._check()
        return self._own(_ServiceWatch(self._file.path, self._timeout_s, check_service(service)))


class _RowClaim(InstanceClaim):
    """A row of `instance`, kept for as long as its lease lives."""

    def __init__(self, file: SqliteFile, ttl_s: float) -> None:
        self._file = file
        self._ttl_s = ttl_s
        self._lease = 0

    def announce(self, instance: Instance) -> None:
        with self._file.write() as connection:
            revision, record = next_revision(connection), to_json(instance)
            lease = self._lease
            if renew(connection, lease):
                connection.execute("UPDATE instance SET record = ? WHERE lease = ?", (record, lease))
            else:
                supersede(connection, instance.service, instance.id)
                lease = grant(connection, self._ttl_s)
                connection.execute(
                    "INSERT INTO instance (lease, service, id, registered, record) VALUES (?, ?, ?, ?, ?)",
                    (lease, instance.service, instance.id, revision, record),
                )
        self._lease = lease

    def renew(self) -> bool:
        with self._file.write() as connection:
            return renew(connection, self._lease)

    def withdraw(self) -> None:
        with self._file.write() as connection:
            revoke(connection, self._lease)


class _ServiceWatch(SqliteWatch[Snapshot, Snapshot], Watch):
    def __init__(self, path: str, timeout_s: float, service: str) -> None:
        follower = ServiceView(service)
        super().__init__(
            path,
            timeout_s,
            read=lambda connection: _instances(connection, service),
            answered=lambda snapshot: follower.answered(snapshot, time.monotonic()),
            failed=follower.failed,
            recheck_at=lambda: follower.recheck_at,
        )

    def get(self, timeout_s: float | None = None) -> Snapshot | None:
        return self.take(timeout_s)


def _instances(connection: sqlite3.Connection, service: str) -> tuple[Snapshot, float]:
    """Who is registered, and when the first of them lapses unless it renews."""
    now = time.monotonic()
    rows = connection.execute(
        f"SELECT instance.id, record, expires FROM {_HELD} WHERE service = ? ORDER BY registered", (now, service)
    ).fetchall()
    live = [from_json(service, instance_id, record) for instance_id, record, expires in rows if expires > now]
    lapsed = [from_json(service, instance_id, record) for instance_id, record, expires in rows if expires <= now]
    first = min((expires for *_, expires in rows if expires > now), default=float("inf"))
    return build_snapshot(service, live, lapsed), first
