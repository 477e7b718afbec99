"""Calls Consul's HTTP API: the agent's address, requests with a deadline, and error translation.

The module uses no client library: another thread must be able to end a watch's blocking query, and every request needs
a deadline. A connection serves one request, so an agent's restart breaks no idle connection.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast
from urllib.parse import quote, urlencode

from edl.discovery.store_url import StoreUrl
from edl.errors import ClosedError, DiscoveryError, SettingsError
from edl.quoting import shown
from edl.resource import Resource
from edl.settings import read

Json = Any

_MOST_BYTES: Final = 64 * 1024**2
"""Maximum size of an answer: enough for some hundred thousand teachers. A longer answer does not come from Consul, and
must not fill the memory."""
_FILTERED: Final = "X-Consul-Results-Filtered-By-ACLs"
"""A header that Consul has sent since version 1.11. If the token may read some of the entries, these entries are used:
a token may cover only some services."""
_EMPTY: Final = ("[]", "{}", "null")
ALIVE: Final = "alive"  # the name of a registration's own check


@dataclass(frozen=True)
class ConsulTarget:
    """An agent, as given by a URL and Consul's own environment variables."""

    host: str
    port: int
    timeout_s: float = 5.0  # of a request, beyond the time that a blocking query asks the agent to wait
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    server_name: str = ""  # the name that the agent's certificate must carry

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"Consul at {'https' if self.tls else 'http'}://{host}:{self.port}"

    @classmethod
    def of(cls, url: StoreUrl, timeout_s: float, environ: Mapping[str, str] | None = None) -> ConsulTarget:
        """Return the target for a URL and the environment."""
        ((host, port),) = url.servers
        secure = bool(read("CONSUL_HTTP_SSL", _boolean, environ)) or url.scheme == "consul+https"
        return cls(
            host=host,
            port=port or (8501 if secure else 8500),
            timeout_s=timeout_s,
            token=read("CONSUL_HTTP_TOKEN", str, environ) or "",
            tls=_tls(environ) if secure else None,
            server_name=read("CONSUL_TLS_SERVER_NAME", str, environ) or host,
        )


def _tls(environ: Mapping[str, str] | None) -> ssl.SSLContext:
    authorities = read("CONSUL_CACERT", str, environ)
    certificate = read("CONSUL_CLIENT_CERT", str, environ)
    key = read("CONSUL_CLIENT_KEY", str, environ)
    verify = read("CONSUL_HTTP_SSL_VERIFY", _boolean, environ)
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as exc:
        raise SettingsError(f"environment variable CONSUL_CACERT={authorities!r}: {exc}") from exc
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if key and not certificate:
        raise SettingsError("CONSUL_CLIENT_KEY is set without CONSUL_CLIENT_CERT")
    if certificate:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as exc:
            raise SettingsError(f"CONSUL_CLIENT_CERT={certificate!r}, CONSUL_CLIENT_KEY={key!r}: {exc}") from exc
    return context


