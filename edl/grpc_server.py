"""Common parts of the gRPC servers of masters and served stores: the servers' options and thread."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import threading
from typing import Final

from edl.background import BackgroundLoop
from edl.errors import DiscoveryError, EDLError
from edl.protocol.channel import Options, token_checks
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc
from edl.resource import Resource

__all__ = ["LoopServer", "make_server"]

logger = logging.getLogger(__name__)

_SERVER_OPTIONS: Final[Options] = (
    ("grpc.so_reuseport", 0),  # a second server on the same port would get half of the connections
    ("grpc.keepalive_time_ms", 10_000),  # a vanished host must not keep its streams
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),  # clients ping every 10 s
    ("grpc.http2.max_ping_strikes", 0),
)
_START_S: Final = 10.0  # to start listening: it takes milliseconds, and seconds on a machine that swaps
_AGE_MS: Final = 3_600_000
"""With TLS or tokens, connections that reach this age are replaced, so that new certificates and tokens take effect."""


class LoopServer(Resource, abc.ABC):
    """A gRPC server on an event loop in its own thread, from `_start` until it is closed or fails.

    `failure` is the error that ended the server; None if there was no error. `_halt` is called in the server's thread
    when the server ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @abc.abstractmethod
    async def _serve(self) -> None:
        """Set `_started` once the server listens, and return when `_stop` is set."""

    def _start(self, name: str, what: str) -> None:
        """Serve in a thread of this name; raise an error that occurs at once. `what` names the server in messages."""

        def run() -> None:
            try:
                asyncio.run(self._serve_unless_closed())
            except EDLError as exc:
                self.failure = exc
            except Exception as exc:
                logger.exception("%s ended", what)
                self.failure = exc
            finally:
                self._started.set()
                self._halt()

        self._own(BackgroundLoop(name, run, self._interrupt))
        if not self._started.wait(_START_S):
            self.failure = DiscoveryError(f"{what} did not start within {_START_S:g} s")
        if self.failure is not None:
            self.close()
            raise self.failure

    async def _serve_unless_closed(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not self._closed:
            await self._serve()

    def _interrupt(self) -> None:
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._stop.set)


def make_server(files: CredentialFiles | None, handler: grpc.GenericRpcHandler, options: Options) -> grpc.aio.Server:
    """Return a server for a master or a store. The server checks tokens, and does not listen yet."""
    age = [("grpc.max_connection_age_ms", _AGE_MS)] if files is not None else []
    server = grpc.aio.server(options=[*_SERVER_OPTIONS, *age, *options], interceptors=token_checks(files))
    server.add_generic_rpc_handlers((handler,))
    return server
