"""Routes of the page, and what holds for all of them.

What does not belong here: threads and sockets (`server`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from html import escape
from typing import Final

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from edl.dashboard.metrics import DashboardMetrics
from edl.dashboard.server.access import TokenCookieCheck
from edl.dashboard.server.event_stream import EventStreams
from edl.dashboard.server.headers import HEADERS, NO_STORE
from edl.dashboard.server.look_loop import LookLoop
from edl.dashboard.server.static_files import StaticFile
from edl.http_server.access import HostCheck

__all__ = ["Pages", "make_app"]

logger = logging.getLogger(__name__)

_MAX_BODY: Final = 4096
"""Bytes of a request: a form with a token."""
_LOOK_S: Final = 10.0
"""For a look that a request waits for; Prometheus itself gives up after 10 s unless told otherwise."""
_READY_LOOK_S: Final = 0.8
"""For a look that a probe waits for; a kubelet gives up after 1 s unless told otherwise, and asks again."""
_COOKIE_S: Final = 30 * 24 * 3600
"""A month, as long as the process lives."""

_PROBES: Final = frozenset({"/healthz", "/livez", "/readyz"})
"""Paths that are answered under any name and without a token: a kubelet has neither."""
_OPEN: Final = _PROBES | {"/login"}
"""Paths that need no token."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """Answers requests, except for the stream of events.

    Args:
        looks: with the state.
        metrics: for Prometheus.
        files: of the page, by path.
        tokens: that open it; None where it is open.
        secure: it is served over TLS.
    """

    def __init__(
        self,
        looks: LookLoop,
        metrics: DashboardMetrics,
        files: Mapping[str, StaticFile],
        tokens: TokenCookieCheck | None,
        secure: bool,
    ) -> None:
        self._looks = looks
        self._metrics = metrics
        self._files = files
        self._tokens = tokens
        self._secure = secure

    async def state(self, _: web.Request) -> web.Response:
        """Answer `/api/state`."""
        published = await self._looks.fresh(_LOOK_S)
        if published is None:
            raise web.HTTPServiceUnavailable(text="the store has not answered yet\n", headers={"Retry-After": "2"})
        response = web.Response(body=await published.encoded(), content_type="application/json", headers=NO_STORE)
        response.enable_compression()
        return response

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer `/metrics`."""
        await self._looks.fresh(_LOOK_S)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._metrics.registry), headers={**NO_STORE, "Content-Type": content_type})

    async def health(self, _: web.Request) -> web.Response:
        """Answer `/healthz` and `/livez`: this process lives. Asks the Store nothing."""
        return web.Response(text="ok\n", headers=NO_STORE)

    async def ready(self, _: web.Request) -> web.Response:
        """Answer `/readyz`: there is something to show, of a store that has answered at least once."""
        if self._looks.latest is None and await self._looks.fresh(_READY_LOOK_S) is None:
            return web.Response(status=503, text="the store has not answered yet\n", headers=NO_STORE)
        return web.Response(text="ok\n", headers=NO_STORE)

    async def index(self, request: web.Request) -> web.Response:
        """Answer `/`."""
        return self._file(request, "index.html")

    async def static(self, request: web.Request) -> web.Response:
        """Answer `/static/PATH`."""
        return self._file(request, request.match_info["path"])

    async def login_form(self, _: web.Request) -> web.Response:
        """Answer `/login`."""
        return _form("")

    async def login(self, request: web.Request) -> web.Response:
        """Take a token from the form, and give a cookie for it."""
        given = (await request.post()).get("token", "")
        cookie = self._tokens.cookie_value(given) if self._tokens is not None and isinstance(given, str) else None
        if self._tokens is None:
            return web.Response(status=303, headers={**NO_STORE, "Location": "./"})
        if cookie is None:
            logger.warning("a token that is not valid was refused; it came from %s", request.remote)
            return _form("This token is not valid here, or no more.", status=403)
        response = web.Response(status=303, headers={**NO_STORE, "Location": "./"})
        name = self._tokens.cookie
        response.set_cookie(name, cookie, max_age=_COOKIE_S, httponly=True, samesite="Strict", secure=self._secure)
        return response

    def _file(self, request: web.Request, path: str) -> web.Response:
        found = self._files.get(path)
        if found is None:
            raise web.HTTPNotFound(text="there is no such file\n")
        headers = {"Cache-Control": "no-cache", "ETag": f'"{found.etag}"', "Content-Type": found.content_type}
        if any(tag.value == found.etag for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=found.data, headers=headers)


def make_app(pages: Pages, streams: EventStreams, hosts: HostCheck, tokens: TokenCookieCheck | None) -> web.Application:
    """Return the application.

    Args:
        pages: answers all but the stream of events.
        streams: answers that.
        hosts: refuses names that are not this server's.
        tokens: that open the page; None where it is open.
    """

    @web.middleware
    async def with_headers(request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Add the headers of every answer, errors among them."""
        try:
            response = await _checked(request, handler, hosts, tokens)
        except web.HTTPException as exc:
            exc.headers.update(HEADERS)
            raise
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def on_prepare(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)  # a stream's headers are sent before its handler returns

    app = web.Application(middlewares=[with_headers], client_max_size=_MAX_BODY)
    app.on_response_prepare.append(on_prepare)
    app.router.add_get("/", pages.index)
    app.router.add_get("/static/{path:.+}", pages.static)
    app.router.add_get("/api/state", pages.state)
    app.router.add_get("/api/events", streams.answer)
    app.router.add_get("/metrics", pages.metrics)
    app.router.add_get("/healthz", pages.health)
    app.router.add_get("/livez", pages.health)
    app.router.add_get("/readyz", pages.ready)
    app.router.add_get("/login", pages.login_form)
    app.router.add_post("/login", pages.login)
    return app


async def _checked(
    request: web.Request, handler: _Handler, hosts: HostCheck, tokens: TokenCookieCheck | None
) -> web.StreamResponse:
    """Answer a request that has the right name and, where that is asked for, a token.

    Raises:
        HTTPForbidden: the name is another server's.
        HTTPUnauthorized: there is no valid token.
        HTTPSeeOther: there is none in a browser's request for the page.
    """
    if request.path in _PROBES:
        return await handler(request)
    if tokens is None and not hosts.allows(request.headers.get("Host")):
        raise web.HTTPForbidden(
            text="this page is not known under the name in the Host header: use its address, or start it with "
            "--allow-host NAME\n"
        )
    if tokens is not None and request.path not in _OPEN:
        shown = request.headers.get("Authorization"), request.cookies.get(tokens.cookie)
        if not tokens.allows(*shown):
            if request.path == "/":
                raise web.HTTPSeeOther("login", headers=NO_STORE)
            raise web.HTTPUnauthorized(
                text="a token is wanted: Authorization: Bearer TOKEN, or log in at /login\n",
                headers={**NO_STORE, "WWW-Authenticate": "Bearer"},
            )
    return await handler(request)


def _form(message: str, status: int = 200) -> web.Response:
    """Return a form that works without scripts and styles."""
    text = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>EDL</title><h1>EDL</h1><p>{escape(message)}</p>"
        '<form method="post" action="login"><label>Token: <input name="token" type="password" required autofocus '
        'autocomplete="current-password"></label> <button>Open</button></form>'
        "<p>It is a line of the file that this page was started with (<code>--token-file</code>).</p></html>"
    )
    return web.Response(text=text, content_type="text/html", status=status, headers=NO_STORE)
