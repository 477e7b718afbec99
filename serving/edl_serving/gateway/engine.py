"""An engine: its address, HTTP requests with deadlines, the meaning of its refusals, and its abilities.

The abilities are checked before students are served. If the engine lacks an ability, the error says what to change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edl.backoff import Backoff
from edl.errors import SettingsError
from edl.protocol.tls import read_tokens
from edl.protocol.transport import grpc
from edl.quoting import clip, quote
from edl_serving.gateway.endpoints import ENDPOINTS, EngineAnswerError, ScoringEndpoint
from edl_serving.request_error import RequestError, invalid_argument

if TYPE_CHECKING:
    import aiohttp

_log = logging.getLogger(__name__)

_URL = re.compile(
    r"(?P<kind>vllm|sglang)(?P<tls>\+https)?://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]@?#]+):(?P<port>\d{1,5})/?"
)


@dataclass(frozen=True)
class EngineAddress:
    """An engine's address and kind, "vllm" or "sglang". With `tls`, the engine serves HTTPS, else HTTP."""

    kind: str
    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        match = _URL.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise SettingsError(
                f"{text!r}: expected vllm://host:port or sglang://host:port (vllm+https:// with TLS), without a path "
                "or a user"
            )
        return cls(match["kind"], match["host"], int(match["port"]), match["tls"] is not None)

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}"

    def __str__(self) -> str:
        return f"{self.kind}{'+https' if self.tls else ''}://{self.authority}"


def names_engine(text: str) -> bool:
    return re.match(r"(vllm|sglang)(\+\w+)?://", text) is not None


_CONNECT_S = 5.0
"""Timeout for connecting to an engine in the same data centre. With a shorter timeout, an engine would look dead after
two lost packets."""
_AGAIN_S = 0.05  # pause before a request is sent again, long enough for a new connection; students wait meanwhile
_LARGEST_LOOK = 1 << 20  # bytes of an answer to a GET request; a list of models takes a few thousand
_CONNECTIONS = 256  # more would wait in the engine instead of here
"""Requests in flight at a time: as many sequences as vLLM computes at once by default."""
_FULL_HINT_MS = 500  # retry hint if a full engine does not send one
_LONGEST_HINT_MS = 60_000
"""Longest retry hint that students accept. With a longer hint, they would still wait when the engine is free again."""


