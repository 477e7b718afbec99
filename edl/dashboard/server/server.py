"""Serves the page from threads of its own, until it is closed.

What does not belong here: what is answered (`app`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from typing_extensions import Self

from edl.background import start_call
from edl.dashboard.metrics import DashboardMetrics, ServerFigures
from edl.dashboard.server.access import HostCheck, TokenCookieCheck
from edl.dashboard.server.app import Pages, make_app
from edl.dashboard.server.connections import ConnectionLimit, RequestRecord
from edl.dashboard.server.event_stream import HEARTBEAT_S, EventStreams
from edl.dashboard.server.look_loop import LookLoop
from edl.dashboard.server.settings import DashboardSettings
from edl.dashboard.server.static_files import read_static_files
from edl.dashboard.state import StateReader
from edl.dashboard.state.cluster.view import ClusterView
from edl.errors import SettingsError
from edl.protocol.tls import certificates
from edl.protocol.tls.credentials import CHECK_EVERY_S, CredentialFiles

__all__ = ["DashboardServer"]

logger = logging.getLogger(__name__)

_START_S: Final = 30.0
"""To listen; it takes milliseconds, unless the name of the host is asked of a DNS that does not answer."""
_STOP_S: Final = 5.0
"""For open connections and a look under way, each."""
_KEEPALIVE_S: Final = 75.0
"""Of a connection between two requests: browsers keep theirs about as long."""
_BACKLOG: Final = 128
"""Connections that wait to be taken."""
_REMEDIES: Final = {
    errno.EADDRINUSE: "another --port does, or 0 for a free port",
    errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 is for this machine, 0.0.0.0 for others too",
    errno.EACCES: "a port above 1023 needs no privileges",
}


class DashboardServer:
    """Serves the page of a Store.

    A Store that is away is no error: the page says so, and shows what was known last.

    Args:
        settings: where, and to whom.
        registries: whose metrics `/metrics` shows too.
        heartbeat_s: between two heartbeats of the stream of events.
        write_s: in which a client of it must take an event.

    Raises:
        SettingsError: the address cannot be listened on, or a file of the credentials cannot be used.
    """

    def __init__(
        self,
        settings: DashboardSettings,
        registries: Iterable[CollectorRegistry] = (),
        *,
        heartbeat_s: float = HEARTBEAT_S,
        write_s: float = 30.0,
    ) -> None:
        self._settings = settings
        self._credentials = CredentialFiles.of(settings.credentials, serving=True)
        self._registries = tuple(registries)
        self._streams_s = (heartbeat_s, write_s)
        self._stopping = asyncio.Event()
        self._reader = StateReader(
            settings.store,
            registry_url=settings.registry,
            job=settings.job,
            credentials=settings.store_credentials,
            cluster=ClusterView(settings.kube, settings.kube_namespaces) if settings.kube is not None else None,
        )
        try:
            self._reader.open()
        except SettingsError:
            self._reader.close()
            raise
        self._loop = asyncio.new_event_loop()
        self._tls_context: ssl.SSLContext | None = None
        self._started: Future[int] = Future()
        self._running = start_call("edl-dashboard", self._run)
        try:
            self.port = self._started.result(_START_S)
        except FutureTimeoutError:
            raise SettingsError(f"cannot listen on {settings.host}:{settings.port} within {_START_S:.0f} s") from None
        if not settings.local and not settings.credentials.token_file:
            logger.warning(
                "the page listens on %s without a token: who reaches this port sees the jobs' names, hosts and "
                "errors; set --token-file (docs/dashboard.md)",
                settings.host,
            )

    @property
    def url(self) -> str:
        """Where a browser on this machine finds the page."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self._settings.host, self._settings.host)
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"{'https' if self._tls else 'http'}://{shown}:{self.port}/"

    def close(self) -> None:
        """Stop listening, and end all connections. May be called twice."""
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._stopping.set)
            except RuntimeError:
                return  # it has ended meanwhile
        self._running.result(2 * _STOP_S + _START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _tls(self) -> bool:
        return self._credentials is not None and self._credentials.tls

    def _run(self) -> None:
        """Run the event loop until `close`."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as exc:  # raised where the caller waits for the start
            if self._started.done():
                raise
            self._started.set_exception(exc)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _serve(self) -> None:
        settings = self._settings
        looks = LookLoop(self._reader, self._loop)
        heartbeat_s, write_s = self._streams_s
        streams = EventStreams(looks, heartbeat_s=heartbeat_s, write_s=write_s)
        metrics = DashboardMetrics(
            lambda: looks.latest.state if looks.latest is not None else None,
            lambda: ServerFigures(self._reader.looks, looks.look_s, streams.clients),
            self._registries,
        )
        try:
            tokens = None
            if self._credentials is not None and self._credentials.settings.token_file:
                tokens = TokenCookieCheck(self._credentials, settings.port)
            hosts = HostCheck(settings.local, settings.allowed_hosts)
            pages = Pages(looks, metrics, read_static_files(), tokens, self._tls)
            app = make_app(pages, streams, hosts, tokens)
            runner = web.AppRunner(
                app,
                access_log=None,
                logger=_http_logger(),
                handle_signals=False,
                keepalive_timeout=_KEEPALIVE_S,
                shutdown_timeout=_STOP_S,
            )
            requests = RequestRecord()
            app.on_response_prepare.append(requests.add)
            await runner.setup()
            assert runner.server is not None
            connections = ConnectionLimit(runner.server, requests)
            listener: asyncio.Server | None = None
            try:
                listener = await self._listen(connections)
                await self._wait_until_stopped(connections)
            finally:
                if listener is not None:
                    listener.close()
                await looks.end()
                await runner.cleanup()
        finally:
            await asyncio.wrap_future(start_call("edl-dashboard-close", lambda: looks.close(_STOP_S)))

    async def _listen(self, connections: ConnectionLimit) -> asyncio.Server:
        settings = self._settings
        context = self._context()
        try:
            listener = await self._loop.create_server(
                connections.make_protocol, settings.host or None, settings.port, ssl=context, backlog=_BACKLOG
            )
        except OSError as exc:
            code = exc.errno if exc.errno is not None else -1
            remedy = _REMEDIES.get(code, "give --host an address of this machine")
            why = os.strerror(code) if code in errno.errorcode else str(exc)
            raise SettingsError(f"cannot listen on {settings.host}:{settings.port}: {why}; {remedy}") from exc
        self._tls_context = context
        self._started.set_result(int(listener.sockets[0].getsockname()[1]))
        return listener

    async def _wait_until_stopped(self, connections: ConnectionLimit) -> None:
        """Wait for `close`; silent connections are closed and certificates that are replaced meanwhile are taken up."""
        version = self._credentials.current().version if self._credentials is not None else 0
        while not self._stopping.is_set():
            try:
                await asyncio.wait_for(self._stopping.wait(), CHECK_EVERY_S)
            except asyncio.TimeoutError:
                connections.close_silent()
                if self._credentials is not None and self._tls_context is not None:
                    material = self._credentials.current()
                    if material.version != version and material.pair is not None:
                        version = material.version
                        certificates.load_pair(self._tls_context, *material.pair)

    def _context(self) -> ssl.SSLContext | None:
        """Return what HTTPS is served with; None for HTTP."""
        if self._credentials is None or not self._tls:
            return None
        material = self._credentials.current(now=True)
        return certificates.context_for(material.ca, material.pair, serving=True)


def _http_logger() -> logging.Logger:
    """Return a logger without what clients do wrong: anybody could fill the log with requests that are none."""
    found = logging.getLogger(f"{__name__}.http")
    found.addFilter(_is_our_error)
    return found


def _is_our_error(record: logging.LogRecord) -> bool:
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, (HttpProcessingError, ConnectionError))
