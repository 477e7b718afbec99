"""Runs a proxy: its routes, access checks and token limit, and the calls of `Scorer` for vLLM's requests.

Each route exists for all models, and below `/NAME` for one model, because some trainers know only a teacher's URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import numpy as np
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from edl.distill.compress import TopK
from edl.errors import (
    ClosedError,
    EDLError,
    NoTeacherError,
    OverloadedError,
    RejectedError,
    SettingsError,
    SourceError,
    TemporaryError,
)
from edl.http_server.access import HostCheck, TokenCheck
from edl.http_server.server import AppServer
from edl.protocol.tls import CredentialFiles
from edl.proxy.completions import (
    PIECE_ENTRIES,
    CompletionRequest,
    RequestRefusal,
    answer_head,
    answer_tail,
    at_temperature,
    encode_choice,
    encode_error,
    read_request,
)
from edl.proxy.scorers import ScorerKey, ScorerPool, in_thread
from edl.proxy.settings import ProxySettings
from edl.quoting import listed, quote, shown

logger = logging.getLogger(__name__)

_READ_S: Final = 60.0  # deadline for a body: some megabytes over a slow line
_WRITE_S: Final = 60.0  # for a client to read a piece: one that reads nothing must not hold its labels for ever
_PIECE: Final = 256 << 10  # bytes: about the size of `PIECE_ENTRIES`, and small enough for a slow line
_READERS: Final = 32  # bodies read at a time, each up to `body_limit`; those below `_SLOW_BODY` do not count
_BODY_BYTES: Final = 256 << 20  # total size of these bodies: about the default size of labels
_PARSERS: Final = 2  # bodies parsed at a time; the Python objects take up to 30 times the bytes
_SLOW_BODY: Final = 64 << 10  # bytes: parsing a larger body blocks other requests for milliseconds
_RETRY_S: Final = 5.0  # retry hint if no teacher is live: one may start within seconds, or at an unknown time
_NO_STORE: Final = {"Cache-Control": "no-store", "Server": "edl", "X-Content-Type-Options": "nosniff"}

_MOST_WAITING: Final = 16
"""Number of requests of the largest size whose ids may wait, at 4 bytes per token. Further requests are refused at
once, so that their clients try another proxy or retry later."""
_MOST_REASON: Final = 300  # characters of a reason phrase: clients accept a status line of at most some thousand bytes
_MOST_REASONS: Final = 200  # logged, each once: clients control the text of some, and must not fill the disk
_FULL_RETRY_S: Final = 1.0  # a request of the largest size takes seconds
_MOST_CONNECTIONS: Final = 2048  # TRL's asynchronous trainer has 128 requests in flight per process
_POLL_S: Final = 0.05  # while waiting for a closing proxy's last answer
# From a short prompt on an idle GPU to the longest batch behind a full queue.
_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TokenGate:
    """Admits requests in order, with at most `most` tokens in all admitted requests. Used on a single event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.inside = 0
        self.waiting = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def room(self, tokens: int, timeout_s: float) -> AsyncIterator[None]:
        """Reserve room for the block; `RequestRefusal` 413 for too many tokens, 503 if wait or queue is too long."""
        if tokens > self._most:
            raise RequestRefusal(
                413,
                f"a request of {tokens} tokens, at least 16 per prompt, exceeds the limit of {self._most}: send fewer "
                "prompts (edl proxy --max-tokens)",
            )
        if self.waiting + tokens > _MOST_WAITING * self._most:
            raise RequestRefusal(503, f"{self.waiting} tokens are already waiting", _FULL_RETRY_S)
        await self._enter(tokens, timeout_s)
        try:
            yield
        finally:
            self.inside -= tokens
            self._let_in()

    async def _enter(self, tokens: int, timeout_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((tokens, turn))
        self.waiting += tokens
        self._let_in()
        try:
            await asyncio.wait_for(asyncio.shield(turn), timeout_s)
        except BaseException as exc:
            if turn.done():
                self.inside -= tokens
            else:
                turn.cancel()
                self._queue.remove((tokens, turn))
                self.waiting -= tokens
            self._let_in()
            if isinstance(exc, asyncio.TimeoutError):
                raise RequestRefusal(503, f"no room within {timeout_s:g} s", _FULL_RETRY_S) from None
            raise

    def _let_in(self) -> None:
        while self._queue and self.inside + self._queue[0][0] <= self._most:
            tokens, turn = self._queue.popleft()
            self.waiting -= tokens
            self.inside += tokens
            turn.set_result(None)


class _ProxyMetrics:
    """Counters and gauges of a proxy, in the registry of its scorers' metrics."""

    def __init__(self, gate: TokenGate, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._requests = Counter(
            "edl_proxy_requests", "Requests for scores, by status.", ["status"], registry=self.registry
        )
        self._tokens = Counter("edl_proxy_tokens", "Tokens that were scored and sent.", registry=self.registry)
        self._seconds = Histogram(
            "edl_proxy_request_seconds", "Time until the last byte was sent.", buckets=_SECONDS, registry=self.registry
        )
        inside = Gauge("edl_proxy_tokens_held", "Tokens being scored or sent.", registry=self.registry)
        inside.set_function(lambda: gate.inside)
        waiting = Gauge("edl_proxy_tokens_waiting", "Tokens of requests that wait for room.", registry=self.registry)
        waiting.set_function(lambda: gate.waiting)

    def record(self, status: int, tokens: int, seconds: float) -> None:
        """Count a request, and the tokens that were sent. Status 499 (as in nginx) means a disconnect."""
        self._requests.labels(str(status)).inc()
        self._tokens.inc(tokens)
        if tokens:
            self._seconds.observe(seconds)


class ScoringApi:
    """Answers requests through scorers."""

    def __init__(self, settings: ProxySettings, scorers: ScorerPool) -> None:
        self.draining = False  # if set, new requests are refused
        self.open_requests = 0
        self._settings = settings
        self._scorers = scorers
        self._gate = TokenGate(settings.room)
        self.body_limit = (1 << 20) + 12 * settings.room  # bytes: an id of 10 digits, a comma and a space
        self._max_readers = min(_READERS, max(_BODY_BYTES // self.body_limit, 2))
        self._readers = asyncio.Semaphore(self._max_readers)
        self._parsers = asyncio.Semaphore(_PARSERS)
        self._numbers = itertools.count()
        self._since = int(time.time())
        self.metrics = _ProxyMetrics(self._gate, scorers.registry)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /v1/completions`."""
        began = time.monotonic()
        status, tokens = 499, 0
        self.open_requests += 1
        try:
            deadline = began + self._settings.timeout_s
            wanted = await self._read(request, deadline)
            self._check_length(wanted)
            async with self._gate.room(wanted.weight, _until(deadline)):
                labels = await self._score(wanted, _until(deadline))
                response = await self._send(request, wanted, labels)
            status, tokens = response.status, wanted.tokens
            return response
        except RequestRefusal as refusal:
            status = refusal.status
            raise
        except web.HTTPException as exc:
            status = exc.status
            raise
        finally:
            self.open_requests -= 1
            self.metrics.record(status, tokens, time.monotonic() - began)

    async def _read(self, request: web.Request, deadline: float) -> CompletionRequest:
        if self.draining:
            raise RequestRefusal(503, "this proxy is shutting down", _RETRY_S)
        known = self._asked(request), self._settings.top_k
        if request.content_length is not None and request.content_length <= _SLOW_BODY:
            return read_request(await _body_of(request, deadline), *known)
        async with _turn(self._readers, deadline, f"{self._max_readers} large bodies are being read already"):
            body = await _body_of(request, deadline)
            async with _turn(self._parsers, deadline, "other large bodies are being parsed"):
                return await in_thread(read_request, body, *known)

    def _asked(self, request: web.Request) -> Mapping[str, str]:
        """Return the services that a URL names, by model; all services if the URL names none."""
        services, name = self._settings.services, request.match_info.get("model")
        if name is not None and name not in services:
            raise RequestRefusal(404, f"no model {quote(name)} for this URL; available: {listed(services)}")
        return services if name is None else {name: services[name]}

    def _check_length(self, wanted: CompletionRequest) -> None:
        """Refuse a prompt that exceeds a request's limit; the scorer refuses one that exceeds the teachers' limit."""
        longest, room = max(map(len, wanted.prompts)), self._settings.room
        most = self._scorers.first(wanted.model).max_sequence
        if longest <= room:
            return
        if most and most <= room:
            raise RequestRefusal(400, f"a prompt has {longest} tokens, but the teachers accept at most {most}")
        words = f"a prompt has {longest} tokens, but this proxy accepts {room} per request (edl proxy --max-tokens)"
        raise RequestRefusal(413, words)

    async def _score(self, wanted: CompletionRequest, timeout_s: float) -> list[tuple[TopK, Any]]:
        # Row t predicts token t + 1; the prediction after the last token is not needed.
        targets = [np.append(ids[1:], ids[:1])[:, None] for ids in wanted.prompts]
        key = ScorerKey(wanted.model, max(wanted.k, 1), wanted.temperature)
        try:
            async with self._scorers.use(key) as scorer:
                return await asyncio.wrap_future(scorer.score(wanted.prompts, targets=targets, timeout_s=timeout_s))
        except EDLError as exc:
            raise _refusal_of(exc) from exc

    async def _send(
        self, request: web.Request, wanted: CompletionRequest, labels: list[tuple[TopK, Any]]
    ) -> web.StreamResponse:
        """Send each piece of the choices as soon as it is encoded: all choices together may take gigabytes."""
        response = web.StreamResponse(headers={"Content-Type": "application/json", **_NO_STORE})
        if self.draining:
            response.force_close()
        await response.prepare(request)
        await _write(response, answer_head(str(next(self._numbers)), int(time.time()), wanted.model))
        for index, (ids, (top, own)) in enumerate(zip(wanted.prompts, labels, strict=True)):
            scaled = at_temperature(top, own, wanted.temperature)
            pieces = encode_choice(index, ids, *scaled, wanted.k, wanted.with_ids)
            if len(ids) * wanted.k <= PIECE_ENTRIES:
                await _write(response, b"".join((b"," if index else b"", *pieces)))
                continue
            if index:
                await _write(response, b",")
            while piece := await in_thread(next, pieces, b""):
                await _write(response, piece)
        await _write(response, answer_tail(wanted.tokens))
        await response.write_eof()
        return response

    async def models(self, request: web.Request) -> web.Response:
        """Answer `GET /v1/models`."""
        found = []
        for name, service in self._asked(request).items():
            length = min(self._scorers.first(name).max_sequence or math.inf, self._settings.room)
            # vLLM's limit includes room for a generated token.
            model = {"id": name, "object": "model", "created": self._since, "owned_by": "edl", "root": service}
            found.append({**model, "parent": None, "max_model_len": length + 1})
        return web.json_response({"object": "list", "data": found}, headers=_NO_STORE)

    async def health(self, request: web.Request) -> web.Response:
        """Answer `GET /health`: OK if each service has a live teacher and this proxy is not shutting down."""
        if self.draining:
            raise RequestRefusal(503, "this proxy is shutting down", _RETRY_S)
        for name, service in self._asked(request).items():
            stats = self._scorers.first(name).stats()
            if not stats.teachers_live:
                known = [
                    f"{teacher.endpoint}: {teacher.why or teacher.state}"
                    for teacher in stats.teachers.values()
                    if teacher.state != "gone"
                ]
                why = stats.discovery or listed(known, 3, "; ") or "none is registered"
                raise RequestRefusal(503, f"no teacher of {service!r} is live ({why})", _RETRY_S)
        return web.Response(headers=_NO_STORE)

    async def live(self, _: web.Request) -> web.Response:
        """Answer `GET /livez`: this process is alive."""
        return web.Response(text="ok\n", headers=_NO_STORE)

    async def world_size(self, _: web.Request) -> web.Response:
        """Answer `GET /get_world_size`, which TRL's client calls: this proxy is the only rank to send weights to."""
        return web.json_response({"world_size": 1}, headers=_NO_STORE)

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Answer `GET /metrics`."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        body = encode(self.metrics.registry)
        return web.Response(body=body, headers={**_NO_STORE, "Content-Type": content_type})


def make_app(api: ScoringApi, hosts: HostCheck | None, tokens: TokenCheck | None) -> Any:
    """Return the application, a `web.Application`."""
    logged: set[str] = set()

    @web.middleware
    async def checked(request: web.Request, handler: _Handler) -> web.StreamResponse:
        # Answer probes under any name and without a token: a kubelet has neither, and vLLM's clients send no token.
        probe = request.match_info.handler in (api.health, api.live)
        response = None if probe else _find_refusal(request, hosts, tokens)
        if response is None:
            response = await _answer(request, handler, api)
        if response.status >= 400 and not probe:
            words = re.sub(r"\d+", "0", response.reason)  # different lengths and addresses count as the same reason
            if words not in logged and len(logged) < _MOST_REASONS:
                logged.add(words)
                logger.warning("refused with %d: %s (such refusals are logged once)", response.status, response.reason)
        return response

    app = web.Application(middlewares=[checked], client_max_size=api.body_limit)
    for prefix in ("", "/{model:.+}"):
        app.router.add_post(f"{prefix}/v1/completions", api.completions)
        app.router.add_get(f"{prefix}/v1/models", api.models)
        app.router.add_get(f"{prefix}/health", api.health)
        app.router.add_get(f"{prefix}/health/", api.health)
        app.router.add_get(f"{prefix}/get_world_size", api.world_size)
    app.router.add_get("/livez", api.live)
    app.router.add_get("/metrics", api.show_metrics)
    return app


def _find_refusal(
    request: web.Request, hosts: HostCheck | None, tokens: TokenCheck | None
) -> web.StreamResponse | None:
    if tokens is not None and not tokens.allows(request.headers.get("Authorization")):
        return _error(401, "token required: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
    if "Origin" in request.headers:  # browsers send it with a page's requests; trainers do not
        return _error(403, "requests from web pages are refused")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        return _error(415, "compressed bodies are not accepted: send the body without Content-Encoding")
    if hosts is not None and not hosts.allows(request.headers.get("Host")):
        return _error(403, "unknown name in the Host header: use localhost, or --allow-host NAME")
    return None


async def _answer(request: web.Request, handler: _Handler, api: ScoringApi) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefusal as refusal:
        headers = {} if refusal.retry_after_s is None else {"Retry-After": str(math.ceil(refusal.retry_after_s))}
        response = _error(refusal.status, refusal.message, headers)
        if api.draining:
            response.force_close()
        return response
    except web.HTTPNotFound:
        words = f"{shown(request.path, 100)} does not exist here: this proxy only scores prompts, POST /v1/completions"
        if request.path.endswith("/infer/"):
            words += "; ms-swift up to 4.2 sends token ids there, but 4.3 and later send chats"
        return _error(404, words)
    except web.HTTPRequestEntityTooLarge:
        return _error(413, f"the body exceeds {api.body_limit} bytes: send fewer prompts (edl proxy --max-tokens)")
    except web.HTTPException as exc:
        if exc.status < 400:
            raise
        return _error(exc.status, exc.reason, dict(exc.headers) if exc.status == 405 else None)


def _until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


@contextlib.asynccontextmanager
async def _turn(semaphore: asyncio.Semaphore, deadline: float, words: str) -> AsyncIterator[None]:
    """Hold a semaphore; refuse the request, with `words`, if the semaphore is not free in time."""
    try:
        await asyncio.wait_for(semaphore.acquire(), _until(deadline))
    except asyncio.TimeoutError:
        raise RequestRefusal(503, words, _RETRY_S) from None
    try:
        yield
    finally:
        semaphore.release()


async def _body_of(request: web.Request, deadline: float) -> bytes:
    timeout_s = min(_READ_S, _until(deadline))
    try:
        return await asyncio.wait_for(request.read(), timeout_s)
    except asyncio.TimeoutError:
        raise RequestRefusal(408, f"the body did not arrive within {timeout_s:.3g} s") from None


def _refusal_of(error: EDLError) -> RequestRefusal:
    words = str(error)
    if isinstance(error, RejectedError | SourceError | SettingsError):
        return RequestRefusal(400, words)
    if isinstance(error, OverloadedError):
        return RequestRefusal(503, words, max(error.retry_after_s, 1.0))
    if isinstance(error, NoTeacherError | ClosedError):
        return RequestRefusal(503, words, _RETRY_S)
    if isinstance(error, TemporaryError):
        return RequestRefusal(504, words)
    logger.error("a request was not scored: %s", words)
    return RequestRefusal(502, words)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    sent = {**_NO_STORE, "Content-Type": "application/json"}
    if headers:
        sent.update({name: text for name, text in headers.items() if name not in ("Content-Type", "Content-Length")})
    reason = shown(message, _MOST_REASON).encode("ascii", "replace").decode()  # many clients show only it, as ASCII
    return web.Response(status=status, reason=reason, body=encode_error(status, message), headers=sent)


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        for at in range(0, len(data), _PIECE):
            await asyncio.wait_for(response.write(data[at : at + _PIECE]), _WRITE_S)
    except asyncio.TimeoutError:
        raise ConnectionResetError(f"the client read nothing for {_WRITE_S:g} s") from None


class ProxyServer(AppServer):
    """Answers requests for prompt log-probabilities as vLLM does, using the teachers of services.

    If no teacher is live, requests wait for a teacher, and are refused after `teacher_timeout_s`.

    Args:
        settings: The proxy's address, its teachers and its limits.

    Raises:
        SettingsError: the proxy cannot listen on the address, or a setting cannot be used.
    """

    def __init__(self, settings: ProxySettings) -> None:
        credentials = CredentialFiles.of(settings.credentials, serving=True)
        super().__init__("edl-proxy", settings.host, settings.port, credentials, _MOST_CONNECTIONS)
        self._settings = settings
        self._scorers = ScorerPool(settings)
        self._api: ScoringApi | None = None
        try:
            self.start()
        except BaseException:
            self._scorers.close()
            raise
        if not settings.local and not settings.credentials.token_file:
            logger.warning(
                "the proxy listens on %s without a token: anyone who reaches this port can ask your teachers; set "
                "--token-file",
                settings.host,
            )

    async def serve(self) -> None:
        """See `AppServer.serve`."""
        settings = self._settings
        self._api = ScoringApi(settings, self._scorers)
        tokens = None
        if self._credentials is not None and self._credentials.settings.token_file:
            tokens = TokenCheck(self._credentials)
        hosts = HostCheck(True, settings.allowed_hosts) if settings.local and tokens is None else None
        await self.run_app(make_app(self._api, hosts, tokens), answers_late=True)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and wait for pending answers; return whether all were sent in time."""
        api = self._api
        assert api is not None
        api.draining = True
        deadline = time.monotonic() + timeout_s
        while api.open_requests:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """Close all connections, including those to teachers. May be called twice."""
        super().close()
        self._scorers.close()
