"""Sends requests to the API server, with deadlines, and with credentials that are reloaded when they change.

The official client reads the credentials from a kubeconfig or a pod's service account; kubeconfig fields that it
ignores are handled here. `ServerClock` learns the server's time from responses.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode, urlsplit

from edl.background import start_call
from edl.errors import AccessDeniedError, ClosedError, KubernetesError, SettingsError
from edl.kube.responses import Call, explain_failure
from edl.kube.settings import KubeSettings
from edl.quoting import shown
from edl.settings import read

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

logger = logging.getLogger(__name__)

_LOGIN_S: Final = 30.0  # for a credential plugin that may prompt a person
_IMPERSONATION: Final = ("as", "as-uid", "as-groups", "as-user-extra")


def load_kubeconfig(configuration: Any, path: str, context: str, plugin_s: float) -> str:
    """Fill in a configuration from a kubeconfig; return the context's namespace, empty if it has none.

    `path` may list several files, as KUBECONFIG does; an empty `path` means `~/.kube/config`. An empty `context` means
    the current context. If there is no terminal, a plugin has `plugin_s` seconds to provide credentials.

    Raises SettingsError if the kubeconfig needs an unsupported feature, or if its plugin fails; a malformed file may
    raise any Exception.
    """
    from kubernetes import config
    from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigMerger

    merged = KubeConfigMerger(path or KUBE_CONFIG_DEFAULT_LOCATION).config
    chosen = _entry(merged, "context", context or merged["current-context"])
    user = _entry(merged, "user", chosen.get("user"))
    if impersonation := [name for name in _IMPERSONATION if user.get(name)]:
        raise SettingsError(
            f"user {chosen.get('user')!r} sets {', '.join(impersonation)}: EDL cannot impersonate, and does not act"
            " with all rights of that user instead. Name a context with the credentials that EDL should use"
        )

    def load() -> None:
        config.load_kube_config(
            path or None, context=context or None, client_configuration=configuration, persist_config=False
        )

    if user.get("exec"):
        plugin = f"the command {shown(user['exec'].get('command'))!r} of user {chosen.get('user')!r}"
        limit_s = max(plugin_s, _LOGIN_S) if sys.stdin.isatty() and sys.stdout.isatty() else plugin_s
        try:
            start_call("edl-kubeconfig", load).result(limit_s)
        except concurrent.futures.TimeoutError as exc:
            raise SettingsError(f"{plugin} returned no credentials within {limit_s:g} s: run it by hand") from exc
        if not configuration.api_key.get("authorization") and not configuration.cert_file:
            raise SettingsError(f"{plugin} returned no credentials: see the log, or run it by hand")
        configuration.refresh_api_key_hook = None  # it has no deadline; a 401 response reloads the credentials
    else:
        load()
    if proxy := str(_entry(merged, "cluster", chosen.get("cluster")).get("proxy-url") or ""):
        scheme = urlsplit(proxy).scheme
        if scheme not in ("http", "https"):
            raise SettingsError(f"proxy-url {shown(scheme)}://…: only http:// and https:// are supported")
        configuration.proxy, configuration.no_proxy = proxy, None  # overrides the environment's, as in kubectl
    return str(chosen.get("namespace") or "")


def _entry(merged: Any, kind: str, name: Any) -> Mapping[str, Any]:
    found = merged[f"{kind}s"].get_with_name(name, safe=True)
    value = found.safe_get(kind) if found is not None else None
    return getattr(value, "value", value) or {}


_AGREEING: Final = 3  # consecutive responses that must agree: a single one may be a proxy's
_NEAR_S: Final = 2.0
"""Tolerance: smaller differences count as agreement. A `Date` header contains whole seconds, and a response takes
time."""
_SLOWEST_S: Final = 5.0  # a response that took longer says too little about the time
_LARGEST_SKEW_S: Final = 86400.0  # with a clock so wrong, certificates and tokens would not be valid


class ServerClock:
    """Tells the API server's time, used in objects' timestamps, from the server's `Date` headers. Thread-safe.

    Deadlines that end or delete a job use this time. The time is therefore corrected only if the `Date` headers of
    three consecutive responses agree, and are within a day of this machine's clock.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._skews: deque[float] = deque(maxlen=_AGREEING)
        self._skew_s = 0.0

    def read(self) -> float:
        """Return the API server's time, in seconds since 1970."""
        return self._clock() + self._skew_s

    def note(self, date: str, took_s: float) -> None:
        """Record the `Date` header of a response from the API server; the response began `took_s` after the request."""
        try:
            dated = parsedate_to_datetime(date) if date else None
            dated_s = None if dated is None or dated.tzinfo is None else dated.timestamp()
        except (ValueError, OverflowError, IndexError, TypeError):
            return
        if dated_s is None or not 0.0 <= took_s <= _SLOWEST_S:
            return
        with self._lock:
            self._skews.append(dated_s + 0.5 - (self._clock() - took_s / 2))
            found, spread = sorted(self._skews), max(self._skews) - min(self._skews)
            if len(found) < _AGREEING or spread > _NEAR_S or abs(found[0]) > _LARGEST_SKEW_S:
                return
            skew_s = found[_AGREEING // 2]
            if abs(skew_s - self._skew_s) <= _NEAR_S:
                return
            self._skew_s = skew_s
        logger.warning("this machine's clock is %+.0f s off the API server's clock, which EDL follows", -skew_s)


_JSON: Final = "application/json"
_MOST_BYTES: Final = 256 * 1024**2
"""Maximum size of a response: a page of 500 objects of half a megabyte each. A longer response is not from an API
server."""
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MOST_CONNECTIONS: Final = 64
"""Idle connections kept for reuse: one for each thread of an operator. Further calls open and close their own
connections."""
_CHUNK: Final = 256 * 1024  # a page of pods is some megabytes
_CALL_TIMEOUTS: Final = 3
"""A whole call takes at most this many times the timeout: once to connect, once until the response starts, and once
until it is complete."""
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", 0x10)), 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Socket options that detect a vanished host after a minute, even on streams that may legitimately be silent."""


class _Access(NamedTuple):
    """A kubeconfig or service account as read by the official client."""

    url: str
    namespace: str
    api_client: Any


class Connection:
    """Sends requests to an API server. `KubeClient` adds the verbs, and documents the arguments and errors."""

    def __init__(self, settings: KubeSettings, on_answer: Callable[[Call, int], object]) -> None:
        self.settings: Final = settings
        self._on_answer = on_answer
        self.server_clock: Final = ServerClock()
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._access = _load_access(settings)

    @property
    def url(self) -> str:
        """URL of the API server."""
        return self._access.url

    @property
    def namespace(self) -> str:
        """Namespace for calls that do not specify one."""
        return self.settings.namespace or self._access.namespace or "default"

    def send(
        self,
        call: Call,
        method: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = _JSON,
    ) -> bytes:
        """Send a request, and read the whole response."""
        deadline = time.monotonic() + _CALL_TIMEOUTS * self.settings.timeout_s
        with self._open(call, method, query, body, content_type, self.settings.timeout_s) as response:
            return _read_whole(call, self.url, response, deadline)

    def stream(
        self, call: Call, query: Mapping[str, str], read_timeout_s: float | None, *, begins_at_once: bool = False
    ) -> Stream:
        """Start reading a streamed response, which the caller closes.

        `read_timeout_s` is the longest silence allowed; None for no limit while the server's host is reachable. With
        `begins_at_once`, the first byte must arrive within the timeout of an ordinary call.
        """
        first_s = self.settings.timeout_s if begins_at_once else read_timeout_s
        stream = Stream(call, self.url, self._open(call, "GET", query, None, "", first_s))
        if begins_at_once:
            stream.set_silence_limit(read_timeout_s)
        return stream

    def close(self) -> None:
        """Close the idle connections; calls in flight finish by themselves. May be called twice."""
        if self._pid != os.getpid():
            return
        self._closed = True
        _close_idle(self._access)

    def _open(
        self,
        call: Call,
        method: str,
        query: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
        read_timeout_s: float | None,
    ) -> BaseHTTPResponse:
        import urllib3

        self._check()
        timeout = urllib3.Timeout(connect=self.settings.timeout_s, read=read_timeout_s)
        access = self._access
        for attempt in (1, 2):
            headers = {"Accept": _JSON, "User-Agent": "edl"}
            if body is not None:
                headers["Content-Type"] = content_type
            with _translated(call, access.url):
                access.api_client.update_params_for_auth(headers, [], ["BearerToken"])
                code, sent_s = 0, time.monotonic()
                try:
                    response: BaseHTTPResponse = access.api_client.rest_client.pool_manager.request(
                        method,
                        access.url + call.path + (f"?{urlencode(query)}" if query else ""),
                        body=body,
                        headers=headers,
                        timeout=timeout,
                        retries=False,
                        redirect=False,
                        preload_content=False,
                    )
                    code = response.status
                    # An error page may be that of a proxy, whose clock is unknown.
                    if 200 <= code <= 299 and response.headers.get("Content-Type", "").startswith(_JSON):
                        self.server_clock.note(response.headers.get("Date", ""), time.monotonic() - sent_s)
                finally:
                    self._on_answer(call, code)
            if 200 <= response.status <= 299:
                return response
            with response:
                deadline = time.monotonic() + self.settings.timeout_s
                answer = _read_whole(call, access.url, response, deadline)
            if response.status != 401 or attempt == 2:
                break
            access = self._reload(access)  # a token has expired, or a certificate was replaced
        raise explain_failure(call, access.url, response.status, answer, response.headers.get("Retry-After", ""))

    def _reload(self, refused: _Access) -> _Access:
        """Reload the credentials, unless another thread has done so since `refused` was read."""
        with self._lock:
            if self._access is refused:
                try:
                    self._access = _load_access(self.settings)
                except SettingsError as exc:
                    raise AccessDeniedError(f"{refused.url}: 401, and no other credentials can be read: {exc}") from exc
                _close_idle(refused)
            return self._access

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError("KubeClient was opened before a fork: open it again in the child")
        if self._closed:
            raise ClosedError("KubeClient is closed")


class Stream:
    """A streamed response."""

    def __init__(self, call: Call, url: str, response: BaseHTTPResponse) -> None:
        self._call = call
        self._url = url
        self._response = response
        self._closing = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield chunks; KubernetesError if the connection breaks or is silent too long, but not after `interrupt`."""
        try:
            with _translated(self._call, self._url):
                while not self._closing and (piece := self._response.read1(_CHUNK)):
                    yield piece
        except KubernetesError:
            if not self._closing:
                raise

    def lines(self) -> Iterator[bytes]:
        """Yield whole lines without their line ends; a truncated last line is left out."""
        rest = b""
        for piece in self:
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole

    def set_silence_limit(self, seconds: float | None) -> None:
        """Change how long the rest of the stream may be silent; None for no limit."""
        sock = getattr(getattr(self._response, "connection", None), "sock", None)
        if sock is None:  # for a response without a length, http.client moves the socket to the response
            sock = getattr(
                getattr(getattr(getattr(self._response, "_fp", None), "fp", None), "raw", None), "_sock", None
            )
        if sock is not None:
            sock.settimeout(None if seconds is None else max(seconds, 0.001))

    def interrupt(self) -> None:
        """Make a read in another thread end at once."""
        self._closing = True
        with contextlib.suppress(Exception):  # whatever the state of a socket that is being closed
            self._response.shutdown()

    def close(self) -> None:
        """Close the connection."""
        self._closing = True
        with contextlib.suppress(OSError, ValueError):
            self._response.close()


def _read_whole(call: Call, url: str, response: BaseHTTPResponse, deadline: float) -> bytes:
    pieces: list[bytes] = []
    left = _MOST_BYTES
    with _translated(call, url):
        while piece := response.read1(_CHUNK):
            pieces.append(piece)
            left -= len(piece)
            if time.monotonic() > deadline or left < 0:
                response.close()
                raise KubernetesError(f"{url}: {call}: the API server's response is too slow or too large")
        response.release_conn()
    return b"".join(pieces)


@contextlib.contextmanager
def _translated(call: Call, url: str) -> Iterator[None]:
    import urllib3.exceptions
    from kubernetes.config import ConfigException

    try:
        yield
    except urllib3.exceptions.SSLError as exc:
        raise KubernetesError(
            f"{url}: {call}: no TLS connection ({shown(exc)}): check that the cluster's certificate-authority in the"
            " kubeconfig is that of this API server, and that the server's certificate is valid for this name"
        ) from exc
    except (urllib3.exceptions.HTTPError, OSError) as exc:
        timeouts = (urllib3.exceptions.ReadTimeoutError, urllib3.exceptions.ConnectTimeoutError, TimeoutError)
        if not isinstance(exc, timeouts) or isinstance(exc, urllib3.exceptions.NewConnectionError):
            raise KubernetesError(
                f"{url}: {call}: the API server cannot be reached ({shown(exc)}): check that it runs, and that the"
                " kubeconfig names the right address"
            ) from exc
        raise KubernetesError(
            f"{url}: {call}: the API server did not answer in time ({shown(exc)}): check whether it is overloaded, and"
            " whether a firewall drops packets"
        ) from exc
    except (ConfigException, ValueError) as exc:
        raise KubernetesError(f"{url}: {call}: the credentials cannot be read ({shown(exc)})") from exc


def _close_idle(access: _Access) -> None:
    """Close the idle connections. Clearing the manager would leave the connections to the garbage collector."""
    manager = access.api_client.rest_client.pool_manager
    for key in manager.pools.keys():  # noqa: SIM118 - it is not a dict, and refuses to be iterated
        pool = manager.pools.get(key)
        if pool is not None:
            pool.close()
    manager.clear()


def _load_access(settings: KubeSettings) -> _Access:
    import urllib3
    from kubernetes import client
    from urllib3.connection import HTTPConnection

    configuration = client.Configuration()
    # The official client reads these variables, and then forgets what it has read.
    configuration.no_proxy = read("no_proxy", str) or read("NO_PROXY", str)
    source, namespace = _configure(settings, configuration)
    configuration.retries = False
    configuration.connection_pool_maxsize = _MOST_CONNECTIONS
    url = str(configuration.host).rstrip("/")
    try:
        api_client = client.ApiClient(configuration)
    except (OSError, ValueError) as exc:
        raise SettingsError(f"{source}: its certificates cannot be used: {shown(exc)}") from exc
    pool_options = api_client.rest_client.pool_manager.connection_pool_kw
    pool_options["socket_options"] = [*HTTPConnection.default_socket_options, *_KEEPALIVE]
    if not configuration.verify_ssl:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # which it logs for each connection
        words = "%s: any host may pose as this API server: %s sets insecure-skip-tls-verify"
        logger.warning(words, url, source)
    return _Access(url, namespace, api_client)


def _configure(settings: KubeSettings, configuration: Any) -> tuple[str, str]:
    """Fill in the cluster and the credentials; return their source, and the namespace."""
    from kubernetes import config

    named = settings.kubeconfig or read("KUBECONFIG", str)
    in_pod = read("KUBERNETES_SERVICE_HOST", str) is not None
    if in_pod and not named and not settings.context:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config(configuration)
            namespace = ""
            with contextlib.suppress(OSError):
                namespace = (_SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
            return "the pod's service account", namespace
    source = named or "~/.kube/config"
    context = settings.context
    try:
        namespace = load_kubeconfig(configuration, named or "", context, _CALL_TIMEOUTS * settings.timeout_s)
    except Exception as exc:  # not our file: bad yaml, keys, base64 and paths raise all kinds of errors
        words = shown(exc)
        if isinstance(exc, (TypeError, AttributeError, KeyError)):  # their messages are about Python, not the file
            words = "it is empty, or lacks clusters, users, contexts or current-context in their usual form"
            if not any(Path(part).expanduser().exists() for part in source.split(os.pathsep)):
                words = "there is no such file"
        raise SettingsError(
            f"{source} cannot be used as a kubeconfig{f' with context {context!r}' if context else ''}: {words}."
            " Set KUBECONFIG, or run in a pod with a service account"
        ) from exc
    return source, namespace
