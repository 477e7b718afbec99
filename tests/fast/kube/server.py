"""A small HTTP server in place of an API server: it answers what a test lays out, and cuts connections."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What was asked."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Reply(NamedTuple):
    """What is answered.

    Attributes:
        status: of HTTP.
        body: JSON, or bytes as they are.
        headers: beside those that a body needs.
        length: that is announced; None for the body's own.
        delay_s: before the first byte.
        pieces: chunks with a pause before each, in place of a body; the connection is cut after them if `cut`.
        chunked: whether the pieces are chunks; else the end of the connection is that of the body.
        cut: end the connection without the last chunk.
    """

    status: int = 200
    body: Any = None
    headers: dict[str, str] = {}
    length: int | None = None
    delay_s: float = 0.0
    pieces: tuple[tuple[float, bytes], ...] = ()
    chunked: bool = True
    cut: bool = False


def status(code: int, reason: str, message: str, **details: Any) -> Reply:
    """An error as API servers have it."""
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}
    return Reply(code, {**body, "details": details})


class ApiServer:
    """Serves `answer(request)` at `url`, and keeps what was asked in `requests`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Reply] = lambda request: Reply(200, {})
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                text = self.rfile.read(length)
                body = json.loads(text) if text else None
                request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                outer.requests.append(request)
                outer.send(self, outer.answer(request))

            do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # with the library's 5, clients that connect together wait for seconds

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # the client hung up, as it may

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        self.closing.wait(reply.delay_s)
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        handler.send_response(reply.status)
        if "Content-Type" not in reply.headers:
            handler.send_header("Content-Type", "application/json")
        for name, value in reply.headers.items():
            handler.send_header(name, value)
        if reply.pieces:
            framing = ("Transfer-Encoding", "chunked") if reply.chunked else ("Connection", "close")
            handler.send_header(*framing)
            handler.end_headers()
            for pause_s, piece in reply.pieces:
                self.closing.wait(pause_s)
                if piece:
                    handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if reply.chunked else piece)
                    handler.wfile.flush()
            if reply.chunked and not reply.cut:
                handler.wfile.write(b"0\r\n\r\n")
            else:
                handler.close_connection = True
            return
        handler.send_header("Content-Length", str(len(body) if reply.length is None else reply.length))
        handler.end_headers()
        handler.wfile.write(body)
        if reply.length is not None or reply.cut:
            handler.close_connection = True

    def close(self) -> None:
        """End the server and all answers under way."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
