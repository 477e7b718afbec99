"""A server that shows the page a state of a test's choice, and that stalls, refuses and goes away at will."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import edl.dashboard
from edl.background import start_call

STATIC = Path(edl.dashboard.__file__).parent / "static"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'; object-src 'none'"
END = object()


class PageServer:
    """Serves the page at `url`.

    Args:
        state: the first one.

    Attributes:
        refuse: a status with which streams are refused, 0 for none.
        seen_ids: the Last-Event-ID of each stream, by header or in its address.
    """

    def __init__(self, state: Any, port: int = 0) -> None:
        self._state: Any = state
        self._streams: list[queue.Queue[Any]] = []
        self._lock = threading.Lock()
        self._number = 0
        self.refuse = 0
        self.seen_ids: list[str] = []
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._serving = start_call("page-server", self._server.serve_forever)

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def publish(self, state: Any, kind: str = "state") -> None:
        """Send a state to all streams; a string is sent as it is."""
        with self._lock:
            if not isinstance(state, str):
                self._state: Any = state
            self._number += 1
            for stream in self._streams:
                stream.put((kind, state, self._number))

    def beat(self) -> None:
        """Send a heartbeat."""
        with self._lock:
            for stream in self._streams:
                stream.put(("heartbeat", {"time": 0}, None))

    def drop(self) -> None:
        """End all streams."""
        with self._lock:
            for stream in self._streams:
                stream.put(END)

    @property
    def streams(self) -> int:
        """How many pages listen."""
        return len(self._streams)

    @property
    def state(self) -> Any:
        """The last one."""
        return self._state

    def close(self) -> None:
        """End all streams, and listen no longer."""
        self.drop()
        self._server.shutdown()
        self._serving.result(20)
        self._server.server_close()

    @contextlib.contextmanager
    def _stream(self) -> Iterator[queue.Queue[Any]]:
        stream: queue.Queue[Any] = queue.Queue()
        with self._lock:
            stream.put(("state", self._state, self._number))
            self._streams.append(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._streams.remove(stream)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that closes its connections


def _handler(server: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            if path == "/api/state":
                self._answer(json.dumps(server.state).encode(), "application/json", server.refuse or 200)
            elif path == "/api/events":
                self._events()
            else:
                file = STATIC / ("index.html" if path == "/" else path.removeprefix("/static/"))
                if file.is_file() and STATIC in file.resolve().parents:
                    self._answer(file.read_bytes(), f"{TYPES.get(file.suffix, 'text/plain')}; charset=utf-8", 200)
                else:
                    self._answer(b"not there", "text/plain", 404)

        def _answer(self, body: bytes, kind: str, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def _events(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            server.seen_ids.append(self.headers.get("Last-Event-ID") or query.get("last_event_id", [""])[0])
            if server.refuse:
                self._answer(b"no", "text/plain", server.refuse)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-cache")
            self.end_headers()
            self.wfile.write(b"retry: 200\n\n")
            with server._stream() as stream:
                while (item := stream.get()) is not END:
                    kind, data, number = item
                    text = data if isinstance(data, str) else json.dumps(data)
                    name = f"id: {number}\n" if number is not None else ""
                    self.wfile.write(f"{name}event: {kind}\ndata: {text}\n\n".encode())
                    self.wfile.flush()

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name in the base class
            pass

    return Handler
