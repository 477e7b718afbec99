"""An application of aiohttp in a thread of its own: how many connections are open, TLS, the socket.

Idle connections must not take all of the process's descriptors: their number is bounded, and one that never asks for
anything is closed. `access` decides whom an application answers.
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
from collections.abc import Awaitable, Callable, Iterable
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
"""Until a connection must have sent a request: a browser does so at once, or comes again."""
_START_S: Final = 30.0
"""To listen; it takes milliseconds, unless the name of the host is asked of a DNS that does not answer."""
STOP_S: Final = 5.0
"""For open connections when a server ends."""
_KEEPALIVE_S: Final = 75.0
"""How long a connection may stay open between two requests: browsers keep theirs about as long."""
_BACKLOG: Final = 128
"""Connections that wait to be taken."""
_REMEDIES: Final = {
    errno.EADDRINUSE: "another --port does, or 0 for a free port",
    errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 is for this machine, 0.0.0.0 for others too",
    errno.EACCES: "a port above 1023 needs no privileges",
}


class _RequestRecord:
    """Remembers which connections have asked for something, as long as they are open."""

    def __init__(self) -> None:
        self._protocols: set[asyncio.BaseProtocol] = set()

    async def add(self, request: web.BaseRequest, _: web.StreamResponse | None = None) -> None:
        """Add a request's connection; called before its answer is sent at the latest."""
        self._protocols.add(request.protocol)

    def keep(self, present: Iterable[asyncio.BaseProtocol]) -> None:
        """Forget all but the present connections."""
        self._protocols.intersection_update(present)

    def __contains__(self, protocol: object) -> bool:
        return protocol in self._protocols


class _ConnectionLimit:
    """Makes the protocol of every connection, and closes connections that never ask for anything.

    No more than `most` connections are open, or half of what the process may have open if that is less.
    """

    def __init__(self, server: web.Server, requests: _RequestRecord, most: int) -> None:
        self._server = server
        self._most = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._since: dict[asyncio.BaseProtocol, float] = {}  # aiohttp's protocols take no weak references
        self._requests = requests

    def make_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection, which is closed at once where there are too many."""
        if len(self._server.connections) >= self._most:
            return _RefusedConnection()
        made = self._server()
        self._since[made] = time.monotonic()
        return made

    def close_silent(self) -> None:
        """Close connections that have asked for nothing for too long."""
        now = time.monotonic()
        present = self._server.connections
        self._requests.keep(present)
        self._since = {protocol: self._since.get(protocol, now) for protocol in present}
        for protocol in present:
            transport = protocol.transport
            if protocol not in self._requests and now - self._since[protocol] > _SILENCE_S and transport is not None:
                transport.abort()


class _RefusedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class AppServer(abc.ABC):
    """Serves an application from a thread of its own, from `start` until `close`.

    Args:
        name: Name of the thread.
        host: Name or address to listen on.
        port: Port to listen on; 0 for a free one, which the attribute `port` is after `start`.
        credentials: Certificate and key, and the CAs to trust; None for HTTP.
        most_connections: Largest number of open connections.
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
        """Make the application, await `run_app`, and release what was made. Runs in the thread."""

    def start(self) -> None:
        """Listen; once.

        Raises:
            ClosedError: it was started before.
            SettingsError: the address cannot be listened on.
        """
        if self._running is not None:
            raise ClosedError("a server that was started before cannot be restarted: create a new one")
        self._loop = asyncio.new_event_loop()
        self._running = start_call(self._name, self._run)
        try:
            self.port = self._started.result(_START_S)
        except FutureTimeoutError:
            raise SettingsError(f"cannot listen on {self._host}:{self.port} within {_START_S:.0f} s") from None

    @property
    def url(self) -> str:
        """Where a client on this machine finds it."""
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
                return  # it has ended meanwhile
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
        """Serve an application until `close`.

        Args:
            app: The application.
            ending: Awaited when nothing new is taken, before open connections are ended.
            answers_late: Whether an answer may take long: then its connection counts as one that asked for something
                since the head of the request, and its handler is cancelled if the client goes away; else since the
                answer.
        """
        requests = _RequestRecord()
        if answers_late:
            app.middlewares.insert(0, _recorded(requests))
        app.on_response_prepare.append(requests.add)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http_logger(),
            handle_signals=False,
            handler_cancellation=answers_late,
            keepalive_timeout=_KEEPALIVE_S,
            auto_decompress=False,  # a body of some kilobytes would be megabytes before anybody looks at it
            shutdown_timeout=STOP_S,
        )
        await runner.setup()
        assert runner.server is not None
        connections = _ConnectionLimit(runner.server, requests, self._most_connections)
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
        """Run the event loop until `close`."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self.serve())
        except BaseException as exc:  # raised where the caller waits for the start
            if self._started.done():
                raise
            self._started.set_exception(exc)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _listen(self, connections: _ConnectionLimit) -> asyncio.Server:
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

    async def _wait_until_stopped(self, connections: _ConnectionLimit) -> None:
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
                        load_pair(self._tls_context, *material.pair)

    def _context(self) -> ssl.SSLContext | None:
        """Return what HTTPS is served with; None for HTTP."""
        if self._credentials is None or not self._tls:
            return None
        material = self._credentials.current(now=True)
        return context_for(material.ca, material.pair, serving=True)


def _http_logger() -> logging.Logger:
    """Return a logger without what clients do wrong: anybody could fill the log with requests that are none."""
    found = logging.getLogger(f"{__name__}.http")
    found.addFilter(_is_our_error)
    return found


def _recorded(requests: _RequestRecord) -> Callable[..., Awaitable[web.StreamResponse]]:
    @web.middleware
    async def record(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await requests.add(request)
        return await handler(request)

    return record


def _is_our_error(record: logging.LogRecord) -> bool:
    exc = record.exc_info[1] if record.exc_info else None
    return not isinstance(exc, (HttpProcessingError, ConnectionError))
