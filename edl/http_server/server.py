"""Serves an aiohttp application in its own thread, with TLS and a limit on connections.

Idle connections must not exhaust the process's file descriptors: their number is limited, and connections that never
send a request are closed. `access` decides which requests an application answers.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import logging
import os
import resource
import ssl
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import Self

from edl.background import start_call
from edl.errors import ClosedError, SettingsError
from edl.protocol.tls import CHECK_EVERY_S, CredentialFiles, context_for, load_pair

_SILENCE_S: Final = 10.0
"""Time within which a request must arrive on a new connection: a browser sends it immediately, or reconnects."""
_START_S: Final = 30.0
"""Timeout for starting to listen: this takes milliseconds, unless the host's name needs a DNS server that does not
respond."""
STOP_S: Final = 5.0
"""Time for open connections to finish when a server stops."""
_KEEPALIVE_S: Final = 75.0
"""How long a connection may be idle between requests: browsers keep idle connections for about this time."""
_BACKLOG: Final = 128
"""Maximum number of connections waiting to be accepted."""
_REMEDIES: Final = {
    errno.EADDRINUSE: "choose another --port, or 0 for a free port",
    errno.EADDRNOTAVAIL: "this machine has no such address; use 127.0.0.1, or 0.0.0.0 to let others connect",
    errno.EACCES: "choose a port above 1023, which needs no privileges",
}


class _Connections:
    """Creates a protocol per connection, up to `most` or half the open-file limit; closes silent connections."""

    server: web.Server

    def __init__(self, most: int) -> None:
        self._most = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._since: dict[asyncio.BaseProtocol, float] = {}  # aiohttp's protocols do not support weak references
        self._heard: set[asyncio.BaseProtocol] = set()  # those that have sent a request

    async def note_request(self, request: web.BaseRequest, _: web.StreamResponse | None = None) -> None:
        """Record that a connection is not silent; called for each request, at the latest before its response."""
        self._heard.add(request.protocol)

    @web.middleware
    async def note_early(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Record a request before it is handled."""
        await self.note_request(request)
        return await handler(request)

    def make_protocol(self) -> asyncio.BaseProtocol:
        """Return a new connection's protocol; if there are too many connections, the protocol closes it at once."""
        if len(self.server.connections) >= self._most:
            return _RefusedConnection()
        made = self.server()
        self._since[made] = time.monotonic()
        return made

    def close_silent(self) -> None:
        """Close connections that have not sent a request in time."""
        now = time.monotonic()
        present = self.server.connections
        self._heard.intersection_update(present)
        self._since = {protocol: self._since.get(protocol, now) for protocol in present}
        for protocol in present:
            transport = protocol.transport
            if protocol not in self._heard and now - self._since[protocol] > _SILENCE_S and transport is not None:
                transport.abort()


class _RefusedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class AppServer(abc.ABC):
    """Serves an application in its own thread, from `start` until `close`.

    With `port` 0, the server chooses a free port; after `start`, the attribute `port` contains the chosen port. Without
    `credentials`, it serves plain HTTP.
    """

    def __init__(
        self, name: str, host: str, port: int, credentials: CredentialFiles | None, most_connections: int
    ) -> None:
        self.port = port
        self._name = name
        self._host = host
        self._credentials = credentials
        self._most_connections = most_connections
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._tls_context: ssl.SSLContext | None = None
        self._started: Future[int] = Future()
        self._running: Future[None] | None = None

    @abc.abstractmethod
    async def serve(self) -> None:
        """Create the application, await `run_app`, and clean up. Runs in the server's thread."""

    def start(self) -> None:
        """Start to listen (call this once); raise SettingsError if the server cannot listen on the address."""
        if self._running is not None:
            raise ClosedError("a server that was started before cannot be restarted: create a new one")
        self._loop = asyncio.new_event_loop()
        self._running = start_call(self._name, self._run)
        try:
            self.port = self._started.result(_START_S)
        except FutureTimeoutError:
            raise SettingsError(f"not listening on {self._host}:{self.port} after {_START_S:.0f} s") from None

    @property
    def url(self) -> str:
        """URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(self._host, self._host)
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"{'https' if self._tls else 'http'}://{shown}:{self.port}/"

    def close(self) -> None:
        """Stop listening, and end all connections. May be called twice."""
        if self._running is None:
            return
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._stopping.set)
            except RuntimeError:
                return  # the loop has ended meanwhile
        self._running.result(2 * STOP_S + _START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def run_app(
        self, app: web.Application, ending: Callable[[], Awaitable[None]] | None = None, *, answers_late: bool = False
    ) -> None:
        """Serve an application until `close`, and await `ending` before open connections are closed.

        `answers_late` means that a response may take long. A connection then counts as having sent a request as soon as
        the head of the request has arrived, and the request's handler is cancelled if the client disconnects. Otherwise
        the connection counts only when its response is about to be sent.
        """
        connections = _Connections(self._most_connections)
        if answers_late:
            app.middlewares.insert(0, connections.note_early)
        app.on_response_prepare.append(connections.note_request)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_logger(),
            handle_signals=False,
            handler_cancellation=answers_late,
            keepalive_timeout=_KEEPALIVE_S,
            auto_decompress=False,  # some kilobytes could become megabytes before any check
            shutdown_timeout=STOP_S,
        )
        await runner.setup()
        assert runner.server is not None
        connections.server = runner.server
        listener: asyncio.Server | None = None
        try:
            listener = await self._listen(connections)
            await self._wait_until_stopped(connections)
        finally:
            if listener is not None:
                listener.close()
            if ending is not None:
                await ending()
            await runner.cleanup()

    @property
    def _tls(self) -> bool:
        return self._credentials is not None and self._credentials.tls

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self.serve())
        except BaseException as exc:  # raised again in `start`
            if self._started.done():
                raise
            self._started.set_exception(exc)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _listen(self, connections: _Connections) -> asyncio.Server:
        context = self._context()
        try:
            listener = await self._loop.create_server(
                connections.make_protocol, self._host or None, self.port, ssl=context, backlog=_BACKLOG
            )
        except OSError as exc:
            code = exc.errno if exc.errno is not None else -1
            remedy = _REMEDIES.get(code, "give --host an address of this machine")
            why = os.strerror(code) if code in errno.errorcode else str(exc)
            raise SettingsError(f"cannot listen on {self._host}:{self.port}: {why}; {remedy}") from exc
        self._tls_context = context
        self._started.set_result(int(listener.sockets[0].getsockname()[1]))
        return listener

    async def _wait_until_stopped(self, connections: _Connections) -> None:
        """Wait for `close`; meanwhile close silent connections and reload replaced certificates."""
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
                        load_pair(self._tls_context, *material.pair)

    def _context(self) -> ssl.SSLContext | None:
        if self._credentials is None or not self._tls:
            return None
        material = self._credentials.current(now=True)
        return context_for(material.ca, material.pair, serving=True)


def _http_logger() -> logging.Logger:
    """Return a logger that omits client errors: clients could otherwise fill the log with invalid requests."""
    found = logging.getLogger(f"{__name__}.http")
    found.addFilter(_is_our_error)
    return found


def _is_our_error(record: logging.LogRecord) -> bool:
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, (HttpProcessingError, ConnectionError))
