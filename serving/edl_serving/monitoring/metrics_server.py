"""The HTTP server of `/metrics`, `/livez` and `/readyz`, of which silent or slow clients hold but a few threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from edl.background import start_call
from edl_serving.monitoring.probes import HealthProbes

__all__ = ["MetricsServer"]

_MOST_CONNECTIONS: Final = 16
"""At once, each with a thread: some scrapers, and a person who looks. Beyond that the oldest one is closed, since an
honest request is over within milliseconds."""
_SILENCE_S: Final = 10.0
"""After so long without a byte a connection is closed: Prometheus itself gives up after 10 s unless told otherwise."""

_CLOSE_LOOK_S: Final = 0.05
"""How often the thread looks whether it is to end: a teacher that has drained waits for so long before it exits, and so
does a pod that waits for its GPU. The library's 0.5 s would be half of the whole."""


class MetricsServer:
    """Serves a registry's metrics, and a process's health, from a thread until closed.

    Args:
        registry: of the metrics.
        host: a name or an address, IPv4 or IPv6.
        port: 0 for a free port.
        probes: answers `/livez` and `/readyz`: 200, or 503 where a check fails. None for metrics alone.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, probes: HealthProbes | None = None) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server_class: type[_Server] = type("_Server", (_Server,), {"address_family": family})
        app = _with_probes(make_wsgi_app(registry), probes or HealthProbes())
        self._server: _Server = make_server(str(address[0]), port, app, server_class, _Handler)
        self._serving = start_call("edl-metrics", lambda: self._server.serve_forever(_CLOSE_LOOK_S))

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._serving.exception()


def _with_probes(metrics: Callable[..., Any], probes: HealthProbes) -> Callable[..., Any]:
    """Return an application that answers the paths of health, and leaves all else to that of the metrics."""

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        found = probes.answer(environ.get("PATH_INFO", ""))
        if found is None:
            return metrics(environ, start_response)
        passed, text = found
        body = text.encode()
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        start_response("200 OK" if passed else "503 Service Unavailable", [*headers, ("Cache-Control", "no-store")])
        return [b"" if environ.get("REQUEST_METHOD") == "HEAD" else body]

    return app


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # with the library's 5, who connects in a crowd waits for a second or more

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._connections: OrderedDict[int, socket.socket] = OrderedDict()
        super().__init__(*args)

    def server_bind(self) -> None:
        """Bind without asking DNS for the host's full name, which takes seconds where DNS does not answer."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own; close the oldest connection where there are too many."""
        with self._lock:
            oldest = next(iter(self._connections.values())) if len(self._connections) >= _MOST_CONNECTIONS else None
            self._connections[id(request)] = request
            if oldest is not None:
                del self._connections[id(oldest)]
                _shut_down(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered, or could not be."""
        with self._lock:
            self._connections.pop(id(request), None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log no errors of clients: they go away, or talk nonsense."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name for it
        """Log no requests."""


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was faster
        connection.shutdown(socket.SHUT_RDWR)