def _boolean(text: str) -> bool:
    if text.lower() in ("1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise ValueError("expected true or false")


class _Answer(NamedTuple):
    status: int
    found_index: str
    body: str


class ConsulClient(Resource):
    """Calls an agent; DiscoveryError if the agent is unreachable or refuses a call. Closing ends pending calls."""

    def __init__(self, target: ConsulTarget) -> None:
        super().__init__()
        self.target = target
        self._open: set[_Connection] = set()

    def _halt(self) -> None:
        for connection in self._open.copy():
            connection.hang_up()

    def ask(
        self,
        method: str,
        path: str,
        body: Json = None,
        *,
        accepts: Collection[int] = (),
        wait: tuple[int | None, float] = (None, 0.0),
        **options: str,
    ) -> _Answer:
        """Send a request with a JSON body and query options.

        Status codes in `accepts` are not errors. `wait` is an index, and the number of seconds to wait for a newer
        index.
        """
        block_s = 0.0
        if wait[0] is not None:
            options |= {"index": str(wait[0]), "wait": f"{wait[1]:g}s"}
            block_s = wait[1] * 17 / 16  # the agent adds up to a sixteenth at random
        url = quote(path, safe="/:") + (f"?{urlencode(options)}" if options else "")
        answer, filtered = self._send(method, url, b"" if body is None else json.dumps(body).encode(), block_s)
        if answer.status == 403 and 403 not in accepts:
            raise self.denied(answer.body or "permission denied")
        if answer.status not in (200, *accepts):
            raise DiscoveryError(f"{self.target}: {answer.status} {shown(answer.body)}")
        if filtered and answer.body.strip() in _EMPTY:
            raise self.denied("Consul left out all entries, since the token may not read them")
        return answer

    def _send(self, method: str, url: str, body: bytes, block_s: float) -> tuple[_Answer, bool]:
        self._check()
        headers = {"Content-Type": "application/json"}
        if self.target.token:
            headers["X-Consul-Token"] = self.target.token
        connection = _Connection(self.target, self.target.timeout_s + block_s)
        # In the set before `_closed` is read, so that a `close` at that moment either finds it or is noticed here.
        self._open.add(connection)
        try:
            if self._closed:
                raise ClosedError(f"the connection to {self.target} is closed")
            connection.request(method, url, body, headers)
            with contextlib.closing(connection.getresponse()) as found:
                text = _content(found).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as exc:
            if self._closed:
                raise ClosedError(f"the connection to {self.target} is closed") from exc
            raise DiscoveryError(f"{self.target} cannot be reached: {shown(exc) or type(exc).__name__}") from exc
        finally:
            self._open.discard(connection)
            connection.close()
        answer = _Answer(found.status, found.headers.get("X-Consul-Index") or "0", text)
        return answer, found.headers.get(_FILTERED) == "true"

    def denied(self, reason: str) -> DiscoveryError:
        """Return the error for an agent that refuses a request, or omits entries that the token may not read."""
        held = "the token in CONSUL_HTTP_TOKEN may not do this" if self.target.token else "set CONSUL_HTTP_TOKEN"
        return DiscoveryError(f"{self.target}: {shown(reason)}: {held}")

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Translate errors raised while reading an answer; a program other than Consul may have sent it."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
            raise DiscoveryError(f"{self.target}: not a valid Consul response: {shown(repr(exc))}") from exc

    def check_may_read(self, service: str) -> None:
        """Raise if the token may not read `service`: Consul then returns an empty list, as for an empty service.

        Since version 1.11, Consul reports that it left out entries (`X-Consul-Results-Filtered-By-ACLs`). For an empty
        service, Consul does not report whether it would leave out entries. A query that Consul's UI uses (since version
        1.8) answers this question. An agent without this query, or without ACLs, refuses it.
        """
        question = [{"Resource": "service", "Segment": service, "Access": "read"}]
        answer, _ = self._send("POST", "/v1/internal/acl/authorize", json.dumps(question).encode(), 0.0)
        if answer.status != 200:
            return
        with self.understood():
            allowed = all(verdict["Allow"] for verdict in json.loads(answer.body))
        if not allowed:
            raise self.denied(f"the permission service:read is missing for {service!r}")

    def register_service(
        self,
        name: str,
        service_id: str,
        ttl_s: float,
        address: str = "",
        port: int = 0,
        tags: Sequence[str] = (),
        meta: Mapping[str, str] | None = None,
    ) -> None:
        """Register a service with the agent; the service counts as alive until `ttl_s` after its last renewal."""
        check = {
            "Name": ALIVE,
            "TTL": f"{ttl_s:g}s",
            "Status": "passing",
            # Consul removes services that stay critical this long; it rounds up to a minute.
            "DeregisterCriticalServiceAfter": "1m",
        }
        body = {"Name": name, "ID": service_id, "Address": address, "Port": port, "Tags": list(tags), "Check": check}
        self.ask("PUT", "/v1/agent/service/register", {**body, "Meta": dict(meta or {})})

    def renew_service(self, service_id: str) -> bool:
        """Report that a service is alive; return False if the agent does not know the service."""
        answer = self.ask("PUT", f"/v1/agent/check/pass/service:{service_id}", accepts=(400, 404, 500))
        if answer.status == 200:
            return True
        # The code and message for "unknown" differ between versions, so ask the agent what it knows.
        if self.ask("GET", f"/v1/agent/service/{service_id}", accepts=(404,)).status == 404:
            return False
        raise DiscoveryError(f"{self.target}: {answer.status} {shown(answer.body)}")

    def deregister_service(self, service_id: str) -> None:
        """Remove a service from the agent, if the service is registered."""
        self.ask("PUT", f"/v1/agent/service/deregister/{service_id}", accepts=(404,))


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
        """Wake the thread that waits for this connection's answer, so that it returns."""
        self._hung_up = True
        if self.sock is not None:
            with contextlib.suppress(OSError):
                # Not the TLS socket's method, which would tear down state that the reading thread uses.
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class _Punctual(io.RawIOBase):
    """Reads from a socket until a deadline. A socket's own timeout restarts with every byte received."""

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
        raise http.client.HTTPException(f"its answer is larger than {_MOST_BYTES:,} bytes")
    if answer.length:  # bytes still missing: half an answer may look complete
        raise http.client.IncompleteRead(content, answer.length)
    return content
