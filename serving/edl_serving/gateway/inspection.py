"""What an engine can do, found out before students come; what it cannot is refused with what to change."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edl.backoff import Backoff
from edl.errors import SettingsError
from edl.quoting import quote
from edl_serving.gateway.endpoints import ENDPOINTS, EngineAnswerError, ScoringEndpoint
from edl_serving.gateway.engine import EngineAccess, EngineConnection, EngineRefusal
from edl_serving.request_error import RequestError

_log = logging.getLogger(__name__)

_PROBE = (0, 0, 0)  # token 0 is in every vocabulary
_LOOK_S = 5.0  # for an answer to GET, of an engine that may be busy
_FIRST_WAIT_S, _LAST_WAIT_S = 0.5, 5.0  # an engine takes half a minute to start, or some
_RESERVED = {"vllm": 2, "sglang": 8}
"""Tokens of an engine's length that a sequence cannot have: one behind it and one that must be generated, and what
SGLang keeps besides (`max_req_input_len` in its scheduler)."""
_ENTRY_BYTES = 512
"""Of an entry in JSON: about 70, and more where vLLM spells a token of many spaces or of another script."""
_PROBE_TOLERANCE = 0.5
"""By how much log-probabilities of the probe may differ with the same weights: a logit of 16 to 32 in bfloat16 is exact
to an eighth, and an engine that is started anew may round otherwise."""
_MOST_K = re.compile(r"max(?:imum)? allowed:? (\d+)")


@dataclass(frozen=True)
class ProbeAnswer:
    """What an engine answers about a prompt of three tokens.

    Attributes:
        weight_version: The engine's tag of its weights; empty if it has none.
        values: The largest log-probability of each position, and those of the prompt's tokens.
        model: The model that the answer names; empty if it names none.
    """

    weight_version: str
    values: tuple[float, ...]
    model: str = ""

    def find_change(self, now: ProbeAnswer) -> str:
        """Return what shows that the weights are others `now`, empty if nothing does."""
        if now.weight_version != self.weight_version:
            return f"its weights are {now.weight_version!r} now, and were {self.weight_version!r}"
        for value, before in zip(now.values, self.values, strict=False):
            if abs(value - before) > _PROBE_TOLERANCE:
                return f"a log-probability of the same prompt is {value:.3g} now, and was {before:.3g}"
        return ""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine can do.

    Attributes:
        endpoint: How it is asked.
        model: The engine's name of the model.
        root: Where it has loaded the model from; empty if it does not say.
        max_sequence: The longest sequence, in tokens of students.
        max_model_len: The engine's own limit, which it must still have when it comes back.
        probe: What it answered about the probe at the start.
    """

    endpoint: ScoringEndpoint
    model: str
    root: str
    max_sequence: int
    max_model_len: int
    probe: ProbeAnswer

    def check_model(self, answer: Mapping[str, Any]) -> None:
        """Refuse the answer of another model than the probe's, as a router gives it that falls back to one."""
        named = self.endpoint.model(answer)
        if named and self.probe.model and named != self.probe.model:
            raise EngineAnswerError(
                f"the answer is of model {quote(named)}, and at the start {quote(self.probe.model)} answered. "
                "Where a router has a fallback, register the engines behind it"
            )


def answer_limit(tokens: int, k: int) -> int:
    """Return how many bytes an answer about `tokens` tokens with `k` entries each may have."""
    return (1 << 20) + tokens * (k + 1) * _ENTRY_BYTES


async def find_facts(engine: EngineAccess, model: str, exact: bool, k: int, wait_s: float) -> EngineFacts:
    """Wait for an engine, and find out what it can do.

    Unless `exact`, an engine's only model is taken whatever its name is. Raises `SettingsError`, which says what to
    change, if the engine does not answer in time or not what is needed.
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
    backoff = Backoff(_FIRST_WAIT_S, _LAST_WAIT_S)
    while True:
        try:
            await connection.get("/health", _LOOK_S)
            return
        except EngineRefusal as refusal:
            if refusal.status not in (502, 503):
                raise SettingsError(f"{engine.address}: /health answers {refusal.status}: no engine?") from refusal
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
    """Return the engine's name of the model, its root and the longest prompt."""
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
            f"{engine.address} has no model {model!r}: name one of {', '.join(map(repr, entries))} by --engine-model"
        )
    length = entry.get("max_model_len")
    if not isinstance(length, int) or length <= _RESERVED[engine.address.kind]:
        raise SettingsError(
            f"{engine.address}: /v1/models does not say how long a prompt may be (max_model_len is {length!r}); "
            "vLLM and SGLang say it"
        )
    return str(entry["id"]), str(entry.get("root") or ""), length


async def read_model(connection: EngineConnection, name: str, timeout_s: float) -> tuple[str, int] | None:
    """Read root and longest prompt of a model; None if the engine has it no more."""
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
                _log.info("%s%s is not there: %s", engine.address, endpoint.path, refusal)
                continue
            raise SettingsError(explain(engine, endpoint.path, refusal, k)) from refusal
        except (EngineAnswerError, RequestError) as exc:
            raise SettingsError(explain(engine, endpoint.path, exc, k)) from exc
    raise AssertionError("there is a last endpoint")


async def probe_endpoint(
    connection: EngineConnection, endpoint: ScoringEndpoint, model: str, k: int, before: EngineFacts | None = None
) -> ProbeAnswer:
    """Ask about a prompt of three tokens; `before` is what the engine was at the start, None if this is the start."""
    answer = await connection.post(endpoint.path, endpoint.body(model, _PROBE, k), answer_limit(len(_PROBE), k))
    if before is not None:
        before.check_model(answer)
    top, own = endpoint.read(answer, _PROBE, k)
    values = (*top.values[:, 0].tolist(), *own.tolist())
    return ProbeAnswer(endpoint.weight_version(answer), values, endpoint.model(answer))


def most_k(message: str) -> int | None:
    """Return the largest k that an engine's refusal allows; None where it is about something else."""
    found = _MOST_K.search(message)
    return None if found is None else int(found[1])


def explain(engine: EngineAccess, path: str, exc: Exception, k: int = 0) -> str:
    """Return what is wrong with an engine that refuses what it must give, and what to change."""
    where = f"{engine.address}{path}"
    if isinstance(exc, RequestError):
        return exc.message
    if isinstance(exc, EngineAnswerError):
        return (
            f"{where} does not give log-probabilities of the prompt as they are needed: {exc}. Take vLLM or SGLang "
            "itself, rather than a proxy before it"
        )
    assert isinstance(exc, EngineRefusal)
    if exc.status in (401, 403):
        return f"{where} answers {exc.status} ({quote(exc.message)}): give its key by --engine-token-file FILE"
    most = most_k(exc.message)
    if most is not None:
        return (
            f"{where} gives {most} log-probabilities of a position at most: start vLLM with --max-logprobs {k} "
            f"(or -1 for any number), or give --top-k {most}"
        )
    return f"{where} refuses to give {k} log-probabilities of a prompt's positions: {exc.status}: {quote(exc.message)}"
