"""`edl register vllm://HOST:PORT` and `sglang://…`: make a teacher of a language model that an engine serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edl.errors import SettingsError
from edl.protocol import names
from edl.protocol.channel import is_this_host
from edl.settings import Credentials
from edl.tokenizer_hash import hash_tokenizer
from edl_serving import options as v
from edl_serving.gateway.engine import EngineAccess, EngineAddress
from edl_serving.options import Option, OptionGroup, ServingParser
from edl_serving.request_error import RequestError
from edl_serving.serve_config import SERVER_GROUPS, TeacherConfig, pick, prepare_process, refuse_zero

_log = logging.getLogger(__name__)

BATCHES = 2
"""Number of batches in flight: enough for the engine to have the next batch while it computes the last sequences of a
batch."""
_TOKENS_IN_FLIGHT = 16_384
"""The tokens of two vLLM steps on a large GPU; more would only occupy memory. A sequence may have half as many
tokens."""
_QUEUED_BATCHES = 4
"""Batches that may wait, as in `edl serve`. With fewer, the engine may be idle; with more, its labels arrive late."""
_ENGINE = OptionGroup(
    "the engine",
    (
        Option("model-version", v.text, "TEXT", "identifies the weights in label caches; not known to the engine"),
        Option("top-k", v.count, "K", "maximum log-probabilities per token that students get (default 64)"),
        Option("tokenizer", v.text, "PATH", "the model's tokenizer.json, or its folder: students compare its hash"),
        Option("engine-model", v.text, "NAME", "name in the engine (default: --service, or the engine's only model)"),
        Option("max-tokens", v.count, "N", "maximum tokens in flight in the engine (default 16384)"),
    ),
)
_MORE_ENGINE = OptionGroup(
    "more about the engine",
    (
        Option("engine-timeout", v.duration_s, "TIME", "timeout per sequence (default 2m)"),
        Option("engine-wait", v.duration_s, "TIME", "how long to wait for a starting engine (default 10m)"),
        Option("engine-ca", v.text, "FILE", "CAs to trust for the engine, for vllm+https:// (default: the system's)"),
        Option("engine-token-file", v.text, "FILE", "send the first line as a bearer token (vLLM's --api-key)"),
        Option("interval", v.duration_s, "TIME", "time between two health checks of the engine (default 1s)"),
        Option("timeout", v.duration_s, "TIME", "time that a health check may take (default 5s)"),
        Option("failures", v.count, "N", "unanswered health checks before the engine counts as gone (default 3)"),
    ),
    advanced=True,
)
_NOT_OURS = ("max-batch", "max-delay")
"""Options of `edl serve` that the gateway derives from `--max-tokens`."""
GATEWAY_GROUPS = (
    _ENGINE,
    *[
        replace(group, options=tuple(option for option in group.options if option.name not in _NOT_OURS))
        for group in SERVER_GROUPS
    ],
    _MORE_ENGINE,
)
"""The options of the gateway: the options of `edl serve`, with options for the engine instead of the model."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(TeacherConfig):
    """Settings of a teacher and its engine. Unless `exact_model`, any name means an engine's only model."""

    engine: EngineAccess
    engine_model: str
    exact_model: bool
    version: str
    top_k: int = 64
    tokenizer: str = ""
    wait_s: float = 600.0
    interval_s: float = 1.0
    timeout_s: float = 5.0
    failures: int = 3

    @classmethod
    def of(cls, endpoint: str, given: Mapping[str, Any]) -> GatewayConfig:
        address = EngineAddress.parse(endpoint)
        if "model_version" not in given:
            raise SettingsError(
                f"{endpoint}: give --model-version TEXT: an engine does not know its weights' hash, and students would "
                "take labels of other weights from their caches. Any text that changes with the weights will do"
            )
        if "engine_ca" in given and not address.tls:
            raise SettingsError(f"--engine-ca does not apply to {address.kind}://: give {address.kind}+https://")
        if "engine_token_file" in given and not (
            address.tls or is_this_host(address.authority) or Credentials.of_options(given).allow_insecure_tokens
        ):
            raise SettingsError(
                f"{endpoint} gets no token over a connection without TLS, which the network can read: give "
                f"{address.kind}+https://, or say that the network may be trusted (--allow-insecure-tokens)"
            )
        refuse_zero(given, "engine_timeout", "interval", "timeout")
        if "tokenizer" in given and not Path(given["tokenizer"]).expanduser().exists():
            raise SettingsError(f"--tokenizer {given['tokenizer']!r}: no such file or folder")
        tokens = given.get("max_tokens", _TOKENS_IN_FLIGHT)
        batch = tokens // BATCHES
        if batch < 1:
            raise SettingsError(f"--max-tokens {tokens}: must be at least {BATCHES}, a token for each batch in flight")
        queue = given.get("max_queue", _QUEUED_BATCHES * batch)
        if queue < batch:
            raise SettingsError(
                f"--max-queue {queue}: a batch has {batch} tokens (--max-tokens {tokens}), and must fit in the queue"
            )
        access = {"engine_ca": "ca", "engine_token_file": "token_file", "engine_timeout": "timeout_s"}
        names = {"engine_wait": "wait_s", "interval": "interval_s", "timeout": "timeout_s"}
        names |= dict.fromkeys(("top_k", "tokenizer", "failures"), "")
        return cls.build(
            {**given, "max_batch": batch, "max_queue": queue},
            engine=EngineAccess(address, **pick(given, access)),
            engine_model=given.get("engine_model") or given.get("model") or given.get("service"),
            exact_model="engine_model" in given,
            version=given["model_version"],
            **pick(given, names),
        )


