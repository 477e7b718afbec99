"""The thread of a server, its event loop, and the socket that it listens on.

What does not belong here: routes, and what is behind them.
"""

from __future__ import annotations

import abc
import asyncio
import errno
import logging
import os
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from typing_extensions import Self

from edl.background import start_call
from edl.errors import ClosedError, SettingsError
from edl.http_server.connections import ConnectionLimit, RequestRecord
from edl.protocol.tls import certificates
from edl.protocol.tls.credentials import CHECK_EVERY_S, CredentialFiles

__all__ = ["STOP_S", "AppServer"]

_START_S: Final = 30.0
"""To listen; it takes milliseconds, unless the name of the host is asked of a DNS that does not answer."""
STOP_S: Final = 5.0
"""For open connections when a server ends."""
_KEEPALIVE_S: Final = 75.0
"""Of a connection between two requests: browsers keep theirs about as long."""
_BACKLOG: Final = 128
"""Connections that wait to be taken."""
_REMEDIES: Final = {
    errno.EADDRINUSE: "another --port does, or 0 for a free port",
    errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 is for this machine, 0.0.0.0 for others too",
    errno.EACCES: "a port above 1023 needs no privileges",
}


class AppServer(abc.ABC):
    """Serves an application from a thread of its own, from `start` until `close`.

    Args:
        name: of the thread.
        host: a name or an address to listen on.
        port: 0 for a free port.
        credentials: certificate and key, and whom to believe; None for HTTP.
        most_connections: that are open at a time.

    Attributes:
        port: that it listens on, after `start`.
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
        """Make the application, await `run_app`, and let go of what was made. Runs in the thread."""

    def start(self) -> None:
        """Listen; once.

        Raises:
            ClosedError: it was started before.
            SettingsError: the address cannot be listened on.
        """
        if self._running is not None:
            raise ClosedError("this server was started before, and has one life: make another")
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
            app: the application.
            ending: awaited when nothing new is taken, before open connections are ended.
            answers_late: a request's answer may take long: its connection counts as one that asked for something since
                the head of the request, and its handler is cancelled where the client goes away. Else since the answer.
        """
        requests = RequestRecord()
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
        connections = ConnectionLimit(runner.server, requests, self._most_connections)
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

    async def _listen(self, connections: ConnectionLimit) -> asyncio.Server:
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


def _recorded(requests: RequestRecord) -> Callable[..., Awaitable[web.StreamResponse]]:
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
