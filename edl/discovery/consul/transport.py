"""HTTP to a Consul agent, for py-consul: each request has a deadline, and can be hung up on from another thread.

py-consul's own transport cannot be interrupted, so that closing a watch would take as long as its blocking query. A
connection serves one request: there is nothing idle to clean up, and none that an agent's restart could have broken.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from consul.base import HTTPClient, Response
from consul.exceptions import ConsulException

from edl.discovery.consul.target import Target
from edl.errors import ClosedError, DiscoveryError

__all__ = ["Transport", "understood"]

R = TypeVar("R")
Params = Sequence[tuple[str, Any]] | None
Headers = dict[str, str] | None


class Transport(HTTPClient):  # type: ignore[misc]
    """What py-consul calls to reach `target`."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.host, target.port)
        self._target = target
        self._headers = {"Content-Type": "application/json"}
        if target.token:
            self._headers["X-Consul-Token"] = target.token
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._closed = False

    def get(
        self, callback: Callable[[Response], R], path: str, params: Params = None, headers: Headers = None, **_: Any
    ) -> R:
        return self._request("GET", callback, path, params, "", headers)

    def put(
        self,
        callback: Callable[[Response], R],
        path: str,
        params: Params = None,
        data: str | bytes = "",
        headers: Headers = None,
    ) -> R:
        return self._request("PUT", callback, path, params, data, headers)

    def delete(
        self,
        callback: Callable[[Response], R],
        path: str,
        params: Params = None,
        data: str | bytes = "",
        headers: Headers = None,
    ) -> R:
        return self._request("DELETE", callback, path, params, data, headers)

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
        """Hang up on every request under way, and refuse new ones."""
        with self._lock:
            self._closed = True
            for connection in self._open:
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
        with self._lock:
            if self._closed:
                raise ClosedError(f"the connection to {self._target} is closed")
            self._open.add(connection)
        try:
            connection.request(method, url, body, {**(headers or {}), **self._headers})
            answer = connection.getresponse()
            response = Response(answer.status, answer.headers, answer.read().decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as exc:
            raise DiscoveryError(f"{self._target} cannot be reached: {exc or type(exc).__name__}") from exc
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        with understood():
            return callback(response)


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Around the reading of an answer, here or in py-consul: something that is no Consul agent may have given it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ConsulException(f"the answer is not what Consul answers: {exc!r}") from exc


class _Connection(http.client.HTTPConnection):
    def __init__(self, target: Target, timeout_s: float) -> None:
        super().__init__(target.host, target.port, timeout=timeout_s)
        self._target = target
        self._hung_up = False

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


def _blocks_for_s(params: Params) -> float:
    """How long the agent may keep a request waiting: its `wait`, and the sixteenth that it adds at random."""
    options = dict(params or ())
    return float(str(options["wait"]).removesuffix("s")) * 17 / 16 if "index" in options else 0.0
