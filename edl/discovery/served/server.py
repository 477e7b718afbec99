"""Serves a store: a gRPC server over a SQLite file, with an event loop in its own thread.

All calls are answered in the loop's thread, and no call waits inside a transaction. No other process should write to
the file, so the server can push changes to watches at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.discovery.records import check_ttl
from edl.discovery.served.addresses import ListenAddress, PortTakenError
from edl.discovery.served.store import FORMAT, SERVICE
from edl.discovery.sqlite import RowClaim, SqliteStore
from edl.discovery.store import Store, check_key, check_prefix, check_value
from edl.errors import ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.grpc_server import LoopServer, make_server
from edl.protocol import store as messages
from edl.protocol.channel import listen
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc

logger = logging.getLogger(__name__)

_STOP_S: Final = 0.2
"""How long pending calls may take to end. Watches do not end by themselves, and clients retry elsewhere."""
_RETURN_S: Final = 3.0
"""How long clients of the previous server may take to connect: three times their longest pause between attempts."""
_FILE_S: Final = 1.0
"""How long a transaction may wait for another process; no other process should use the file."""
_OPTIONS: Final = (("grpc.max_receive_message_length", 1 << 20),)  # four times the largest value
TICK_S: Final = 0.1
"""How often the server checks for expired leases, so other processes see a death up to this much later. Each check
takes 20 µs."""
PAUSE_S: Final = 0.3
"""A tick that is this late means that the process stalled (garbage collection, a stopped or swapping machine) and read
no renewals, so all leases are extended by the pause. The value is less than a quarter of a 1.5 s lease, because a
client renews its lease after a quarter of the lease length."""
_CHUNK_NBYTES: Final = 1 << 20
"""Size of a message: gRPC refuses more than 4 MiB by default, and the last entry may exceed this size by 256 KiB."""
_CHUNK_ENTRIES: Final = 1000
"""Entries per message: with this limit, many small entries block the server for milliseconds at most."""

Context = Any


@dataclass(frozen=True)
class StoreLimits:
    """Limits that keep a runaway client from filling the server's memory."""

    keys: int = 20_000  # a job has about ten, and two for every node; a teacher has two
    nbytes: int = 32 << 20  # of all values; an agent's file is in memory, of which containers often have 64 MB
    leases: int = 10_000  # a node has one, a teacher two
    watches: int = 10_000  # a node has two


