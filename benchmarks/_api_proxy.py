"""`ApiProxy` between an operator and the API server: it counts requests, closes connections, or calls functions."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edl.background import start_call

__all__ = ["ApiProxy", "write_json_kubeconfig"]

_KEPT = ("authorization", "content-type", "accept", "user-agent")


class ApiProxy:
    """Accepts HTTP on this machine and forwards it to the API server of a kubeconfig.

    Attributes:
        requests: "METHOD path user-agent" of each forwarded request.
        away: Whether all connections have been closed, and new ones are closed at once.
        before: Called with a request's line before the request is forwarded. An exception ends the connection.
        after: Called with the line after the server has answered, before the answer is passed on.
        hidden: Prefix of paths that are answered with 404, as by a server without that API group.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        server = urlsplit(config["clusters"][0]["cluster"]["server"])
        self._target = (str(server.hostname), server.port or 443)
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        user = config["users"][0]["user"]
        if "client-certificate-data" in user:
            pem = folder / "client.pem"
            texts = (user.pop("client-certificate-data"), user.pop("client-key-data"))
            pem.write_bytes(b"\n".join(base64.b64decode(text) for text in texts))
            self._context.load_cert_chain(pem)
        self.requests: list[str] = []
        self.before: Callable[[str], None] = lambda line: None
        self.after: Callable[[str], None] = lambda line: None
        self.away = False
        self.hidden = ""
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        start_call("edl-test-proxy", lambda: self._server.serve_forever(0.05))
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._server.server_port}"}
        self.kubeconfig = folder / "through-proxy.json"
        self.kubeconfig.write_text(json.dumps(config))

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(*self._target, context=self._context, timeout=330)

    def go_away(self) -> None:
        """Close all connections, and every new one."""
        self.away = True
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        self.away = False

    def close(self) -> None:
        self.go_away()
        self._server.shutdown()
        self._server.server_close()

    def track(self, connection: socket.socket, present: bool) -> None:
        with self._lock:
            (self._open.add if present else self._open.discard)(connection)


def write_json_kubeconfig(folder: Path) -> Path:
    """Write the current context of the kubeconfig that KUBECONFIG names as JSON, with all its credentials."""
    import yaml

    given = os.environ.get("KUBECONFIG", "").split(os.pathsep)[0] or Path.home() / ".kube/config"
    config = yaml.safe_load(Path(given).read_text())
    context = next(entry for entry in config["contexts"] if entry["name"] == config["current-context"])
    chosen = {"clusters": context["context"]["cluster"], "users": context["context"]["user"]}
    for part, name in chosen.items():
        config[part] = [entry for entry in config[part] if entry["name"] == name]
    config["contexts"] = [context]
    user = config["users"][0]["user"]
    for name in ("client-certificate", "client-key"):
        if name in user:
            path = Path(user.pop(name))
            user[f"{name}-data"] = base64.b64encode(path.read_bytes()).decode()
    path = folder / "kubeconfig.json"
    path.write_text(json.dumps(config))
    return path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: ApiProxy

    def setup(self) -> None:
        super().setup()
        self.owner.track(self.connection, True)
        self._upstream: http.client.HTTPSConnection | None = None

    def finish(self) -> None:
        self.owner.track(self.connection, False)
        if self._upstream is not None:
            self._upstream.close()
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def _forward(self) -> None:
        owner = self.owner
        self.close_connection = self.close_connection or owner.away
        if owner.away:
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        line = f"{self.command} {self.path} {self.headers.get('User-Agent', '')}"
        try:
            if owner.hidden and self.path.startswith(owner.hidden):
                self._refuse()
                return
            owner.before(line)
            upstream = self._upstream = self._upstream or owner.connect()
            headers = {name: value for name, value in self.headers.items() if name.lower() in _KEPT}
            upstream.request(self.command, self.path, body=body or None, headers=headers)
            response = upstream.getresponse()
            owner.requests.append(line)
            watch = "watch=" in self.path
            data = b"" if watch else response.read()
            owner.after(line)
            self.send_response(response.status)
            for name in ("Content-Type", "Retry-After"):
                if response.headers.get(name):
                    self.send_header(name, response.headers[name])
            if not watch:
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while piece := response.read1(65536):
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            if self._upstream is not None:
                self._upstream.close()
                self._upstream = None

    def _refuse(self) -> None:
        data = json.dumps({"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"}).encode()
        self.send_response(404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815 - names from the base class

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - a name from the base class
        """Log nothing."""
