"""The serving side of a Store: a gRPC server with an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from typing import Final

from edl.background import BackgroundLoop
from edl.discovery.common.resource import Resource
from edl.discovery.served.listening import ListenAddress, PortTakenError
from edl.discovery.served.servicer import StoreLimits, StoreServicer
from edl.discovery.sqlite.entries import live_entries
from edl.discovery.sqlite.file import SqliteFile
from edl.discovery.sqlite.leases import first_expiry
from edl.errors import DiscoveryError, SettingsError
from edl.protocol.channel import listen
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.token_check import token_checks
from edl.protocol.transport import grpc

__all__ = ["StoreServer"]

logger = logging.getLogger(__name__)

_START_S: Final = 10.0
"""How long it may take to listen: milliseconds, and seconds on a machine that swaps."""
_STOP_S: Final = 0.2
"""What calls under way get to end. Watches do not end by themselves, and clients ask again elsewhere."""
_RETURN_S: Final = 3.0
"""How long clients of the server before, which is no more, may take to connect: three times their longest pause."""
_FILE_S: Final = 1.0
"""How long a transaction may wait for another process; none has business in the file."""
_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.so_reuseport", 0),  # a second server at the same port would get half of the connections
    ("grpc.max_receive_message_length", 1 << 20),  # the largest value has a fourth of it
    ("grpc.keepalive_time_ms", 10_000),  # hosts that vanished are not to hold watches, and whoever waits for their end
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),  # clients ping every 10 s
    ("grpc.http2.max_ping_strikes", 0),
)
_AGE_MS: Final = 3_600_000
"""With TLS or tokens a connection is looked at anew after that long, as a teacher's."""


class StoreServer(Resource):
    """Serves the store in a file until closed. No other process may have the file open meanwhile.

    Args:
        path: the SQLite file, made if it is not there.
        address: where to listen.
        files: certificates and tokens; None for neither.
        limits: what is refused.

    Raises:
        PortTakenError: another program listens there.
        SettingsError: the address or the file cannot be used.
        DiscoveryError: the file cannot be opened just now.
    """

    def __init__(
        self,
        path: str,
        address: ListenAddress,
        files: CredentialFiles | None = None,
        limits: StoreLimits | None = None,
    ) -> None:
        super().__init__()
        self.name: Final = secrets.token_hex(8)
        self.port = 0
        self._address = address
        self._files = files
        self._limits = limits or StoreLimits()
        self._servicer: StoreServicer | None = None
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        address.check_free()
        self._file = self._own(SqliteFile(path, _FILE_S))
        self._expected_until = time.monotonic() + _RETURN_S if self.holds("") else 0.0
        # Closed before the file: parts are closed from the last to the first.
        self._own(BackgroundLoop("edl-store-server", self._run, self._interrupt))
        if not self._started.wait(_START_S):
            self._failure = DiscoveryError(f"the store at {address.endpoint} did not start within {_START_S:g} s")
        if self._failure is not None:
            self.close()
            raise self._failure

    @property
    def needed(self) -> bool:
        """Whether clients are there: every live agent has watches, and where an agent is expected back, its lease."""
        if self._servicer is not None and self._servicer.watches:
            return True
        if time.monotonic() < self._expected_until:
            return True
        try:
            with self._file.read() as connection:
                return first_expiry(connection) < float("inf")
        except DiscoveryError:
            return False

    @property
    def failed(self) -> bool:
        """Whether it has ended, though it was not closed."""
        return self._failure is not None

    def holds(self, prefix: str) -> bool:
        """Whether there are keys that start with `prefix`. For any thread."""
        try:
            with self._file.read() as connection:
                return bool(live_entries(connection, prefix)[0])
        except DiscoveryError:
            return False

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except (DiscoveryError, SettingsError) as exc:
            self._failure = exc
        except Exception as exc:
            logger.exception("the store at %s ended", self._address.endpoint)
            self._failure = exc
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._closed:  # before there was anything to stop
            return
        checks = token_checks(self._files)
        age = [("grpc.max_connection_age_ms", _AGE_MS)] if self._files is not None else []
        server = grpc.aio.server(options=[*_OPTIONS, *age], interceptors=checks)
        servicer = StoreServicer(self._file, self._limits, self.name)
        server.add_generic_rpc_handlers((servicer.handler(),))
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

    def _interrupt(self) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stop.set)
