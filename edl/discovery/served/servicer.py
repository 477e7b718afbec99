"""Answers the calls of a served Store. All calls are for an event loop's thread; none waits inside a transaction."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from edl.discovery.keys import check_key, check_prefix, check_value
from edl.discovery.records import check_ttl
from edl.discovery.served.target import FORMAT, SERVICE
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
from edl.discovery.sqlite.leases import first_expiry, grant, prolong, renew, renew_all, revoke
from edl.errors import ConflictError, DiscoveryError, SettingsError
from edl.protocol import store as messages
from edl.protocol.transport import grpc

__all__ = ["StoreLimits", "StoreServicer"]

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1
"""How often the server looks for leases that are over: others see a death so much later. A look takes 20 µs."""
PAUSE_S: Final = 0.3
"""A tick that comes so late says that the process stood still (garbage collection, a stopped or swapping machine). The
renewals that came meanwhile have not been read, so the leases do not count the pause. Below the fourth of a lease of
1.5 s, after which a client renews."""
_CHUNK_NBYTES: Final = 1 << 20
"""Of a message: gRPC refuses more than 4 MiB unless told otherwise, and an entry may exceed the chunk by 256 KiB."""
_CHUNK_ENTRIES: Final = 1000
"""Of a message: what small entries cost beside their bytes holds the server up for milliseconds at most."""

Context = Any


@dataclass(frozen=True)
class StoreLimits:
    """What a server takes before it refuses, so that a client that runs wild does not fill the host's memory.

    Attributes:
        keys: a job has some ten, and two for every node.
        nbytes: of all values together; the file lies in memory, of which containers often have 64 MB.
        leases: a node has a single lease.
        watches: a node has two.
    """

    keys: int = 20_000
    nbytes: int = 32 << 20
    leases: int = 10_000
    watches: int = 10_000


class StoreServicer:
    """Answers from a file that no other process writes meanwhile: what changes is pushed at once.

    Args:
        file: leases in it begin anew, since their holders could not renew while it was not served.
        limits: what is refused.
        name: tells this server from others.
    """

    def __init__(self, file: SqliteFile, limits: StoreLimits, name: str) -> None:
        self._file = file
        self._limits = limits
        self._name = name
        self._seen = (-1, -1)
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watches: set[object] = set()
        self._ending = False
        self._ticked_at = time.monotonic()
        self._complaint = ""
        with self._file.write(renew_all):
            pass

    @property
    def watches(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    def end(self) -> None:
        """Let every watch end."""
        self._ending = True
        self._notify()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what gRPC's server wants to know."""
        unary: dict[str, tuple[Callable[..., Any], Any, Any]] = {
            "Hello": (self._hello, messages.HelloRequest, messages.HelloReply),
            "Get": (self._get, messages.GetRequest, messages.GetReply),
            "Set": (self._set, messages.SetRequest, messages.SetReply),
            "Delete": (self._delete, messages.DeleteRequest, messages.DeleteReply),
            "Grant": (self._grant, messages.GrantRequest, messages.GrantReply),
            "Renew": (self._renew, messages.RenewRequest, messages.RenewReply),
            "Revoke": (self._revoke, messages.RevokeRequest, messages.RevokeReply),
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                partial(self._answer, answer, reply), request.FromString, lambda reply: reply.SerializeToString()
            )
            for name, (answer, request, reply) in unary.items()
        }
        handlers["Watch"] = grpc.unary_stream_rpc_method_handler(
            self._watch, messages.WatchRequest.FromString, lambda reply: reply.SerializeToString()
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def tick(self) -> None:
        """End leases that are over, and tell watches of it, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._catch_up()
                self._expire()
                self._ticked_at = time.monotonic()
                self._complaint = ""
            except DiscoveryError as exc:
                if str(exc) != self._complaint:
                    self._complaint = str(exc)
                    logger.warning("the store that is served here cannot be written: %s", exc)

    def _catch_up(self) -> None:
        """Let no lease end for a time in which this process stood still, and read no renewals."""
        late_s = time.monotonic() - self._ticked_at
        if late_s <= PAUSE_S:
            return
        with self._file.write(lambda connection: prolong(connection, late_s)):
            pass
        self._ticked_at = time.monotonic()

    def _expire(self) -> None:
        """End leases that are over, and have watches look where a transaction ended some, or the file is new."""
        with self._file.read() as connection:
            due = first_expiry(connection) <= time.monotonic()
        if due:
            with self._file.write():
                pass
        with self._file.read() as connection:
            revision = connection.execute("SELECT revision FROM state").fetchone()[0]
        seen = (self._file.data_version()[0], revision)
        if seen != self._seen:
            self._seen = seen
            self._notify()

    def _notify(self) -> None:
        """Have every watch look. They do so after the call that changes something, which waits for nothing."""
        changed, self._changed = self._changed, self._changed.get_loop().create_future()
        changed.set_result(None)

    # --- Calls. ---

    async def _answer(
        self, answer: Callable[[Any], Any], reply: Callable[[], Any], request: Any, context: Context
    ) -> Any:
        """Answer a call. It waits for nothing, so that calls do not come between each other."""
        with _refusing(context):
            self._catch_up()
            return answer(request)
        return reply()  # which gRPC does not send beside a refusal

    def _hello(self, request: messages.HelloRequest) -> messages.HelloReply:
        return messages.HelloReply(format=FORMAT, server=self._name, hostname=socket.gethostname())

    def _get(self, request: messages.GetRequest) -> messages.GetReply:
        with self._file.read() as connection:
            entry = read_entry(connection, check_key(request.key))
        if entry is None:
            return messages.GetReply()
        return messages.GetReply(entry=messages.StoreEntry(key=entry.key, value=entry.value, version=entry.version))

    def _set(self, request: messages.SetRequest) -> messages.SetReply:
        key, value = check_key(request.key), check_value(request.value)
        lease = request.lease if request.HasField("lease") else None
        outcome = messages.SetReply.Outcome
        with self._file.write() as connection:
            if lease is not None and not has_lease(connection, lease):
                return messages.SetReply(outcome=outcome.LEASE_LOST)
            present = version_of(connection, key)
            if request.HasField("version") and (present or 0) != request.version:
                return messages.SetReply(outcome=outcome.OTHER_VERSION)
            try:
                refuse_foreign(connection, key, lease)
            except ConflictError:
                return messages.SetReply(outcome=outcome.HELD)
            self._check_room(connection, new=present is None, nbytes=len(value))
            entry = write_entry(connection, key, value, lease)
        self._notify()
        return messages.SetReply(outcome=outcome.WRITTEN, version=entry.version)

    def _delete(self, request: messages.DeleteRequest) -> messages.DeleteReply:
        version = request.version if request.HasField("version") else None
        with self._file.write() as connection:
            deleted = delete_entry(connection, check_key(request.key), version)
        self._notify()
        return messages.DeleteReply(deleted=deleted)

    def _grant(self, request: messages.GrantRequest) -> messages.GrantReply:
        ttl_s = check_ttl(request.ttl_s)
        with self._file.write() as connection:
            if connection.execute("SELECT count(*) FROM lease").fetchone()[0] >= self._limits.leases:
                raise _FullError(f"it has {self._limits.leases:,} leases already")
            return messages.GrantReply(lease=grant(connection, ttl_s))

    def _renew(self, request: messages.RenewRequest) -> messages.RenewReply:
        with self._file.write() as connection:
            return messages.RenewReply(renewed=renew(connection, request.lease))

    def _revoke(self, request: messages.RevokeRequest) -> messages.RevokeReply:
        with self._file.write() as connection:
            revoke(connection, request.lease)
        self._notify()
        return messages.RevokeReply()

    async def _watch(self, request: messages.WatchRequest, context: Context) -> AsyncIterator[messages.WatchReply]:
        """Send what is there under a prefix, then what differs from what was sent, as soon as it does."""
        watch = object()
        with _refusing(context):
            prefix = check_prefix(request.prefix)
            if len(self._watches) >= self._limits.watches:
                raise _FullError(f"it has {self._limits.watches:,} watches already")
            if not request.once:
                self._watches.add(watch)
            try:
                sent: dict[str, int] = {}
                first = True
                while not self._ending:
                    self._catch_up()
                    changed = self._changed
                    for reply in self._differences(prefix, sent, first):
                        yield reply
                    if request.once:
                        return
                    first = False
                    await asyncio.shield(changed)
                raise _EndingError("this server ends")
            finally:
                self._watches.discard(watch)

    def _differences(self, prefix: str, sent: dict[str, int], first: bool) -> list[messages.WatchReply]:
        """Yield what has changed since `sent`, which is brought up to date; at least a message the first time."""
        with self._file.read() as connection:
            entries, _ = live_entries(connection, prefix)
        reply, nbytes = messages.WatchReply(deleted=sent.keys() - {entry.key for entry in entries}), 0
        replies = [reply]
        for entry in entries:
            if sent.get(entry.key) == entry.version:
                continue
            if nbytes + len(entry.value) > _CHUNK_NBYTES or len(reply.changed) >= _CHUNK_ENTRIES:
                reply.more = True
                reply, nbytes = messages.WatchReply(), 0
                replies.append(reply)
            reply.changed.add(key=entry.key, value=entry.value, version=entry.version)
            nbytes += len(entry.value)
        sent.clear()
        sent.update((entry.key, entry.version) for entry in entries)
        return replies if first or len(replies) > 1 or reply.changed or reply.deleted else []

    def _check_room(self, connection: sqlite3.Connection, *, new: bool, nbytes: int) -> None:
        keys, held = connection.execute("SELECT count(*), coalesce(sum(length(value)), 0) FROM entry").fetchone()
        if new and keys >= self._limits.keys:
            raise _FullError(f"it has {self._limits.keys:,} keys already")
        if held + nbytes > self._limits.nbytes:
            raise _FullError(f"its values would have more than {self._limits.nbytes:,} bytes together")


class _FullError(Exception):
    """A limit of this server is reached."""


class _EndingError(Exception):
    """This server ends."""


@contextlib.contextmanager
def _refusing(context: Context) -> Iterator[None]:
    """Turn errors into gRPC's. Not by `context.abort`: its error would hold on to the server until it is collected."""
    try:
        yield
    except (SettingsError, DiscoveryError, _FullError, _EndingError) as exc:
        context.set_code(_CODES.get(type(exc), grpc.StatusCode.ABORTED))
        context.set_details(str(exc))


_CODES: Final = {
    SettingsError: grpc.StatusCode.INVALID_ARGUMENT,
    _FullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    _EndingError: grpc.StatusCode.UNAVAILABLE,
}