class EngineRefusal(Exception):
    """Raised if the HTTP status of an answer is not 200; contains the engine's message, shortened."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s

    def as_request_error(self, engine: str) -> RequestError:
        words = f"{engine} answers {self.status}: {quote(self.message)}"
        if self.status in (400, 413, 422):
            return invalid_argument(words)
        if self.status in (429, 503):
            hint_ms = _FULL_HINT_MS if self.retry_after_s is None else round(1000 * self.retry_after_s)
            return RequestError(
                grpc.StatusCode.UNAVAILABLE, words, max(1, min(_LONGEST_HINT_MS, hint_ms)), "engine-full"
            )
        return RequestError(grpc.StatusCode.INTERNAL, words, reason="engine-failed")


@dataclass(frozen=True)
class EngineAccess:
    """How to reach an engine.

    Attributes:
        ca: Path of a PEM file with the CAs for verifying the engine's certificate; "" or "system" for the system's CAs.
        token_file: Path of a file whose first token is sent with each request as a bearer token; "" for none.
        timeout_s: Seconds to wait for an answer.
    """

    address: EngineAddress
    ca: str = ""
    token_file: str = ""
    timeout_s: float = 120.0

    def read_token(self) -> str:
        if not self.token_file:
            return ""
        try:
            return read_tokens(self.token_file, serving=False)[0]
        except SettingsError as exc:
            raise SettingsError(f"--engine-token-file: {exc}") from exc

    def tls_context(self) -> ssl.SSLContext | None:
        if not self.address.tls:
            return None
        try:
            return ssl.create_default_context(cafile=None if self.ca in ("", "system") else self.ca)
        except (OSError, ssl.SSLError) as exc:
            raise SettingsError(f"--engine-ca {self.ca!r}: {exc}") from exc


class EngineConnection:
    """Connections to an engine on one event loop; close them on the same loop."""

    def __init__(self, engine: EngineAccess) -> None:
        self._engine = engine
        self._name = str(engine.address)
        self._session = _open_session(engine)

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, timeout_s: float) -> Any:
        """Send a GET request once; return the JSON value, or None for an empty answer."""
        return await self._ask("GET", path, None, timeout_s, _LARGEST_LOOK)

    async def is_healthy(self) -> bool:
        """Return whether the engine is healthy. A dying vLLM answers pending requests with status 500."""
        try:
            await self.get("/health", _CONNECT_S)
        except (EngineRefusal, RequestError):
            return False
        return True

    async def post(self, path: str, body: Mapping[str, Any], limit: int) -> Mapping[str, Any]:
        """Send a POST request. Repeat it once if the connection breaks, because engines close idle connections.

        The repetition is safe because both answers are the same. Raises `EngineRefusal` or `RequestError`.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        try:
            answer = await asyncio.wait_for(self._post_twice(path, data, limit), self._engine.timeout_s)
        except asyncio.TimeoutError:
            raise self._late_error(self._engine.timeout_s) from None
        if not isinstance(answer, dict):
            raise RequestError(grpc.StatusCode.INTERNAL, f"{self._name} answers {path} with JSON that is not an object")
        return answer

    async def _post_twice(self, path: str, data: bytes, limit: int) -> Any:
        try:
            return await self._ask("POST", path, data, self._engine.timeout_s, limit)
        except RequestError as error:
            if error.reason != "engine-lost":
                raise
        await asyncio.sleep(_AGAIN_S)
        return await self._ask("POST", path, data, self._engine.timeout_s, limit)

    async def _ask(self, method: str, path: str, data: bytes | None, timeout_s: float, limit: int) -> Any:
        import aiohttp

        url = self._engine.address.base_url + path
        headers = {"Content-Type": "application/json"} if data is not None else {}
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        try:
            if token := self._engine.read_token():  # for each request, since keys are rotated
                headers["Authorization"] = f"Bearer {token}"
        except SettingsError as exc:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, str(exc), reason="engine-lost") from exc
        try:
            async with self._session.request(
                method, url, data=data, headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                content = await self._read(response, limit)
                if response.status != 200:
                    raise EngineRefusal(response.status, _words_of(content), _retry_after_s(response.headers))
        except aiohttp.ServerTimeoutError:  # only the limit on connecting raises this
            words = f"{self._name} accepted no connection within {min(_CONNECT_S, timeout_s):g} s"
            raise RequestError(grpc.StatusCode.UNAVAILABLE, words, reason="engine-lost") from None
        except asyncio.TimeoutError:
            raise self._late_error(timeout_s) from None
        except (aiohttp.ClientError, ConnectionError, OSError) as exc:
            why = str(exc) or type(exc).__name__
            raise RequestError(grpc.StatusCode.UNAVAILABLE, f"{self._name}: {why}", reason="engine-lost") from exc
        if not content:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as exc:
            words = f"{self._name} answers {path} with something other than JSON: {quote(clip(str(exc), 200))}"
            raise RequestError(grpc.StatusCode.INTERNAL, words) from exc

    async def _read(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        pieces = bytearray()
        async for piece in response.content.iter_any():
            pieces += piece
            if len(pieces) > limit:
                response.close()
                raise RequestError(grpc.StatusCode.INTERNAL, f"{self._name} answers with more than {limit:,} bytes")
        return bytes(pieces)

    def _late_error(self, timeout_s: float) -> RequestError:
        words = f"{self._name} gave no answer within {timeout_s:g} s (--engine-timeout)"
        return RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, words)


def _open_session(engine: EngineAccess) -> aiohttp.ClientSession:
    try:
        import aiohttp
    except ModuleNotFoundError as exc:
        raise SettingsError(f"{exc.name} is not installed: pip install 'elastic-distill[gateway]'") from exc
    engine.read_token()
    context = engine.tls_context()
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=_CONNECTIONS, ssl=True if context is None else context),
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


def _words_of(content: bytes) -> str:
    """Return the message in the JSON of an error, or the whole text if it has none."""
    text = content[:4096].decode(errors="replace")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return clip(text.strip(), 500)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return clip(found if isinstance(found, str) else text, 500)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


