"""A server that shows the page a state of a test's choice, and that stalls, refuses and goes away at will."""

from __future__ import annotations

import json
import queue
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import edl.dashboard
from edl.background import start_call

STATIC = Path(edl.dashboard.__file__).parent / "static"
POLICY = "default-src 'self'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'; object-src 'none'"
END = object()


class PageServer(ThreadingHTTPServer):
    """Serves the page at `url`.

    Attributes:
        refuse: a status with which streams are refused, 0 for none.
        seen_ids: the Last-Event-ID of each stream, by header or in its address.
    """

    block_on_close = False

    def __init__(self, state: Any, port: int = 0) -> None:
        self.state = state
        self.refuse = 0
        self.seen_ids: list[str] = []
        self.number = 0
        self.streams: list[queue.Queue[Any]] = []
        self.lock = threading.Lock()  # a new stream misses nothing that is published
        super().__init__(("127.0.0.1", port), partial(_Handler, directory=str(STATIC)))
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self._serving = start_call("page-server", self.serve_forever)

    def publish(self, state: Any, kind: str = "state") -> None:
        """Send a state to all streams; a string is sent as it is."""
        with self.lock:
            if not isinstance(state, str):
                self.state = state
            self.number += 1
            self.send(kind, state, self.number)

    def send(self, *event: Any) -> None:
        """Send an event to all streams: its kind, its data, and its number if it has one."""
        for stream in list(self.streams):
            stream.put(event)

    def drop(self) -> None:
        """End all streams."""
        self.send(END, None, None)

    def close(self) -> None:
        """End all streams, and listen no longer."""
        self.drop()
        self.shutdown()
        self._serving.result(20)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that closes its connections


class _Handler(SimpleHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path.startswith("/api/") and self.server.refuse:
            self.send_error(self.server.refuse)
        elif parts.path == "/api/events":
            asked = parse_qs(parts.query).get("last_event_id", [""])[0]
            self.server.seen_ids.append(self.headers.get("Last-Event-ID") or asked)
            self._send_events()
        else:
            self.path = parts.path.removeprefix("/static")
            super().do_GET()

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def _send_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        self.wfile.write(b"retry: 200\n\n")
        stream: queue.Queue[Any] = queue.Queue()
        with self.server.lock:
            stream.put(("state", self.server.state, self.server.number))
            self.server.streams.append(stream)
        try:
            while (event := stream.get())[0] is not END:
                kind, data, number = event
                text = data if isinstance(data, str) else json.dumps(data)
                name = f"id: {number}\n" if number is not None else ""
                self.wfile.write(f"{name}event: {kind}\ndata: {text}\n\n".encode())
        finally:
            self.server.streams.remove(stream)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its name in the base class
        pass
