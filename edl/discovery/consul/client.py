"""Consul's HTTP API: where the agent is, what EDL asks of it, and every error translated.

No client library is behind it: closing a watch must hang up on a blocking query from another thread, and every request
needs a deadline, which needs an HTTP connection of our own. A connection serves one request, so an agent's restart
breaks nothing that was kept idle. Consul's environment variables (`CONSUL_HTTP_TOKEN`, ...) say how to authenticate.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import math
import socket
import ssl
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.parse import SplitResult, parse_qsl, quote, urlencode

from edl.discovery.resource import Resource
from edl.errors import ClosedError, DiscoveryError, SettingsError
from edl.quoting import shown
from edl.settings import read

__all__ = ["ConsulClient", "ConsulService", "ConsulTarget", "KeyValuePair"]

Json = Any

_MOST_BYTES: Final = 64 * 1024**2
"""Of an answer: some hundred thousand teachers. A longer answer is not Consul's, and must not fill the memory."""
_FILTERED: Final = "X-Consul-Results-Filtered-By-ACLs"
"""Since Consul 1.11. If something is left that may be read, it is used: a token may be for some services only."""
_EMPTY: Final = ("[]", "{}", "null")
_ALIVE: Final = "alive"  # the name of a registration's own check
_NODE_ALIVE: Final = "serfHealth"  # Consul's own name