class StoreServicer:
    """Answers requests to a store: `_name` answers the method NAME of store.proto.

    A new servicer first renews all leases: their holders could not renew them while no process served the store.
    """

    def __init__(self, store: SqliteStore, limits: StoreLimits, name: str, rings: SeriesRings) -> None:
        self._store = store
        self._rings = rings
        self._file = store.file
        self._limits = limits
        self._name = name
        self._seen = (-1, -1)
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.watches: set[object] = set()
        self._ending = False
        self._ticked_at = time.monotonic()
        self._complaint = ""
        self._prolong("UPDATE lease SET expires = ttl_s + :now", {})

    def end(self) -> None:
        """End every watch."""
        self._ending = True
        self._notify()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handlers of all methods."""
        hello: Any = messages.HelloRequest.DESCRIPTOR
        handlers: dict[str, Any] = {}
        for method in hello.file.services_by_name[SERVICE.rpartition(".")[2]].methods:
            request, reply = (getattr(messages, kind.name) for kind in (method.input_type, method.output_type))
            answer, make = getattr(self, f"_{method.name.lower()}"), grpc.unary_stream_rpc_method_handler
            if not method.server_streaming:
                answer, make = partial(self._answer, answer, reply), grpc.unary_unary_rpc_method_handler
            handlers[method.name] = make(answer, request.FromString, reply.SerializeToString)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    async def tick(self) -> None:
        """End expired leases, and notify watches, until this task is cancelled."""
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
                    logger.warning("the store that this process serves cannot be written: %s", exc)

    def _catch_up(self) -> None:
        """Extend all leases by the time during which this process stalled and read no renewals."""
        late_s = time.monotonic() - self._ticked_at
        if late_s <= PAUSE_S:
            return
        # No lease ends later than one granted now.
        self._prolong("UPDATE lease SET expires = min(expires + :by, ttl_s + :now)", {"by": late_s})
        self._ticked_at = time.monotonic()

    def _prolong(self, update: str, values: dict[str, float]) -> None:
        """Set new expiry times of leases, even of expired ones."""
        with self._file.write(lambda connection: connection.execute(update, {"now": time.monotonic(), **values})):
            pass

    def _expire(self) -> None:
        """End expired leases, and wake the watches if a transaction ended some leases, or if the file is new."""
        if self._store.first_expiry() <= time.monotonic():
            with self._file.write():
                pass
        seen = (self._file.data_version()[0], self._ask("SELECT revision FROM state")[0])
        if seen != self._seen:
            self._seen = seen
            self._notify()

    def _notify(self) -> None:
        """Wake every watch after a change."""
        changed, self._changed = self._changed, self._changed.get_loop().create_future()
        changed.set_result(None)

    # --- Calls ---

    async def _answer(
        self, answer: Callable[[Any], Any], reply: Callable[[], Any], request: Any, context: Context
    ) -> Any:
        """Answer a call. Awaits nothing, so calls do not interleave."""
        with _refusing(context):
            self._catch_up()
            return answer(request)
        return reply()  # gRPC does not send it with a refusal

    def _hello(self, request: messages.HelloRequest) -> messages.HelloReply:
        return messages.HelloReply(format=FORMAT, server=self._name, hostname=socket.gethostname())

    def _get(self, request: messages.GetRequest) -> messages.GetReply:
        entry = self._store.read(check_key(request.key))
        if entry is None:
            return messages.GetReply()
        return messages.GetReply(entry=messages.StoreEntry(key=entry.key, value=entry.value, version=entry.version))

    def _set(self, request: messages.SetRequest) -> messages.SetReply:
        key, value = check_key(request.key), check_value(request.value)
        claim = RowClaim(self._file, request.lease) if request.HasField("lease") else None
        expected = request.version if request.HasField("version") else None
        outcome = messages.SetReply.Outcome
        self._check_room(key, len(value))
        try:
            entry = self._store.write(key, value, expected, claim)
        except LeaseLostError:
            return messages.SetReply(outcome=outcome.LEASE_LOST)
        except ConflictError:
            return messages.SetReply(outcome=outcome.HELD)
        if entry is None:
            return messages.SetReply(outcome=outcome.OTHER_VERSION)
        self._notify()
        return messages.SetReply(outcome=outcome.WRITTEN, version=entry.version)

    def _delete(self, request: messages.DeleteRequest) -> messages.DeleteReply:
        deleted = self._store.remove(check_key(request.key), request.version if request.HasField("version") else None)
        self._notify()
        return messages.DeleteReply(deleted=deleted)

    def _grant(self, request: messages.GrantRequest) -> messages.GrantReply:
        if self._ask("SELECT count(*) FROM lease")[0] >= self._limits.leases:
            raise _FullError(f"it already has {self._limits.leases:,} leases")
        return messages.GrantReply(lease=self._store.grant(check_ttl(request.ttl_s)).number)

    def _renew(self, request: messages.RenewRequest) -> messages.RenewReply:
        return messages.RenewReply(renewed=RowClaim(self._file, request.lease).renew())

    def _revoke(self, request: messages.RevokeRequest) -> messages.RevokeReply:
        RowClaim(self._file, request.lease).withdraw()
        self._notify()
        return messages.RevokeReply()

    async def _series(self, _: messages.SeriesRequest, __: Context) -> AsyncIterator[messages.SeriesReply]:
        for reply in self._rings.replies():
            yield reply

    async def _watch(self, request: messages.WatchRequest, context: Context) -> AsyncIterator[messages.WatchReply]:
        """Send the entries under a prefix, then every change."""
        watch = object()
        with _refusing(context):
            prefix = check_prefix(request.prefix)
            if len(self.watches) >= self._limits.watches:
                raise _FullError(f"it already has {self._limits.watches:,} watches")
            if not request.once:
                self.watches.add(watch)
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
                raise _EndingError("this server is stopping")
            finally:
                self.watches.discard(watch)

    def _differences(self, prefix: str, sent: dict[str, int], first: bool) -> list[messages.WatchReply]:
        """Return the changes since `sent`, and update `sent`; if `first`, return at least one message."""
        entries = self._store.read_all(prefix)
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

    def _check_room(self, key: str, nbytes: int) -> None:
        keys, held = self._ask("SELECT count(*), coalesce(sum(length(value)), 0) FROM entry")
        if keys >= self._limits.keys and self._store.read(key) is None:
            raise _FullError(f"it already has {self._limits.keys:,} keys")
        if held + nbytes > self._limits.nbytes:
            raise _FullError(f"its values would exceed {self._limits.nbytes:,} bytes in total")

    def _ask(self, query: str) -> Any:
        with self._file.read() as connection:
            return connection.execute(query).fetchone()


class _FullError(Exception):
    """A limit of this server is reached."""


class _EndingError(Exception):
    """This server is stopping."""


@contextlib.contextmanager
def _refusing(context: Context) -> Iterator[None]:
    """Turn errors into gRPC errors.

    This does not use `context.abort`, because its exception keeps the server alive until the next garbage collection.
    """
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


# --- Metrics of the last hours ---

Sample = Mapping[str, Mapping[str, float | None]]
"""A point for each series, by the series' name: the values of the fields by name; None if a value is unknown."""

