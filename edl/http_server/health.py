"""Serves a process's health and metrics from a thread, using only the standard library and prometheus_client.

`/livez` and `/readyz` run named checks, as Kubernetes' own servers do:
https://kubernetes.io/docs/reference/using-api/health-checks/.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, Literal, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from edl.background import start_call
from edl.errors import SettingsError

_MOST_CONNECTIONS: Final = 16
"""Maximum number of open connections, each of which has its own thread. If there are more connections, the oldest is
closed: a request takes only milliseconds."""
_SILENCE_S: Final = 10.0
"""A connection is closed after this time without data. By default, Prometheus gives up after 10 s."""
_CLOSE_LOOK_S: Final = 0.05
"""Interval between the thread's checks of whether to end: a drained teacher waits up to this long before it frees its
GPU."""

CheckPath: TypeAlias = Literal["/livez", "/readyz"]


class HealthChecks:
    """Checks whether a process is alive, and whether it is ready. A path without checks counts as passed."""

    def __init__(self) -> None:
        self._checks: dict[str, dict[str, Callable[[], str]]] = {"/livez": {}, "/readyz": {}}

    def add(self, path: CheckPath, name: str, check: Callable[[], str]) -> None:
        """Add or replace a check, which is called in another thread for each request, and returns "" or a reason."""
        self._checks[path] = {**self._checks[path], name: check}

    def answer(self, path: str) -> tuple[bool, str] | None:
        """Run a path's checks; return whether all passed and a line for each, or None for an unknown path."""
        checks = self._checks.get(path)
        if checks is None:
            return None
        failures = {name: check() for name, check in checks.items()}
        lines = [f"[-]{name} failed: {why}" if why else f"[+]{name} ok" for name, why in failures.items()]
        passed = not any(failures.values())
        return passed, "\n".join([*lines, f"{path[1:]} check {'passed' if passed else 'failed'}", ""])


class HealthServer:
    """Answers `/livez`, `/readyz` and `/metrics` over HTTP until `close`; `api` is the WSGI application for `/v2`.

    Port 0 means any free port. Raises SettingsError if the server cannot listen on the address.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, checks: HealthChecks, api: Any = None
    ) -> None:
        metrics = make_wsgi_app(registry)

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            path = environ.get("PATH_INFO", "")
            found = checks.answer(path)
            if found is None:
                app = api if api is not None and path.split("/")[1:2] == ["v2"] else metrics
                answered: Iterable[bytes] = app(environ, start_response)
                return answered
            passed, text = found
            body = text.encode()
            headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
            start_response("200 OK" if passed else "503 Service Unavailable", [*headers, ("Cache-Control", "no-store")])
            return [b"" if environ.get("REQUEST_METHOD") == "HEAD" else body]

        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
                0
            ]
            server_class: type[_Server] = type("_Server", (_Server,), {"address_family": family})
            self._server: _Server = make_server(str(address[0]), port, app, server_class, _Handler)
        except OSError as exc:
            raise SettingsError(f"health and metrics cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
        self._serving = start_call("edl-health", lambda: self._server.serve_forever(_CLOSE_LOOK_S))

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._serving.exception()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # with the library's 5, some of many simultaneous clients wait a second or more

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._connections: OrderedDict[int, socket.socket] = OrderedDict()
        super().__init__(*args)

    def server_bind(self) -> None:
        """Bind without a DNS lookup of the host's full name, which takes seconds if DNS does not respond."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in its own thread; close the oldest connection if there are too many."""
        with self._lock:
            oldest = next(iter(self._connections.values())) if len(self._connections) >= _MOST_CONNECTIONS else None
            self._connections[id(request)] = request
            if oldest is not None:
                del self._connections[id(oldest)]
                with contextlib.suppress(OSError):  # the client was faster
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whether it was answered or not."""
        with self._lock:
            self._connections.pop(id(request), None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors caused by clients that disconnect or send invalid data."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer an invalid request with JSON, as the API does, instead of the base class's HTML."""
        text = message or HTTPStatus(code).phrase
        body = json.dumps({"error": f"{text}: {explain}" if explain else text}).encode()
        self.send_response(code, HTTPStatus(code).phrase)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log no requests."""
