"""The backend that asks an engine for labels, and the check of the engine's health, which runs in its own thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from edl.background import BackgroundLoop
from edl.errors import SettingsError
from edl.protocol import names
from edl.protocol.tensors import Array
from edl.protocol.transport import grpc
from edl_serving.backends.backend import Backend, TensorSpec, TopKArrays
from edl_serving.gateway.endpoints import EngineAnswerError
from edl_serving.gateway.engine import (
    EngineAccess,
    EngineConnection,
    EngineFacts,
    EngineRefusal,
    answer_limit,
    explain,
    most_k,
    probe_endpoint,
    read_model,
)
from edl_serving.registration import ProbeStatus, ReadinessTracker
from edl_serving.request_error import RequestError, invalid_argument

_log = logging.getLogger(__name__)


class EngineHealth:
    """Checks an engine's health, and whether the engine still serves the model that it served at the start.

    An engine that becomes reachable again may have been restarted with other settings. So it is probed with a short
    prompt. An engine that refuses a request is also probed if the reason suggests that its settings have changed.
    `fault` is empty if the engine can be used.
    """

    def __init__(
        self, engine: EngineAccess, facts: EngineFacts, k: int, every_s: float, timeout_s: float, failures: int
    ) -> None:
        self.engine = engine
        self.facts = facts
        self.k = k
        self._doubts = ""
        self._doubted = 0  # number of doubts so far, so that a probe does not clear a doubt raised while it ran
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._tracker = ReadinessTracker(failures)
        self._tracker.record_probe(ProbeStatus.READY)
        self._changed = ""
        self._lock = threading.Lock()  # guards the fault and its causes, which requests set as well as this thread
        self.fault = ""
        self._loop = BackgroundLoop("edl-engine-health", self._look)

    def set_changed(self, why: str) -> str:
        """Record that the engine's weights have changed since the start, so the engine can no longer be used."""
        changed = (
            f"{self.engine.address} has changed: {why}; labels of both models would be mixed. Start this gateway "
            "again, with a different --model-version"
        )
        with self._lock:
            self._changed = changed
            if self.fault != changed:
                _log.error("%s", changed)
            self.fault = changed
        return changed

    def set_doubtful(self, why: str) -> str:
        """Record that the engine answers differently than at startup; no request is sent until a probe succeeds."""
        with self._lock:
            if why != self._doubts:
                _log.error("%s", why)
            self._doubts = why
            self._doubted += 1
            self.fault = self.fault or why
        return why

    def close(self) -> None:
        self._loop.close(self._timeout_s + 1.0)

    def _look(self) -> float:
        status, why = asyncio.run(self._ask())
        self._tracker.record_probe(status)
        with self._lock:
            fault = self._changed or self._doubts or ("" if self._tracker.registered else why)
            if fault and not self.fault:
                _log.warning("%s. The gateway keeps running: it is out of discovery until the engine is back", fault)
            elif self.fault and not fault:
                _log.warning("%s is back", self.engine.address)
            self.fault = fault
        return self._every_s

    async def _ask(self) -> tuple[ProbeStatus, str]:
        name = str(self.engine.address)
        try:
            connection = EngineConnection(self.engine)
        except SettingsError as exc:
            return ProbeStatus.NOT_READY, str(exc)
        try:
            await connection.get("/health", self._timeout_s)
            found = await read_model(connection, self.facts.model, self._timeout_s)
            if self._doubts or not self._tracker.registered:
                await self._probe(connection)
        except EngineAnswerError as exc:
            return ProbeStatus.NOT_READY, f"{name} answers differently than at startup: {exc}"
        except EngineRefusal as refusal:
            return ProbeStatus.NOT_READY, f"{name} is not healthy: {refusal}"
        except RequestError as error:
            return ProbeStatus.NO_ANSWER, error.message
        finally:
            await connection.close()
        wanted = self.facts.root, self.facts.max_model_len
        if found != wanted:
            self.set_changed(f"its model {self.facts.model!r} was {wanted}, and now is {found}")
        return ProbeStatus.READY, ""

    async def _probe(self, connection: EngineConnection) -> None:
        facts, doubted = self.facts, self._doubted
        try:
            probe = await probe_endpoint(connection, facts.endpoint, facts.model, self.k, facts)
        except EngineRefusal as refusal:
            if refusal.status not in (429, 503):
                self.set_doubtful(explain(self.engine, facts.endpoint.path, refusal, self.k))
            raise
        change = facts.probe.find_change(probe)
        if change:
            self.set_changed(change)
        with self._lock:
            if self._doubted == doubted:
                self._doubts = ""