@dataclass(frozen=True)
class ConsulTarget:
    """An agent.

    Attributes:
        host, port: of its HTTP API.
        timeout_s: how long a request may take, beyond the time that a blocking query asks the agent to wait.
        dc: the datacenter to read services from, empty for the agent's own.
        token: the ACL token. `CONSUL_HTTP_TOKEN`. Never shown.
        tls: None without TLS (`consul+https:`, or `CONSUL_HTTP_SSL=true`). The context holds `CONSUL_CACERT`,
            `CONSUL_CLIENT_CERT`, `CONSUL_CLIENT_KEY` and `CONSUL_HTTP_SSL_VERIFY`.
        server_name: the name that the agent's certificate must carry. `CONSUL_TLS_SERVER_NAME`, else the host.
    """

    host: str
    port: int
    timeout_s: float = 5.0
    dc: str = ""
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    server_name: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"Consul at {'https' if self.tls else 'http'}://{host}:{self.port}"

    @classmethod
    def of(cls, parts: SplitResult, timeout_s: float, environ: Mapping[str, str] | None = None) -> ConsulTarget:
        """Return what a split URL and the environment say.

        Raises:
            SettingsError: something in it is unusable. The message repeats no password, token or query.
        """
        where = f"discovery URL {parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        if "@" in parts.netloc:
            raise SettingsError(f"{where}: a URL is no place for a password; set CONSUL_HTTP_TOKEN")
        if parts.path not in ("", "/") or parts.fragment:
            raise SettingsError(f"{where}{parts.path}: a host, a port and at most ?dc=NAME are expected")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(options) - {"dc"})
        if unknown or (parts.query and not options.get("dc")):
            raise SettingsError(
                f"{where}: unknown or empty option {', '.join(unknown) or 'dc'}; there is only ?dc=NAME"
            )
        secure = bool(read("CONSUL_HTTP_SSL", _boolean, environ)) or parts.scheme == "consul+https"
        try:
            port = parts.port or (8501 if secure else 8500)
        except ValueError as exc:
            raise SettingsError(f"{where}: {exc}") from exc
        if not parts.hostname:
            raise SettingsError(f"{where}: the host is missing; expected is consul://host:8500")
        return cls(
            host=parts.hostname,
            port=port,
            timeout_s=timeout_s,
            dc=options.get("dc", ""),
            token=read("CONSUL_HTTP_TOKEN", str, environ) or "",
            tls=_tls(environ) if secure else None,
            server_name=read("CONSUL_TLS_SERVER_NAME", str, environ) or parts.hostname,
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


@dataclass(frozen=True)
class ConsulService:
    """An instance of a service as Consul's health endpoint tells of it.

    Attributes:
        created: grows with every registration.
        health: "passing" if all checks pass; "lapsed" if failing checks say only that a service was not heard of: the
            TTL check of a registration of ours, and the node's own; else "failing".
    """

    node: str
    id: str
    address: str
    port: int
    tags: Sequence[str]
    meta: Mapping[str, str]
    created: int
    health: Literal["passing", "lapsed", "failing"] = "passing"


@dataclass(frozen=True)
class KeyValuePair:
    """A key as Consul holds it; `session` is empty while it is not locked."""

    key: str
    value: bytes
    index: int
    session: str


class _Answer(NamedTuple):
    status: int
    found_index: str
    body: str


class ConsulClient(Resource):
    """Calls to an agent. Closing it ends calls that are under way.

    All methods raise DiscoveryError when the agent cannot be reached, or refuses.
    """

    def __init__(self, target: ConsulTarget) -> None:
        super().__init__()
        self.target = target
        self._open: set[_Connection] = set()

    def _halt(self) -> None:
        for connection in self._open.copy():
            connection.hang_up()

    def _ask(
        self,
        method: str,
        path: str,
        body: Json = None,
        *,
        accepts: Collection[int] = (),
        wait: tuple[int | None, float] = (None, 0.0),
        **options: str,
    ) -> _Answer:
        """Send a request.

        Args:
            method: Of HTTP.
            path: Without options.
            body: Sent as JSON.
            accepts: Status codes that are no error, beside 200.
            wait: An index, and how many seconds the agent may wait for another one.
            options: Of the URL; empty ones are left out.
        """
        options = {name: value for name, value in options.items() if value}
        block_s = 0.0
        if wait[0] is not None:
            options |= {"index": str(wait[0]), "wait": f"{wait[1]:g}s"}
            block_s = wait[1] * 17 / 16  # the agent adds up to a sixteenth at random
        url = quote(path, safe="/:") + (f"?{urlencode(options)}" if options else "")
        answer, filtered = self._send(method, url, b"" if body is None else json.dumps(body).encode(), block_s)
        if answer.status == 403 and 403 not in accepts:
            raise self._denied(answer.body or "permission denied")
        if answer.status not in (200, *accepts):
            raise DiscoveryError(f"{self.target}: {answer.status} {shown(answer.body)}")
        if filtered and answer.body.strip() in _EMPTY:
            raise self._denied("Consul left out all that there is, since the token may not read it")
        return answer

    def _send(self, method: str, url: str, body: bytes, block_s: float) -> tuple[_Answer, bool]:
        self._check()
        headers = {"Content-Type": "application/json"}
        if self.target.token:
            headers["X-Consul-Token"] = self.target.token
        connection = _Connection(self.target, self.target.timeout_s + block_s)
        # No lock, since a signal handler may close this here. The connection is in the set before the look at
        # `_closed`, so that a `close` that comes between finds the one or the other.
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

    def _denied(self, reason: str) -> DiscoveryError:
        held = "the token in CONSUL_HTTP_TOKEN may not do this" if self.target.token else "set CONSUL_HTTP_TOKEN"
        return DiscoveryError(f"{self.target}: {shown(reason)}: {held}")

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """Around the reading of an answer, which something other than Consul may have given."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
            raise DiscoveryError(f"{self.target}: the answer is not what Consul answers: {shown(repr(exc))}") from exc

    # --- Services ---

    def instances(self, service: str, index: int | None = None, wait_s: float = 0.0) -> tuple[int, list[ConsulService]]:
        """Return the instances of `service`; with an index, as soon as they differ from what they were then."""
        answer = self._ask("GET", f"/v1/health/service/{service}", wait=(index, wait_s), dc=self.target.dc)
        with self._understood():
            found = int(answer.found_index), [_service(entry) for entry in json.loads(answer.body) or ()]
        if not found[1]:
            self._check_may_read(service)
        return found

    def _check_may_read(self, service: str) -> None:
        """Tell an empty service from one that the token may not read: Consul answers both with an empty list.

        It says since 1.11 that it left something out (`X-Consul-Results-Filtered-By-ACLs`), but not whether it would
        have. What its UI asks tells, since 1.8. An agent without that, or without ACLs, refuses the question.
        """
        question = [{"Resource": "service", "Segment": service, "Access": "read"}]
        answer, _ = self._send("POST", "/v1/internal/acl/authorize", json.dumps(question).encode(), 0.0)
        if answer.status != 200:
            return
        with self._understood():
            allowed = all(verdict["Allow"] for verdict in json.loads(answer.body))
        if not allowed:
            raise self._denied(f"no service:read for {service!r}")

    def service_names(self) -> list[str]:
        """Return all services in the catalog, with live instances or without."""
        answer = self._ask("GET", "/v1/catalog/services", dc=self.target.dc)
        with self._understood():
            names = list(json.loads(answer.body).keys())
        if not names:  # Consul's own service is in every catalog, so that all was left out
            raise self._denied("no service:read for any service")
        return names

    def has_leader(self) -> bool:
        """Whether the servers can take a registration."""
        answer = self._ask("GET", "/v1/status/leader")
        with self._understood():
            return bool(json.loads(answer.body).strip())

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
        """Register a service at the agent, alive until it has not been renewed for `ttl_s`."""
        check = {
            "Name": _ALIVE,
            "TTL": f"{ttl_s:g}s",
            "Status": "passing",
            # Consul removes those that stay away; it rounds up to a minute.
            "DeregisterCriticalServiceAfter": "1m",
        }
        body = {"Name": name, "ID": service_id, "Address": address, "Port": port, "Tags": list(tags), "Check": check}
        self._ask("PUT", "/v1/agent/service/register", {**body, "Meta": dict(meta or {})})

    def renew_service(self, service_id: str) -> bool:
        """Say that a service is alive; False if the agent does not know it."""
        answer = self._ask("PUT", f"/v1/agent/check/pass/service:{service_id}", accepts=(400, 404, 500))
        if answer.status == 200:
            return True
        # The code and the words for "unknown" differ between versions, so the agent is asked what it knows.
        if self._ask("GET", f"/v1/agent/service/{service_id}", accepts=(404,)).status == 404:
            return False
        raise DiscoveryError(f"{self.target}: {answer.status} {shown(answer.body)}")

    def deregister_service(self, service_id: str) -> None:
        """Remove a service from the agent, if it is there."""
        self._ask("PUT", f"/v1/agent/service/deregister/{service_id}", accepts=(404,))

    # --- Sessions ---

    def create_session(self, service_id: str, ttl_s: float) -> str:
        """Create a session that ends as soon as the service is not alive, and takes the keys that it locks with it.

        A session's own TTL is ten seconds at least, and Consul may double it, so the service's check does the work.
        The TTL is for the case that the agent disappears and does not run the check.
        """
        body = {
            "Name": "edl",
            "Checks": ["serfHealth", f"service:{service_id}"],
            "LockDelay": "0s",
            "Behavior": "delete",
            "TTL": f"{max(10, math.ceil(ttl_s))}s",
        }
        answer = self._ask("PUT", "/v1/session/create", body)
        with self._understood():
            return str(json.loads(answer.body)["ID"])

    def renew_session(self, session: str) -> bool:
        """Renew; False if the session has ended."""
        return self._ask("PUT", f"/v1/session/renew/{session}", accepts=(404,)).status != 404

    def destroy_session(self, session: str) -> None:
        """End a session now."""
        self._ask("PUT", f"/v1/session/destroy/{session}")

    # --- Keys ---

    def pair(self, key: str) -> KeyValuePair | None:
        """Read a key."""
        answer = self._ask("GET", f"/v1/kv/{key}", accepts=(404,))
        with self._understood():
            return None if answer.status == 404 else _pair(json.loads(answer.body)[0])

    def pairs(self, prefix: str, index: int | None = None, wait_s: float = 0.0) -> tuple[int, list[KeyValuePair]]:
        """Return all keys under `prefix`; with an index, as soon as they differ from what they were then."""
        answer = self._ask("GET", f"/v1/kv/{prefix}", accepts=(404,), wait=(index, wait_s), recurse="1")
        with self._understood():
            found = () if answer.status == 404 else json.loads(answer.body)
            return int(answer.found_index), [_pair(entry) for entry in found]

    def transact(self, *operations: Mapping[str, Any]) -> int | None:
        """Do all of `operations` on keys, or none.

        Returns:
            The index of the last key afterwards; None if an operation refused, for example a check.
        """
        answer = self._ask("PUT", "/v1/txn", [{"KV": _encoded(operation)} for operation in operations], accepts=(409,))
        if answer.status == 409:
            return None
        with self._understood():
            results = json.loads(answer.body)["Results"] or [{"KV": {"ModifyIndex": 0}}]  # deletions have no result
            return int(results[-1]["KV"]["ModifyIndex"])


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


def _service(found: Json) -> ConsulService:
    node, service = found["Node"], found["Service"]
    return ConsulService(
        node=str(node["Node"]),
        id=str(service["ID"]),
        address=str(service.get("Address") or node["Address"]),
        port=int(service.get("Port") or 0),
        tags=tuple(service.get("Tags") or ()),
        meta=dict(service.get("Meta") or {}),
        created=int(service.get("CreateIndex") or 0),
        health=_health(found.get("Checks") or (), ours="edl-id" in (service.get("Meta") or {})),
    )


def _health(checks: Sequence[Mapping[str, Any]], *, ours: bool) -> Literal["passing", "lapsed", "failing"]:
    failing = [check for check in checks if check["Status"] != "passing"]
    if not failing:
        return "passing"
    # Another check that fails, or maintenance, is somebody's word that the instance is not to be used.
    silent = all(check["CheckID"] == _NODE_ALIVE or check["Name"] == _ALIVE for check in failing)
    return "lapsed" if ours and silent else "failing"


def _pair(found: Json) -> KeyValuePair:
    return KeyValuePair(
        found["Key"], base64.b64decode(found["Value"] or ""), int(found["ModifyIndex"]), found.get("Session", "")
    )


def _encoded(operation: Mapping[str, Any]) -> dict[str, Any]:
    value = operation.get("Value")
    return {**operation, "Value": base64.b64encode(value).decode()} if isinstance(value, bytes) else dict(operation)
