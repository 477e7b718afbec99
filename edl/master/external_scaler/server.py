"""Listens for KEDA, with TLS and tokens as EDL's other servers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from edl.background import BackgroundLoop
from edl.discovery import Store
from edl.discovery.served.addresses import ListenAddress
from edl.errors import DiscoveryError, EDLError, SettingsError
from edl.master.external_scaler.servicer import ExternalScalerServicer
from edl.protocol.channel import listen
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.token_check import token_checks
from edl.protocol.transport import grpc
from edl.settings import Credentials

__all__ = ["ExternalScalerServer", "ExternalScalerSettings"]

_START_S: Final = 10.0
"""How long it may take to listen: milliseconds, and seconds on a machine that swaps."""
_STOP_S: Final = 0.2
"""What calls under way get to end; KEDA asks again."""
_MOST_CALLS: Final = 1000  # at once: a stream for each of so many objects; more are refused and not kept waiting
_MESSAGE_NBYTES: Final = 64 << 10  # of a request, which holds a few short texts


@dataclass(frozen=True)
class ExternalScalerSettings:
    """Where KEDA reaches the scaler.

    Attributes:
        host: where to listen; `::` for all addresses of this host.
        port: 0 for any.
        credentials: certificates and tokens to serve with. KEDA sends no token: use TLS, mutual if the scaler's port is
            open to others.
    """

    host: str = "127.0.0.1"
    port: int = 0
    credentials: Credentials = field(default_factory=Credentials)


class ExternalScalerServer:
    """Serves `externalscaler.ExternalScaler` in a thread of its own until it is closed.

    Args:
        store: where advisors write what is wanted; stays the caller's to close, after this.
        settings: where to listen.

    Attributes:
        port: where it listens.

    Raises:
        SettingsError: it cannot listen there, or the credentials cannot be used.
        DiscoveryError: another program listens there.
    """

    def __init__(self, store: Store, settings: ExternalScalerSettings) -> None:
        self._servicer = ExternalScalerServicer(store)
        self._files = CredentialFiles.of(settings.credentials, serving=True)
        self._address = ListenAddress(settings.host, settings.port)
        self._address.check_free()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._closing = False
        self.port = 0
        self._thread = BackgroundLoop("edl-scaler", self._run, self._interrupt)
        if not self._started.wait(_START_S):
            self._failure = DiscoveryError(f"the scaler at {self._address.endpoint} did not start in {_START_S:g} s")
        if self._failure is not None:
            self.close()
            raise self._failure

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._closing = True
        self._thread.close()

    def __enter__(self) -> ExternalScalerServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _interrupt(self) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stop.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except EDLError as exc:
            self._failure = exc
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._closing:  # before there was anything to stop
            return
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MESSAGE_NBYTES)]
        server = grpc.aio.server(
            options=options, interceptors=token_checks(self._files), maximum_concurrent_rpcs=_MOST_CALLS
        )
        server.add_generic_rpc_handlers((self._servicer.handler(),))
        try:
            self.port = listen(server, self._address.endpoint, self._files)
        except RuntimeError as exc:
            raise SettingsError(f"the scaler cannot listen at {self._address.endpoint}: {exc}") from exc
        await server.start()
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            await server.stop(_STOP_S)
