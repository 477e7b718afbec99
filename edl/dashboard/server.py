"""Serves the dashboard: static files, `/api/state`, `/api/events`, `/metrics` and probes, in its own threads."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mimetypes
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from edl.background import start_call
from edl.dashboard.metrics import DashboardMetrics
from edl.dashboard.state import StateReader
from edl.dashboard.state.cluster import ClusterView
from edl.dashboard.streams import NO_STORE, EventStreams, LookLoop
from edl.errors import SettingsError
from edl.http_server.access import HostCheck, TokenCheck
from edl.http_server.server import STOP_S, AppServer
from edl.kube.settings import KubeSettings
from edl.protocol.channel import is_this_host
from edl.protocol.tls import CredentialFiles
from edl.settings import Credentials

__all__ = ["DashboardServer", "DashboardSettings"]

logger = logging.getLogger(__name__)

DEFAULT_PORT: Final = 8650
"""Port of `edl dashboard`: free on most machines, since no well-known service uses it."""
_MOST_CONNECTIONS: Final = 400
"""Twice the maximum number of event-stream clients."""
_LOOK_S: Final = 10.0
"""How long a request waits for a read of the store; Prometheus itself gives up after 10 s by default."""
_READY_LOOK_S: Final = 0.8
"""How long a probe waits for a read of the store; a kubelet gives up after 1 s by default, and retries."""
_PROBES: Final = frozenset({"/healthz", "/livez", "/readyz"})
"""Paths that are answered for any Host and without a token: a kubelet sends neither an allowed Host nor a token."""
_ASK_TOKEN: Final = {"WWW-Authenticate": 'Basic realm="EDL: a token as the password, any name", charset="UTF-8"'}
"""Makes a browser ask its user for a token, and send it with all later requests."""
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "edl",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every response: nothing is loaded from other hosts, no type is guessed, and nothing is framed."""
_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Fixed MIME types: the machine's own may differ, and a browser does not run a module that has a wrong type."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class DashboardSettings:
    """Settings of a dashboard server.

    Attributes:
        store: URL of the Store whose jobs are shown.
        registry: URL where teachers register; None for `store`.
        host: Name or address to listen on. With 127.0.0.1, only this machine can reach the page.
        port: Port to listen on; 0 for a free one.
        job: The only job to show; None for all.
        allowed_hosts: Names, besides this machine's, that requests may have in the Host header.
        credentials: Certificate and key for HTTPS, and a file of tokens, any of which gives access.
        store_credentials: Credentials for a Store served by an agent of `edl run`; None to use the environment.
        kube: Kubernetes cluster whose jobs and pools are also shown; None for none.
        kube_namespaces: Namespaces of these jobs and pools. An empty name or tuple means the namespace of `kube`.

    Raises:
        SettingsError: Tokens would cross the network in clear text.
    """

    store: str
    registry: str | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    job: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    credentials: Credentials = field(default_factory=Credentials)
    store_credentials: Credentials | None = None
    kube: KubeSettings | None = None
    kube_namespaces: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        asks_token = self.credentials.token_file and not self.credentials.allow_insecure_tokens
        if asks_token and not self.credentials.cert and not self.local:
            raise SettingsError(
                f"a page on {self.host} accepts no tokens without TLS: anyone on the network could read them; set "
                "--tls-cert and --tls-key, or trust the network (--allow-insecure-tokens)"
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the page."""
        return is_this_host(f"[{self.host}]:0" if ":" in self.host else f"{self.host}:0")


class DashboardServer(AppServer):
    """Serves the dashboard of a Store.

    If the store does not respond, the page says so, and shows the last known state.

    Args:
        settings: The store, the address, and the access rules.
        registries: Registries whose metrics `/metrics` includes.

    Raises:
        SettingsError: The server cannot listen on the address, or a credentials file cannot be used.
    """

    def __init__(self, settings: DashboardSettings, registries: Iterable[CollectorRegistry] = ()) -> None:
        credentials = CredentialFiles.of(settings.credentials, serving=True)
        super().__init__("edl-dashboard", settings.host, settings.port, credentials, _MOST_CONNECTIONS)
        self._settings = settings
        self._registries = tuple(registries)
        self._reader = StateReader(
            settings.store,
            registry_url=settings.registry,
            job=settings.job,
            credentials=settings.store_credentials,
            cluster=ClusterView(settings.kube, settings.kube_namespaces) if settings.kube is not None else None,
        )
        try:
            self._reader.open()
        except SettingsError:
            self._reader.close()
            raise
        self.start()
        if not settings.local and not settings.credentials.token_file:
            logger.warning(
                "the page listens on %s without a token: anyone who reaches this port sees the jobs' names, hosts and "
                "errors; set --token-file (docs/dashboard.md)",
                settings.host,
            )

    async def serve(self) -> None:
        """See `AppServer.serve`."""
        self._looks = looks = LookLoop(self._reader, self._loop)
        streams = EventStreams(looks)
        self._metrics = DashboardMetrics(
            lambda: looks.latest.state if looks.latest is not None else None, self._registries
        )
        self._hosts = HostCheck(self._settings.local, self._settings.allowed_hosts)
        self._files = _read_static_files()
        try:
            await self.run_app(self._app(streams), looks.end)
        finally:
            await asyncio.wrap_future(start_call("edl-dashboard-close", lambda: looks.close(STOP_S)))

    def _app(self, streams: EventStreams) -> web.Application:
        tokens = None
        if self._credentials is not None and self._credentials.settings.token_file:
            tokens = TokenCheck(self._credentials)

        @web.middleware
        async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
            try:
                if request.path not in _PROBES:
                    self._check_access(request, tokens)
                return await handler(request)
            except web.HTTPException as exc:
                exc.headers.update(HEADERS)
                raise

        async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
            response.headers.update(HEADERS)  # also for streams, whose headers are sent before the handler returns

        app = web.Application(middlewares=[check])
        app.on_response_prepare.append(add_headers)
        app.router.add_get("/", self._file)
        app.router.add_get("/static/{path:.+}", self._file)
        app.router.add_get("/api/state", self._state)
        app.router.add_get("/api/events", streams.answer)
        app.router.add_get("/metrics", self._answer_metrics)
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/readyz", self._ready)
        return app

    def _check_access(self, request: web.Request, tokens: TokenCheck | None) -> None:
        """Refuse a request without an allowed Host or, if tokens are required, without a token."""
        if tokens is None and not self._hosts.allows(request.headers.get("Host")):
            raise web.HTTPForbidden(
                text="the name in the Host header is not allowed: use the IP address, or start the server with "
                "--allow-host NAME\n"
            )
        if tokens is not None and not tokens.allows(request.headers.get("Authorization")):
            words = "token required (a line of --token-file): Authorization: Bearer TOKEN, or a browser's password\n"
            raise web.HTTPUnauthorized(text=words, headers={**NO_STORE, **_ASK_TOKEN})

    async def _state(self, _: web.Request) -> web.Response:
        published = await self._looks.fresh(_LOOK_S)
        if published is None:
            raise web.HTTPServiceUnavailable(text="the store has not answered yet\n", headers={"Retry-After": "2"})
        response = web.Response(body=await published.encoded(), content_type="application/json", headers=NO_STORE)
        response.enable_compression()
        return response

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        await self._looks.fresh(_LOOK_S)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._metrics.registry), headers={**NO_STORE, "Content-Type": content_type})

    async def _live(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n", headers=NO_STORE)

    async def _ready(self, _: web.Request) -> web.Response:
        if self._looks.latest is None and await self._looks.fresh(_READY_LOOK_S) is None:
            return web.Response(status=503, text="the store has not answered yet\n", headers=NO_STORE)
        return web.Response(text="ok\n", headers=NO_STORE)

    async def _file(self, request: web.Request) -> web.Response:
        path = request.match_info.get("path", "index.html")
        if path not in self._files:
            raise web.HTTPNotFound(text="there is no such file\n")
        data, content_type, etag = self._files[path]
        headers = {"Cache-Control": "no-cache", "ETag": f'"{etag}"', "Content-Type": content_type}
        if any(tag.value == etag for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=data, headers=headers)


def _read_static_files() -> Mapping[str, tuple[bytes, str, str]]:
    """Return content, type and ETag of the page's files by path. Files added later are never sent."""
    found = {}
    for path in sorted(_STATIC.rglob("*")):
        if path.is_file() and path.resolve().is_relative_to(_STATIC.resolve()):
            data = path.read_bytes()
            guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            etag = hashlib.sha256(data).hexdigest()[:32]
            found[path.relative_to(_STATIC).as_posix()] = (data, _TYPES.get(path.suffix, guessed), etag)
    return found