_PROBE = (0, 0, 0)  # token 0 is in every vocabulary
_LOOK_S = 5.0  # timeout of a GET request to an engine that may be busy
_FIRST_LOOK_S, _LAST_LOOK_S = 0.5, 5.0  # an engine needs half a minute or more to start
_RESERVED = {"vllm": 2, "sglang": 8}
"""Number of tokens by which a sequence must be shorter than the engine's limit: one token follows the sequence, one
must be generated, and SGLang reserves more (`max_req_input_len` in its scheduler)."""
_ENTRY_BYTES = 512
"""Largest size of an entry in JSON. Most take about 70 bytes; more if vLLM spells out a token of many spaces."""
_PROBE_TOLERANCE = 0.5
"""How much the probe's log-probabilities may differ with the same weights. A bfloat16 logit between 16 and 32 has a
precision of 1/8, and a restarted engine may round differently."""
_MOST_K = re.compile(r"max(?:imum)? allowed:? (\d+)")


@dataclass(frozen=True)
class ProbeAnswer:
    """An engine's answer to a prompt of three tokens; a text field is empty if the answer does not state its value.

    `values` holds the largest log-probability at each position, and the log-probabilities of the prompt's tokens.
    """

    weight_version: str
    values: tuple[float, ...]
    model: str = ""

    def find_change(self, now: ProbeAnswer) -> str:
        """Compare with a later answer; return the evidence that the weights have changed, empty if there is none."""
        if now.weight_version != self.weight_version:
            return f"its weights are {now.weight_version!r} now, but were {self.weight_version!r}"
        for value, before in zip(now.values, self.values, strict=False):
            if abs(value - before) > _PROBE_TOLERANCE:
                return f"a log-probability of the same prompt is {value:.3g} now, but was {before:.3g}"
        return ""


@dataclass(frozen=True)
class EngineFacts:
    """An engine's endpoint, model and limits, as found at the start.

    Attributes:
        root: Path or name from which the engine loaded the model; empty if the engine does not report it.
        max_sequence: Length of the longest sequence that a student may send, in tokens.
        max_model_len: The engine's own limit in tokens, which must be the same after the engine restarts.
    """

    endpoint: ScoringEndpoint
    model: str
    root: str
    max_sequence: int
    max_model_len: int
    probe: ProbeAnswer

    def check_model(self, answer: Mapping[str, Any]) -> None:
        """Refuse an answer from a model other than the probe's; a router may have fallen back to another model."""
        named = self.endpoint.model(answer)
        if named and self.probe.model and named != self.probe.model:
            raise EngineAnswerError(
                f"the answer is from model {quote(named)}, but {quote(self.probe.model)} answered at startup. "
                "If a router has a fallback, register the engines behind it"
            )


def answer_limit(tokens: int, k: int) -> int:
    return (1 << 20) + tokens * (k + 1) * _ENTRY_BYTES


async def find_facts(engine: EngineAccess, model: str, exact: bool, k: int, wait_s: float) -> EngineFacts:
    """Wait for an engine to start, and find its model and endpoint.

    If an engine has only one model, that model is used whatever `model` is, unless `exact` is set. Raises
    `SettingsError`, whose message says what to change, if the engine does not answer in time or cannot be used.
    """
    connection = EngineConnection(engine)
    try:
        await _wait_until_up(connection, engine, wait_s)
        name, root, length = await _find_model(connection, engine, model, exact)
        endpoint, probe = await _find_endpoint(connection, engine, name, k)
    finally:
        await connection.close()
    longest = length - _RESERVED[engine.address.kind]
    return EngineFacts(endpoint, name, root, longest, length, probe)


async def _wait_until_up(connection: EngineConnection, engine: EngineAccess, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    backoff = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)
    while True:
        try:
            await connection.get("/health", _LOOK_S)
            return
        except EngineRefusal as refusal:
            if refusal.status not in (502, 503):
                raise SettingsError(f"{engine.address}: /health answers {refusal.status}: not an engine?") from refusal
            why = str(refusal)
        except RequestError as error:
            why = error.message
        if time.monotonic() > deadline:
            raise SettingsError(f"no engine within {wait_s:g} s (--engine-wait): {why}")
        if not backoff.failures:
            _log.info("waiting for the engine: %s", why)
        await asyncio.sleep(max(0.0, min(backoff.next_wait_s(), deadline - time.monotonic())))