_EXIT_ENGINE = 3  # the same code as when a model fails to warm up in `edl serve`
_DESCRIPTION = """\
Turns a language model served by vLLM or SGLang into a teacher: runs beside the engine, asks it for log-probabilities
over HTTP, and answers students over KServe v2 as `edl serve` does. Row t predicts token t + 1; the last row predicts
the token after the end. The teacher is in discovery while the engine is healthy. SIGTERM drains it."""
_EXAMPLES = """\
examples:
  edl register vllm://127.0.0.1:8000 --service qwen --top-k 64 --tokenizer ./qwen --model-version r1
  edl register sglang://127.0.0.1:30000 --service qwen --model-version r1 --host 0.0.0.0
  edl register vllm+https://10.0.0.9:8000 --service qwen --model-version r1 --engine-ca ca.pem \\
               --engine-token-file key"""
_DETAILS = """\
vLLM returns up to 20 log-probabilities per token unless it is started with --max-logprobs 64; with
--enable-scale-out, it does not convert them to text, which is faster.

exit codes: 0 drained, 1 some requests were not answered in time, 2 wrong usage or settings, or an
engine that cannot be used, 3 the engine failed while the gateway started."""


def main(argv: Sequence[str]) -> int:
    parser = ServingParser("edl register vllm://", _DESCRIPTION, _EXAMPLES, _DETAILS)
    parser.usage = "edl register vllm://HOST:PORT [OPTION ...]"
    parser.add_argument("endpoint", metavar="ENGINE", help="vllm://host:port or sglang://host:port, +https for TLS")
    arguments, given = parser.parse_settings(GATEWAY_GROUPS, argv)
    config = GatewayConfig.of(arguments["endpoint"], given)
    prepare_process("edl register", given)
    from edl_serving.gateway.backend import EngineHealth, GatewayBackend
    from edl_serving.gateway.engine import find_facts
    from edl_serving.server import serve  # here, because the dependencies are an extra that `--help` does not need

    meta = {names.TOKENIZER_META: hash_tokenizer(config.tokenizer)} if config.tokenizer else {}
    with config.registering() as registration:
        engine = config.engine
        facts = asyncio.run(find_facts(engine, config.engine_model, config.exact_model, config.top_k, config.wait_s))
        if facts.max_sequence > config.server.max_batch_rows:
            _log.warning(
                "%s takes sequences of %d tokens, but students may send at most %d: to allow more, set --max-tokens %d",
                *(engine.address, facts.max_sequence, config.server.max_batch_rows, BATCHES * facts.max_sequence),
            )
        _log.info("%s, model %r, asked at %s", engine.address, facts.model, facts.endpoint.path)
        health = EngineHealth(engine, facts, config.top_k, config.interval_s, config.timeout_s, config.failures)
        backends = [GatewayBackend(health, config.version, meta) for _ in range(BATCHES)]
        try:
            return serve(config.server, backends, join=registration.register, leave=registration.start_draining)
        except RequestError as exc:
            _log.error("the engine failed while the gateway started: %s", exc.message)
            return _EXIT_ENGINE
        finally:
            health.close()
