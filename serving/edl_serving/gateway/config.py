"""The options of `edl register vllm://…`, and the settings that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edl.errors import SettingsError
from edl_serving.command_line import option_values as v
from edl_serving.command_line.options import Option, OptionGroup
from edl_serving.command_line.serve_config import (
    GROUPS as SERVE_GROUPS,
)
from edl_serving.command_line.serve_config import (
    advertised_address,
    registration_settings_of,
    server_settings_of,
)
from edl_serving.gateway.address import EngineAddress
from edl_serving.gateway.engine import EngineAccess
from edl_serving.registration.settings import RegistrationSettings
from edl_serving.settings import ServerSettings

__all__ = ["GATEWAY_GROUPS", "GatewayConfig"]

BATCHES = 2
"""Batches in flight: while the last sequences of one are computed, the engine has those of the next."""
_TOKENS_IN_FLIGHT = 16_384
"""As many as vLLM takes in two steps of a large GPU; beyond it requests only hold memory there. A sequence may have
half of them."""
_QUEUED_BATCHES = 4
"""As many as `edl serve` has waiting: with fewer an engine waits for students, with more its labels are late."""

_ENGINE = OptionGroup(
    "the engine",
    (
        Option("top-k", v.count, "K", "largest number of log-probabilities a token that students get (default 64)"),
        Option("model-version", v.text, "TEXT", "identifies the weights to caches of labels; the engine does not know"),
        Option("tokenizer", v.text, "PATH", "the model's tokenizer.json, or its folder: students compare its hash"),
        Option("engine-model", v.text, "NAME", "the engine's name of the model (default: --model, or its only one)"),
        Option("max-tokens", v.count, "N", "tokens that the engine has at a time at most (default 16384)"),
        Option("engine-timeout", v.duration_s, "TIME", "for the answer about a sequence (default 2m)"),
        Option("engine-wait", v.duration_s, "TIME", "how long to wait for an engine that starts (default 10m)"),
        Option("engine-ca", v.text, "FILE", "CAs of its certificate, for vllm+https:// (default: the system's)"),
        Option("engine-token-file", v.text, "FILE", "send the first line as a bearer token (vLLM's --api-key)"),
        Option("interval", v.duration_s, "TIME", "how often the engine is asked for its health (default 1s)"),
        Option("timeout", v.duration_s, "TIME", "how long it may take to answer that (default 5s)"),
        Option("failures", v.count, "N", "it is gone after so many questions without an answer (default 3)"),
    ),
)

_NOT_OURS = ("max-batch", "max-delay")
"""Options of `edl serve` that follow from `--max-tokens` here."""

GATEWAY_GROUPS = (
    _ENGINE,
    *[
        replace(group, options=tuple(option for option in group.options if option.name not in _NOT_OURS))
        for group in SERVE_GROUPS[1:]
    ],
)
"""The options: the engine's in place of those of a model, and `edl serve`'s others."""


@dataclass(frozen=True)
class GatewayConfig:
    """The settings of `edl register vllm://…`.

    Attributes:
        engine: how to reach it.
        engine_model: the engine's name of the model.
        exact_model: whether no other model will do.
        top_k: the largest k.
        version: of the weights.
        tokenizer: path of the tokenizer, or of its folder; empty if not given.
        wait_s: how long to wait for the engine.
        interval_s: between two looks at its health.
        timeout_s: for such a look.
        failures: looks without an answer after which the engine is gone.
        server: the server's settings.
        registration: how the server shows in discovery.
        address: host name or address at which students reach this server.
        linger_s: how long the server takes requests after it shows as draining.
        ready_file: path of the ready file; None for none.
        exit_with: id of the process with which this process ends; None for none.
        verbose: whether debug lines are logged.
        log_format: "text" or "json".
    """

    engine: EngineAccess
    engine_model: str
    exact_model: bool
    top_k: int
    version: str
    tokenizer: str
    wait_s: float
    interval_s: float
    timeout_s: float
    failures: int
    server: ServerSettings
    registration: RegistrationSettings
    address: str
    linger_s: float = 0.5
    ready_file: str | None = None
    exit_with: int | None = None
    verbose: bool = False
    log_format: str = "text"

    @classmethod
    def of(cls, endpoint: str, given: Mapping[str, Any]) -> GatewayConfig:
        """Build the settings from values of `GATEWAY_GROUPS`.

        Args:
            endpoint: the engine's address.
            given: values by key of their option.

        Raises:
            SettingsError: something is missing, or does not go together.
        """
        address = EngineAddress.parse(endpoint)
        model = given.get("model") or given.get("service")
        if model is None:
            raise SettingsError("name the model: --model NAME (students ask for it, and find it under --service)")
        if "model_version" not in given:
            raise SettingsError(
                f"{endpoint}: give --model-version TEXT: an engine does not know its weights' hash, and students would "
                "take labels of other weights from their caches. Any text will do that changes when the weights do"
            )
        if "engine_ca" in given and not address.tls:
            raise SettingsError(f"--engine-ca means nothing to {address.kind}://: give {address.kind}+https://")
        for name in ("engine_timeout", "interval", "timeout"):
            if given.get(name) == 0:
                raise SettingsError(f"--{name.replace('_', '-')} 0: expected more than nothing")
        if "tokenizer" in given and not Path(given["tokenizer"]).expanduser().exists():
            raise SettingsError(f"--tokenizer {given['tokenizer']!r}: there is no such file or folder")
        tokens = given.get("max_tokens", _TOKENS_IN_FLIGHT)
        batch = tokens // BATCHES
        if batch < 1:
            raise SettingsError(f"--max-tokens {tokens}: a batch needs a token, and {BATCHES} batches are in flight")
        queue = given.get("max_queue", _QUEUED_BATCHES * batch)
        if queue < batch:
            raise SettingsError(
                f"--max-queue {queue}: a batch has {batch} tokens (--max-tokens {tokens}), and must fit in the queue"
            )
        rows = {"max_batch": batch, "max_queue": queue}
        registration = registration_settings_of(given, given.get("service") or model)
        host = advertised_address(given, registration.url)
        registration.check(host)
        kept = ("linger", "ready_file", "exit_with", "verbose", "log_format")
        rest = {{"linger": "linger_s"}.get(name, name): given[name] for name in kept if name in given}
        return cls(
            engine=EngineAccess(
                address,
                ca=given.get("engine_ca", ""),
                token_file=given.get("engine_token_file", ""),
                timeout_s=given.get("engine_timeout", EngineAccess.timeout_s),
            ),
            engine_model=given.get("engine_model", model),
            exact_model="engine_model" in given,
            top_k=given.get("top_k", 64),
            version=given["model_version"],
            tokenizer=given.get("tokenizer", ""),
            wait_s=given.get("engine_wait", 600.0),
            interval_s=given.get("interval", 1.0),
            timeout_s=given.get("timeout", 5.0),
            failures=given.get("failures", 3),
            server=server_settings_of(model, {**given, **rows}),
            registration=registration,
            address=host,
            **rest,
        )