async def _find_model(
    connection: EngineConnection, engine: EngineAccess, model: str, exact: bool
) -> tuple[str, str, int]:
    """Return the engine's name for the model, the model's root, and the longest prompt in tokens."""
    try:
        answer = await connection.get("/v1/models", _LOOK_S)
    except (EngineRefusal, RequestError) as exc:
        raise SettingsError(explain(engine, "/v1/models", exc)) from exc
    entries = _models_of(answer)
    if not entries:
        raise SettingsError(f"{engine.address}: /v1/models lists no model")
    entry = entries.get(model)
    if entry is None and not exact and len(entries) == 1:
        entry = next(iter(entries.values()))
        _log.info("the engine's model is %r", entry["id"])
    if entry is None:
        raise SettingsError(
            f"{engine.address} has no model {model!r}: name one of {', '.join(map(repr, entries))} with --engine-model"
        )
    length = entry.get("max_model_len")
    if not isinstance(length, int) or length <= _RESERVED[engine.address.kind]:
        raise SettingsError(
            f"{engine.address}: /v1/models does not say how long a prompt may be (max_model_len is {length!r}); "
            "vLLM and SGLang do"
        )
    return str(entry["id"]), str(entry.get("root") or ""), length


async def read_model(connection: EngineConnection, name: str, timeout_s: float) -> tuple[str, int] | None:
    """Return a model's root and the length of its longest prompt; None if the engine no longer has the model."""
    entry = _models_of(await connection.get("/v1/models", timeout_s)).get(name)
    if entry is None:
        return None
    length = entry.get("max_model_len")
    return str(entry.get("root") or ""), length if isinstance(length, int) else 0


def _models_of(answer: object) -> dict[str, dict[str, Any]]:
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        return {}
    return {str(entry["id"]): entry for entry in listed if isinstance(entry, dict) and "id" in entry}


async def _find_endpoint(
    connection: EngineConnection, engine: EngineAccess, model: str, k: int
) -> tuple[ScoringEndpoint, ProbeAnswer]:
    kinds = ENDPOINTS[engine.address.kind]
    for kind in kinds:
        endpoint = kind()
        try:
            return endpoint, await probe_endpoint(connection, endpoint, model, k)
        except EngineRefusal as refusal:
            if refusal.status in (403, 404, 405, 501) and kind is not kinds[-1]:
                _log.info("%s%s is not available: %s", engine.address, endpoint.path, refusal)
                continue
            raise SettingsError(explain(engine, endpoint.path, refusal, k)) from refusal
        except (EngineAnswerError, RequestError) as exc:
            raise SettingsError(explain(engine, endpoint.path, exc, k)) from exc
    raise AssertionError("there is a last endpoint")


async def probe_endpoint(
    connection: EngineConnection, endpoint: ScoringEndpoint, model: str, k: int, before: EngineFacts | None = None
) -> ProbeAnswer:
    """Ask about a prompt of three tokens; `before` holds the facts from the first probe; None if this is it."""
    answer = await connection.post(endpoint.path, endpoint.body(model, _PROBE, k), answer_limit(len(_PROBE), k))
    if before is not None:
        before.check_model(answer)
    top, own = endpoint.read(answer, _PROBE, k)
    values = (*top.values[:, 0].tolist(), *own.tolist())
    return ProbeAnswer(endpoint.weight_version(answer), values, endpoint.model(answer))


def most_k(message: str) -> int | None:
    """Return the largest k that an engine accepts, from its refusal; None if it refused for another reason."""
    found = _MOST_K.search(message)
    return None if found is None else int(found[1])


def explain(engine: EngineAccess, path: str, exc: Exception, k: int = 0) -> str:
    where = f"{engine.address}{path}"
    if isinstance(exc, RequestError):
        return exc.message
    if isinstance(exc, EngineAnswerError):
        return (
            f"{where} does not give log-probabilities of a prompt in a usable form: {exc}. Name vLLM or SGLang "
            "itself, not a proxy in front of it"
        )
    assert isinstance(exc, EngineRefusal)
    if exc.status in (401, 403):
        return f"{where} answers {exc.status} ({quote(exc.message)}): give its key with --engine-token-file FILE"
    most = most_k(exc.message)
    if most is not None:
        return (
            f"{where} gives at most {most} log-probabilities per position: start vLLM with --max-logprobs {k} "
            f"(or -1 for any number), or give --top-k {most}"
        )
    return f"{where} refuses to give {k} log-probabilities of a prompt's positions: {exc.status}: {quote(exc.message)}"