EVERY_S: Final = 10.0
KEPT_S: Final = 4 * 3600.0
_MOST_POINTS: Final = int(KEPT_S / EVERY_S)
_MOST_SERIES: Final = 256
_MOST_FIELDS: Final = 15


class SeriesRings:
    """Keeps the metrics of the last hours in memory: a ring of points for each series. Thread-safe.

    These metrics show what happened before an incident, without Prometheus. A series has a point every 10 s for 4 h,
    and is forgotten 4 h after its last point, or when there are too many series. A point has at most 16 numbers of 8
    bytes, so a series takes at most 200 KB, and all series take at most 50 MB. The recorder defines what the numbers
    mean.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rings: dict[str, tuple[tuple[str, ...], array[float]]] = {}

    def record(self, sample: Sample) -> None:
        """Add a point with the current time to each series of the sample; drop the oldest points and series."""
        now_s = self._clock()
        with self._lock:
            for name, point in sample.items():
                fields = ("t", *sorted(point)[:_MOST_FIELDS])
                ring = self._rings.pop(name, None)  # reinserted, so that the first is the one without news for longest
                if ring is None or ring[0] != fields:
                    ring = fields, array("d")
                known = (point[field] for field in fields[1:])
                ring[1].extend((now_s, *(math.nan if value is None else value for value in known)))
                del ring[1][: -_MOST_POINTS * len(fields)]
                self._rings[name] = ring
            for name, (fields, values) in list(self._rings.items()):
                if len(self._rings) > _MOST_SERIES or values[-len(fields)] < now_s - KEPT_S:
                    del self._rings[name]

    def replies(self) -> Iterator[messages.SeriesReply]:
        """Yield a message per series."""
        with self._lock:
            names = list(self._rings)
        for name in names:
            with self._lock:
                fields, values = self._rings.get(name, ((), array("d")))
                reply = messages.SeriesReply(name=name, fields=fields, values=values)
            yield reply


# --- The server ---


class StoreServer(LoopServer):
    """Serves the store in a file until closed. Other processes may use the file, but only one may serve it.

    `sample` is called about every 10 s, in its own thread; it returns the metrics that the server keeps for some hours.

    Raises:
        PortTakenError: Another program is listening at the address.
        SettingsError: The address or the file cannot be used.
        DiscoveryError: The file cannot be opened just now.
    """

    def __init__(
        self,
        path: str,
        address: ListenAddress,
        files: CredentialFiles | None = None,
        limits: StoreLimits | None = None,
        sample: Callable[[Store], Sample] | None = None,
    ) -> None:
        super().__init__()
        self.name: Final = secrets.token_hex(8)
        self.port = 0
        self._address = address
        self._files = files
        self._limits = limits or StoreLimits()
        self._rings = SeriesRings()
        self._servicer: StoreServicer | None = None
        address.check_free()
        self._store = self._own(SqliteStore(path, timeout_s=_FILE_S))
        self._expected_until = time.monotonic() + _RETURN_S if self.holds("") else 0.0
        # Closed before the file: parts are closed from the last to the first.
        self._start("edl-store-server", f"the store at {address.endpoint}")
        if sample is not None:
            self._own(BackgroundLoop("edl-store-series", lambda: self._record(sample)))

    @property
    def needed(self) -> bool:
        """Whether there are clients: a live agent has watches, and an agent that should return still has its lease."""
        if self._servicer is not None and self._servicer.watches:
            return True
        if time.monotonic() < self._expected_until:
            return True
        try:
            return self._store.first_expiry() < float("inf")
        except DiscoveryError:
            return False

    @property
    def failed(self) -> bool:
        """Whether the server has ended without being closed."""
        return self.failure is not None

    def holds(self, prefix: str) -> bool:
        """Return whether any keys start with `prefix`. Thread-safe."""
        try:
            return bool(self._store.read_all(prefix))
        except DiscoveryError:
            return False

    def _record(self, sample: Callable[[Store], Sample]) -> float:
        try:
            self._rings.record(sample(self._store))
        except DiscoveryError as exc:
            logger.debug("the current metrics were not recorded: %s", exc)
        return EVERY_S

    async def _serve(self) -> None:
        servicer = StoreServicer(self._store, self._limits, self.name, self._rings)
        server = make_server(self._files, servicer.handler(), _OPTIONS)
        try:
            self.port = listen(server, self._address.endpoint, self._files)
        except RuntimeError as exc:
            raise PortTakenError(f"the store cannot listen at {self._address.endpoint}: {exc}") from exc
        ticking = asyncio.create_task(servicer.tick())
        try:
            await server.start()
            self._servicer = servicer
            self._started.set()
            await self._stop.wait()
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            servicer.end()
            await server.stop(_STOP_S)