_TEMPERATURE = 1.0
"""Temperature of the engines' prompt log-probabilities. A tail at another temperature cannot be computed from them."""


class GatewayBackend(Backend):
    """Asks an engine for the log-probabilities of prompts.

    Each instance sends all sequences of a batch at once over its own connections, in the thread that calls the
    instance. The batch size limits the tokens in flight. Instances share an `EngineHealth`, which the caller closes.
    """

    inputs: tuple[TensorSpec, ...] = (
        TensorSpec(names.IDS, "INT32"),
        TensorSpec(names.POSITION, "INT32"),
        TensorSpec(names.TARGETS, "INT32", (1,)),
    )
    outputs: tuple[TensorSpec, ...] = (
        TensorSpec(names.LOGPROBS, "FP32", (-1,)),  # engines do not say how many tokens their vocabulary has
        TensorSpec(names.TARGET_LOGPROBS, "FP32", (1,)),
    )
    optional_outputs: Mapping[str, str] = {names.TARGET_LOGPROBS: names.TARGETS}
    top_k_outputs: frozenset[str] = frozenset({names.LOGPROBS})
    sequence_input: str | None = names.POSITION

    def __init__(self, health: EngineHealth, version: str, meta: Mapping[str, str] | None = None) -> None:
        self.version = version
        self.platform = health.engine.address.kind
        self.max_top_k = health.k
        self.max_sequence = health.facts.max_sequence
        self.instance_meta = meta or {}
        self._health = health
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: EngineConnection | None = None

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        """Refuse temperatures other than 1, negative token ids, and targets that an engine does not report."""
        if temperature != _TEMPERATURE:
            raise invalid_argument(
                f"parameter {names.TEMPERATURE}={temperature:g}: {self.platform} gives log-probabilities of a prompt "
                "only at temperature 1, and the tail at another temperature cannot be computed from them. Distill at "
                "temperature 1, or from `edl serve --hf`"
            )
        for name in (names.IDS, names.TARGETS):
            if name in inputs and int(inputs[name].min()) < 0:
                row = int(inputs[name].reshape(-1).argmin())
                raise invalid_argument(
                    f"input {name!r} is {int(inputs[name].reshape(-1)[row])} in row {row}: not a token id"
                )
        if names.TARGETS in inputs:
            self._check_targets(inputs[names.IDS], inputs[names.POSITION], inputs[names.TARGETS][:, 0])

    def _check_targets(self, ids: Array, position: Array, targets: Array) -> None:
        """Refuse targets other than the next token, because engines report the log-probability of no other target."""
        wrong = (targets[:-1] != ids[1:]) & (position[1:] != 0)
        if wrong.any():
            row = int(wrong.argmax())
            next_token = int(ids[row + 1])
            raise invalid_argument(
                f"input {names.TARGETS!r} is {int(targets[row])} in row {row}, but the next token is {next_token}: "
                f"{self.platform} gives log-probabilities of the prompt's own tokens only. `edl serve --hf` gives "
                "log-probabilities of any token"
            )

    def find_fault(self) -> str:
        return self._health.fault

    def sample(self, rows: int) -> Mapping[str, Array]:
        """Return sequences of token 0, which every vocabulary has."""
        position = np.arange(rows, dtype=np.int32) % self._health.facts.max_sequence
        return {names.IDS: np.zeros(rows, np.int32), names.POSITION: position}

    def warm_up(self, max_rows: int) -> None:
        """Ask about a single token. The engine warms itself up, or other clients have already warmed it up."""
        self.predict_top_k(self.sample(1), self._health.k, _TEMPERATURE)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        raise NotImplementedError("an engine gives only the largest log-probabilities: use predict_top_k")

    def predict_top_k(
        self, inputs: Mapping[str, Array], k: int, temperature: float
    ) -> Mapping[str, Array | TopKArrays]:
        if self._health.fault:
            raise _unavailable(self._health.fault, "engine-lost")
        sequences = _prompts(inputs[names.IDS], inputs[names.POSITION], inputs.get(names.TARGETS))
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        parts = self._loop.run_until_complete(self._score(sequences, k))
        joined = (np.concatenate(arrays) for arrays in zip(*[top for top, _ in parts], strict=True))
        answers: dict[str, Array | TopKArrays] = {names.LOGPROBS: TopKArrays(*joined)}
        if names.TARGETS in inputs:
            answers[names.TARGET_LOGPROBS] = np.concatenate([own for _, own in parts])[:, None]
        return answers

    async def _score(self, sequences: Sequence[list[int]], k: int) -> list[tuple[TopKArrays, Array]]:
        if self._connection is None:
            self._connection = EngineConnection(self._health.engine)
        connection = self._connection
        tasks = [asyncio.ensure_future(self._score_sequence(connection, tokens, k)) for tokens in sequences]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # this closes its connection, so the engine drops the request
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score_sequence(
        self, connection: EngineConnection, prompt: list[int], k: int
    ) -> tuple[TopKArrays, Array]:
        health, facts = self._health, self._health.facts
        engine = health.engine
        body = facts.endpoint.body(facts.model, prompt, k)
        try:
            answer = await connection.post(facts.endpoint.path, body, answer_limit(len(prompt), k))
        except EngineRefusal as refusal:
            if refusal.status >= 500 and not await connection.is_healthy():
                raise _unavailable(
                    f"{engine.address} answers {refusal}, and is not healthy", "engine-lost"
                ) from refusal
            if refusal.status in (401, 403, 404) or most_k(refusal.message) is not None:
                fault = health.set_doubtful(explain(engine, facts.endpoint.path, refusal, health.k))
                raise _unavailable(fault, "engine-changed") from refusal
            raise refusal.as_request_error(str(engine.address)) from refusal
        try:
            facts.check_model(answer)
        except EngineAnswerError as exc:
            raise _unavailable(health.set_doubtful(f"{engine.address}: {exc}"), "engine-changed") from exc
        version, before = facts.endpoint.weight_version(answer), facts.probe.weight_version
        if version != before:
            fault = health.set_changed(f"its weights are {version!r} now, but were {before!r}")
            raise _unavailable(fault, "engine-changed")
        return facts.endpoint.read(answer, prompt, k)

    def close(self) -> None:
        loop, connection = self._loop, self._connection
        self._loop = self._connection = None
        if loop is not None:
            if connection is not None:
                loop.run_until_complete(connection.close())
            loop.close()


def _unavailable(why: str, reason: str) -> RequestError:
    return RequestError(grpc.StatusCode.UNAVAILABLE, why, reason=reason)


def _prompts(ids: Array, position: Array, targets: Array | None) -> list[list[int]]:
    """Return each sequence's tokens and one more: the last row's target, or any token if there are no targets.

    The additional token does not change the labels, because a causal model's predictions depend on earlier tokens only.
    """
    starts = np.flatnonzero(position == 0)
    ends = [*(starts[1:] - 1).tolist(), len(ids) - 1]
    parts = np.split(ids, starts[1:])
    if targets is None:
        return [[*part.tolist(), int(part[0])] for part in parts]
    return [[*part.tolist(), int(targets[end, 0])] for part, end in zip(parts, ends, strict=True)]
