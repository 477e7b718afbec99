"""The backend that asks an engine, a request a sequence, side by side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edl.protocol import names
from edl.protocol.transport import grpc
from edl_serving.backends.backend import Array, Backend, TensorSpec, TopKArrays
from edl_serving.gateway.engine import EngineAccess, EngineConnection, EngineRefusal
from edl_serving.gateway.health import EngineHealth
from edl_serving.gateway.inspection import EngineFacts, answer_limit, most_k
from edl_serving.gateway.top_rows import EngineAnswerError
from edl_serving.request_error import RequestError, invalid_argument

__all__ = ["GatewayBackend", "GatewayModel"]

_log = logging.getLogger(__name__)

_INPUTS = (
    TensorSpec(names.IDS, "INT32"),
    TensorSpec(names.POSITION, "INT32"),
    TensorSpec(names.TARGETS, "INT32", (1,)),
)
_OUTPUTS = (
    TensorSpec(names.LOGPROBS, "FP32", (-1,)),  # engines do not say how many tokens their vocabulary has
    TensorSpec(names.TARGET_LOGPROBS, "FP32", (1,)),
)
_OPTIONAL = {names.TARGET_LOGPROBS: names.TARGETS}
_TEMPERATURE = 1.0
"""At which engines give log-probabilities of a prompt; the tail at another one is not in what they answer."""


@dataclass(frozen=True)
class GatewayModel:
    """What a gateway serves.

    Attributes:
        engine: how to reach it.
        facts: what it can do.
        top_k: the largest k.
        version: of the weights, as the user gave it.
        meta: metadata that students find in discovery.
    """

    engine: EngineAccess
    facts: EngineFacts
    top_k: int
    version: str
    meta: Mapping[str, str] = field(default_factory=dict)


class GatewayBackend(Backend):
    """Asks an engine for the log-probabilities of prompts.

    An instance has all sequences of a batch in flight at a time, over connections of its own, and computes in the
    thread that calls it. Batches bound the tokens in flight.

    Args:
        model: what is served.
        health: of the engine, shared by all instances; the caller closes it.
    """

    def __init__(self, model: GatewayModel, health: EngineHealth) -> None:
        self._model = model
        self._health = health
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: EngineConnection | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Token ids, positions, and the tokens whose log-probabilities are asked for."""
        return _INPUTS

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Log-probabilities of the next token, and of the tokens that were asked for."""
        return _OUTPUTS

    @property
    def version(self) -> str:
        """The version that the user gave: an engine does not know its weights' hash."""
        return self._model.version

    @property
    def platform(self) -> str:
        """The kind of the engine."""
        return self._model.engine.address.kind

    @property
    def max_top_k(self) -> int:
        """The largest k, which the engine has shown that it gives."""
        return self._model.top_k

    @property
    def top_k_outputs(self) -> frozenset[str]:
        """The log-probabilities."""
        return frozenset({names.LOGPROBS})

    @property
    def optional_outputs(self) -> Mapping[str, str]:
        """The log-probabilities of targets, where targets are sent."""
        return _OPTIONAL

    @property
    def sequence_input(self) -> str:
        """The positions."""
        return names.POSITION

    @property
    def max_sequence(self) -> int:
        """The engine's longest prompt, without the token behind it and the one that is generated."""
        return self._model.facts.max_sequence

    @property
    def instance_meta(self) -> Mapping[str, str]:
        """Metadata that students find in discovery."""
        return self._model.meta

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        """Refuse another temperature than 1, ids that are no token's, and targets that an engine says nothing of.

        Raises:
            RequestError: the request cannot be computed.
        """
        if temperature != _TEMPERATURE:
            raise invalid_argument(
                f"parameter {names.TEMPERATURE}={temperature:g}: {self.platform} gives log-probabilities of a prompt "
                "at temperature 1 alone, and what its other tokens add up to at another one is not known. Distill at "
                "temperature 1, or from `edl serve --hf`"
            )
        for name in (names.IDS, names.TARGETS):
            if name in inputs and int(inputs[name].min()) < 0:
                row = int(inputs[name].reshape(-1).argmin())
                raise invalid_argument(f"input {name!r} is {int(inputs[name].reshape(-1)[row])} in row {row}: no token")
        if names.TARGETS in inputs:
            self._check_targets(inputs[names.IDS], inputs[names.POSITION], inputs[names.TARGETS][:, 0])

    def _check_targets(self, ids: Array, position: Array, targets: Array) -> None:
        """Refuse other targets than the next token, of which alone engines give the log-probability."""
        wrong = (targets[:-1] != ids[1:]) & (position[1:] != 0)
        if wrong.any():
            row = int(wrong.argmax())
            next_token = int(ids[row + 1])
            raise invalid_argument(
                f"input {names.TARGETS!r} is {int(targets[row])} in row {row}, and the next token is {next_token}: "
                f"{self.platform} gives log-probabilities of the prompt's own tokens alone. `edl serve --hf` gives "
                "those of any"
            )

    def find_fault(self) -> str:
        """Return why the engine cannot be asked."""
        return self._health.fault

    def sample(self, rows: int) -> Mapping[str, Array]:
        """Return sequences of token 0, which is in every vocabulary."""
        position = np.arange(rows, dtype=np.int32) % self.max_sequence
        return {names.IDS: np.zeros(rows, np.int32), names.POSITION: position}

    def warm_up(self, max_rows: int) -> None:
        """Ask about a single token: a borrowed engine is warm, or its own users have it warmed up."""
        self.predict_top_k(self.sample(1), self.max_top_k, _TEMPERATURE)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Raise NotImplementedError: an engine gives the largest values alone."""
        raise NotImplementedError("an engine gives the largest log-probabilities alone: predict_top_k")

    def predict_top_k(
        self, inputs: Mapping[str, Array], k: int, temperature: float
    ) -> Mapping[str, Array | TopKArrays]:
        """Ask the engine about each sequence.

        Raises:
            RequestError: the engine refuses a sequence, or does not answer.
            EngineAnswerError: its answer is of no use.
        """
        if self._health.fault:
            raise RequestError(grpc.StatusCode.UNAVAILABLE, self._health.fault, reason="engine-lost")
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
            self._connection = EngineConnection(self._model.engine)
        connection = self._connection
        tasks = [asyncio.ensure_future(self._score_sequence(connection, tokens, k)) for tokens in sequences]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # the engine drops requests whose connection ends
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score_sequence(
        self, connection: EngineConnection, prompt: list[int], k: int
    ) -> tuple[TopKArrays, Array]:
        facts = self._model.facts
        body = facts.endpoint.body(facts.model, prompt, k)
        try:
            answer = await connection.post(facts.endpoint.path, body, answer_limit(len(prompt), k))
        except EngineRefusal as refusal:
            if refusal.status >= 500 and not await connection.is_healthy():
                words = f"{self._model.engine.address} answers {refusal}, and is not healthy"
                raise RequestError(grpc.StatusCode.UNAVAILABLE, words, reason="engine-lost") from refusal
            if refusal.status in (401, 403, 404) or most_k(refusal.message) is not None:
                fault = self._health.set_doubtful(facts.endpoint.path, refusal)
                raise RequestError(grpc.StatusCode.UNAVAILABLE, fault, reason="engine-changed") from refusal
            raise refusal.as_request_error(str(self._model.engine.address)) from refusal
        try:
            facts.check_model(answer)
        except EngineAnswerError as exc:
            fault = self._health.set_other_model(str(exc))
            raise RequestError(grpc.StatusCode.UNAVAILABLE, fault, reason="engine-changed") from exc
        version = facts.endpoint.weight_version(answer)
        if version != facts.weight_version:
            raise RequestError(
                grpc.StatusCode.UNAVAILABLE,
                self._health.set_changed(f"its weights are {version!r} now, and were {facts.weight_version!r}"),
                reason="engine-changed",
            )
        top = facts.endpoint.read(answer, prompt, k)
        return top, facts.endpoint.read_own(answer, prompt)

    def close(self) -> None:
        """Close the connections."""
        loop, connection = self._loop, self._connection
        self._loop = self._connection = None
        if loop is not None:
            if connection is not None:
                loop.run_until_complete(connection.close())
            loop.close()


def _prompts(ids: Array, position: Array, targets: Array | None) -> list[list[int]]:
    """Return the tokens of each sequence, with another behind them: what its last row is asked about, or any.

    What a causal model predicts depends on the tokens before alone.
    """
    starts = np.flatnonzero(position == 0)
    ends = [*(starts[1:] - 1).tolist(), len(ids) - 1]
    parts = np.split(ids, starts[1:])
    if targets is None:
        return [[*part.tolist(), int(part[0])] for part in parts]
    return [[*part.tolist(), int(targets[end, 0])] for part, end in zip(parts, ends, strict=True)]
