"""The HTTP server of `/livez`, `/readyz` and `/metrics`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from edl.background import start_call
from edl.errors import SettingsError

__all__ = ["HealthServer"]

_SILENCE_S: Final = 10.0
"""After so long without a byte a connection is closed: Prometheus itself gives up after 10 s unless told otherwise."""
_CLOSE_LOOK_S: Final = 0.1
"""How often the thread looks whether it is to end."""


class HealthServer:
    """Serves checks and metrics from a thread, until it is closed.

    Args:
        host: a name or an address, IPv4 or IPv6.
        port: 0 for a free one.
        checks: by path: returns why the check fails, empty if it passes.
        registry: of the metrics.

    Raises:
        SettingsError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, checks: dict[str, Callable[[], str]], registry: CollectorRegistry) -> None:
        metrics = make_wsgi_app(registry)

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            check = checks.get(environ.get("PATH_INFO", ""))
            if check is None:
                found: Iterable[bytes] = metrics(environ, start)
                return found
            problem = check()
            start(
                "503 Service Unavailable" if problem else "200 OK",
                [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")],
            )
            return [f"{problem or 'ok'}\n".encode()]

        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            server_class: type[_HealthWsgiServer] = type("_Server", (_HealthWsgiServer,), {"address_family": found[0]})
            self._server: _HealthWsgiServer = make_server(str(found[4][0]), port, answer, server_class, _HealthHandler)
        except OSError as exc:
            raise SettingsError(f"{host} port {port} cannot be listened on: {exc.strerror or exc}") from exc
        self._serving = start_call("edl-operator-http", lambda: self._server.serve_forever(_CLOSE_LOOK_S))

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._serving.exception()


class _HealthWsgiServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self) -> None:
        """Bind without asking DNS for the host's full name, which takes seconds where DNS does not answer."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no errors of clients: they go away, or talk nonsense."""


class _HealthHandler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name for it
        """Log no requests."""
