"""HTTP to a Consul agent, for py-consul: every request has a deadline, and can be hung up on from another thread.

py-consul's own transport cannot be interrupted, so that closing a watch would take as long as its blocking query. A
connection serves a single request: nothing idle is left to clean up, or to be broken by an agent's restart.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote, urlencode

from consul.base import HTTPClient, Response
from consul.exceptions import ACLPermissionDenied, ConsulException
from typing_extensions import override

from edl.discovery.consul.target import ConsulTarget
from edl.errors import ClosedError, DiscoveryError
from edl.quoting import shown

__all__ = ["ConsulTransport", "understood"]

R = TypeVar("R")
Params = Sequence[tuple[str, Any]] | None
Headers = dict[str, str] | None

_MOST_BYTES = 64 * 1024**2
"""Of an answer: some hundred thousand teachers. What goes on for longer is no Consul, and must not fill the memory."""


_FILTERED: Final = "X-Consul-Results-Filtered-By-ACLs"
"""Since Consul 1.11. Where something is left that may be read, it is used: tokens may be for some services only."""
_EMPTY: Final = ("[]", "{}", "null")


class ConsulTransport(HTTPClient):  # type: ignore[misc]
    """What py-consul calls to reach `target`."""

    def __init__(self, target: ConsulTarget) -> None:
        super().__init__(target.host, target.port)
        self._target = target
        self._headers = {"Content-Type": "application/json"}
        if target.token:
            self._headers["X-Consul-Token"] = target.token
        self._open: set[_Connection] = set()
        self._closed = False

    @override
    def get(
        self, callback: Callable[[Response], R], path: str, params: Params = None, headers: Headers = None, **_: Any
    ) -> R:
        return self._request("GET", callback, path, params, "", headers)

    @override
    def put(
        self,
        callback: Callable[[Response], R],
        path: str,
        params: Params = None,
        data: str | bytes = "",
        headers: Headers = None,
    ) -> R:
        return self._request("PUT", callback, path, params, data, headers)

    @override
    def delete(
        self,
        callback: Callable[[Response], R],
        path: str,
        params: Params = None,
        data: str | bytes = "",
        headers: Headers = None,
    ) -> R:
        return self._request("DELETE", callback, path, params, data, headers)

    @override
    def post(
        self,
        callback: Callable[[Response], R],
        path: str,
        params: Params = None,
        data: str | bytes = "",
        headers: Headers = None,
    ) -> R:
        return self._request("POST", callback, path, params, data, headers)

    def close(self) -> None:
        """Hang up on every request under way, and refuse new requests."""
        self._closed = True
        for connection in self._open.copy():
            connection.hang_up()

    def _request(
        self,
        method: str,
        callback: Callable[[Response], R],
        path: str,
        params: Params,
        data: str | bytes,
        headers: Headers,
    ) -> R:
        connection = _Connection(self._target, self._target.timeout_s + _blocks_for_s(params))
        url = quote(path, safe="/:") + (f"?{urlencode(params)}" if params else "")
        body = data.encode() if isinstance(data, str) else data
        # No lock: a signal handler may close this in the middle of a request. The connection is there to be hung up on
        # before the look, so that a `close` that comes across it misses neither.
        self._open.add(connection)
        try:
            if self._closed:
                raise ClosedError(f"the connection to {self._target} is closed")
            connection.request(method, url, body, {**(headers or {}), **self._headers})
            with contextlib.closing(connection.getresponse()) as answer:
                response = Response(answer.status, answer.headers, _content(answer).decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as exc:
            if self._closed:
                raise ClosedError(f"the connection to {self._target} is closed") from exc
            raise DiscoveryError(f"{self._target} cannot be reached: {shown(exc) or type(exc).__name__}") from exc
        finally:
            self._open.discard(connection)
            connection.close()
        if answer.headers.get(_FILTERED) == "true" and response.body.strip() in _EMPTY:
            raise ACLPermissionDenied("Consul left out all that there is, since the token may not read it")
        with understood():
            return callback(response)


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Around the reading of an answer, here or in py-consul: something that is no Consul agent may have given it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise ConsulException(f"the answer is not what Consul answers: {exc!r}") from exc


class _Connection(http.client.HTTPConnection):
    def __init__(self, target: ConsulTarget, timeout_s: float) -> None:
        super().__init__(target.host, target.port, timeout=timeout_s)
        self._target = target
        self._hung_up = False
        self._deadline = time.monotonic() + target.timeout_s + timeout_s  # to connect, and to be answered

        self.response_class = self._respond  # type: ignore[assignment]

    def _respond(self, sock: socket.socket, *args: Any, **kwargs: Any) -> http.client.HTTPResponse:
        return http.client.HTTPResponse(cast(socket.socket, _Punctual(sock, self._deadline)), *args, **kwargs)

    def connect(self) -> None:
        self.sock = socket.create_connection((self.host, self.port), timeout=self._target.timeout_s)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._target.tls is not None:
            self.sock = self._target.tls.wrap_socket(self.sock, server_hostname=self._target.server_name)
        self.sock.settimeout(self.timeout)
        if self._hung_up:
            raise ConnectionAbortedError("hung up")

    def hang_up(self) -> None:
        """Make the thread that waits for this connection's answer return."""
        self._hung_up = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                # Not the method of a TLS socket, which would pull the ground from under the thread that reads.
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class _Punctual(io.RawIOBase):
    """Reads from a socket until a deadline. A socket's own timeout begins anew with every byte that drips in."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _content(answer: http.client.HTTPResponse) -> bytes:
    content = answer.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise http.client.HTTPException(f"its answer has more than {_MOST_BYTES:,} bytes")
    if answer.length:  # of what it promised: half an answer may look like a whole one
        raise http.client.IncompleteRead(content, answer.length)
    return content


def _blocks_for_s(params: Params) -> float:
    """How long the agent may keep a request waiting: its `wait`, and the sixteenth that it adds at random."""
    options = dict(params or ())
    return float(str(options["wait"]).removesuffix("s")) * 17 / 16 if "index" in options else 0.0
