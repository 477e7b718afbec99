"""The endpoints of engines that score prompts: what they are asked for a sequence, and how their answers are read.

There are vLLM's `/inference/v1/generate` (tokens in, tokens out, no text is made) and
`/v1/completions`, and SGLang's `/generate`. They are asked with temperature 1 and without penalties, although prompt
log-probabilities ignore both: a model's own generation settings would otherwise join in where an engine minds them.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edl_serving.backends.backend import Array, TopKArrays
from edl_serving.gateway.top_rows import EngineAnswerError, top_k_rows

__all__ = ["ENDPOINTS", "CompletionsEndpoint", "ScoringEndpoint", "GenerateEndpoint", "SGLangEndpoint"]

_ABOVE_CERTAIN = 0.01
"""Of a log-probability at most: those of bfloat16 logits exceed 0 by some thousandths, logits by far more."""


class ScoringEndpoint(abc.ABC):
    """An endpoint that gives log-probabilities of a prompt's positions.

    Attributes:
        path: of its URL.
    """

    path: str

    @abc.abstractmethod
    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """Make the request for a prompt.

        Args:
            model: the engine's name of the model.
            tokens: of the prompt, with the token behind the sequence (`top_rows`).
            k: entries of a position.
        """

    @abc.abstractmethod
    def read(self, answer: Mapping[str, Any], tokens: Sequence[int], k: int) -> TopKArrays:
        """Read the answer to `body`.

        Args:
            answer: the JSON object.
            tokens: as asked.
            k: as asked.

        Returns:
            A row for each token but the last one.

        Raises:
            EngineAnswerError: the answer is something else.
        """

    @abc.abstractmethod
    def read_own(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> Array:
        """Read the log-probabilities of the prompt's own tokens from an answer that `read` has taken.

        Args:
            answer: the JSON object.
            tokens: as asked.

        Returns:
            float32 [tokens - 1], of all but the first one.

        Raises:
            EngineAnswerError: one of them is no number.
        """

    def weight_version(self, answer: Mapping[str, Any]) -> str:
        """Return what the answer says about the version of the weights, empty if nothing."""
        return ""

    def model(self, answer: Mapping[str, Any]) -> str:
        """Return the model that the answer names, which a router between may have chosen; empty if it names none."""
        name = answer.get("model")
        return name if isinstance(name, str) else ""


class CompletionsEndpoint(ScoringEndpoint):
    """vLLM's `/v1/completions`, the protocol that every vLLM speaks."""

    path = "/v1/completions"

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """Make the request for a prompt."""
        return {"model": model, "prompt": list(tokens), **_sampling(k)}

    def read(self, answer: Mapping[str, Any], tokens: Sequence[int], k: int) -> TopKArrays:
        """Read the answer to `body`."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
            raise EngineAnswerError("the answer has not one element of 'choices'")
        return _read_positions(choices[0].get("prompt_logprobs"), tokens, k)

    def read_own(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> Array:
        """Read the log-probabilities of the prompt's own tokens."""
        return _own_values(answer["choices"][0]["prompt_logprobs"], tokens)


class GenerateEndpoint(ScoringEndpoint):
    """vLLM's `/inference/v1/generate`, which is there with `--enable-scale-out`."""

    path = "/inference/v1/generate"

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """Make the request for a prompt."""
        return {"model": model, "token_ids": list(tokens), "sampling_params": {**_sampling(k), "detokenize": False}}

    def read(self, answer: Mapping[str, Any], tokens: Sequence[int], k: int) -> TopKArrays:
        """Read the answer to `body`."""
        return _read_positions(answer.get("prompt_logprobs"), tokens, k)

    def read_own(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> Array:
        """Read the log-probabilities of the prompt's own tokens."""
        return _own_values(answer["prompt_logprobs"], tokens)

    def weight_version(self, answer: Mapping[str, Any]) -> str:
        """Return the tag of the weights, which vLLM changes when a trainer sends it others."""
        try:
            return str(answer["choices"][0]["weight_versions"][0]["version"])
        except (KeyError, IndexError, TypeError):
            return ""


class SGLangEndpoint(ScoringEndpoint):
    """SGLang's `/generate`."""

    path = "/generate"

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """Make the request for a prompt; SGLang serves a single model, whose name it does not ask for."""
        return {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
            "return_text_in_logprobs": False,
        }

    def read(self, answer: Mapping[str, Any], tokens: Sequence[int], k: int) -> TopKArrays:
        """Read the answer to `body`."""
        meta = answer.get("meta_info")
        top = meta.get("input_top_logprobs") if isinstance(meta, Mapping) else None
        own = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
        if not isinstance(top, list) or not isinstance(own, list) or not len(top) == len(own) == len(tokens):
            raise EngineAnswerError(
                "the answer has no 'input_top_logprobs' and 'input_token_logprobs' for each token of the prompt"
            )
        try:
            shown = [int(entry[1]) for entry in own]
            ids = [[int(token) for _, token, *_ in position] for position in top[1:]]
            values = [[value for value, *_ in position] for position in top[1:]]
        except (TypeError, ValueError, IndexError) as exc:
            raise EngineAnswerError(f"an entry is not [log-probability, token, text]: {exc}") from exc
        if shown != list(tokens):
            raise EngineAnswerError("'input_token_logprobs' is of other tokens than those of the prompt")
        return _ragged_rows(ids, values, k)

    def read_own(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> Array:
        """Read the log-probabilities of the prompt's own tokens."""
        return _as_log_probabilities([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


ENDPOINTS: Mapping[str, tuple[type[ScoringEndpoint], ...]] = {
    "vllm": (GenerateEndpoint, CompletionsEndpoint),
    "sglang": (SGLangEndpoint,),
}
"""By the kind of the engine, those that are preferred first."""


def _sampling(k: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters: a token must be generated, and is thrown away."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    no_penalty = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return {"max_tokens": 1, "prompt_logprobs": k, **neutral, **no_penalty}


def _read_positions(positions: object, tokens: Sequence[int], k: int) -> TopKArrays:
    """Read vLLM's `prompt_logprobs`: null, then for each position `{token: {"logprob": …}}`.

    A position has k entries, or another one for the prompt's own token where that is not among the k.
    """
    if not isinstance(positions, list):
        raise EngineAnswerError("the answer has no 'prompt_logprobs'")
    if len(positions) != len(tokens):
        raise EngineAnswerError(f"'prompt_logprobs' has {len(positions)} positions, the prompt {len(tokens)} tokens")
    ids: list[list[int]] = []
    values: list[list[Any]] = []
    for place, (entries, token) in enumerate(zip(positions[1:], tokens[1:], strict=True), 1):
        if not isinstance(entries, dict):
            raise EngineAnswerError(f"position {place} of 'prompt_logprobs' is {type(entries).__name__}, not an object")
        if str(token) not in entries:
            raise EngineAnswerError(
                f"position {place} of 'prompt_logprobs' lacks the prompt's own token {token}: it is of another position"
            )
        try:
            ids.append([int(text) for text in entries])
            values.append([entry["logprob"] for entry in entries.values()])
        except (TypeError, ValueError, KeyError) as exc:
            raise EngineAnswerError(f"position {place} has an entry without a number: {exc}") from exc
    return _ragged_rows(ids, values, k)


def _own_values(positions: Sequence[Any], tokens: Sequence[int]) -> Array:
    pairs = zip(positions[1:], tokens[1:], strict=True)
    return _as_log_probabilities([entries[str(token)]["logprob"] for entries, token in pairs])


def _as_log_probabilities(values: list[Any]) -> Array:
    try:
        found = np.array(values, np.float32)
    except (TypeError, ValueError, OverflowError) as exc:
        raise EngineAnswerError(f"the log-probability of a token of the prompt is no number: {exc}") from exc
    if found.ndim != 1 or not (found <= _ABOVE_CERTAIN).all():
        raise EngineAnswerError("the log-probability of a token of the prompt is none")
    return found


def _ragged_rows(ids: list[list[int]], values: list[list[Any]], k: int) -> TopKArrays:
    counts = [len(row) for row in ids]
    if min(counts, default=k) < k:
        place = counts.index(min(counts)) + 1
        raise EngineAnswerError(f"position {place} has {min(counts)} entries, and {k} were asked for")
    if max(counts, default=k) > k + 1:
        place = counts.index(max(counts)) + 1
        raise EngineAnswerError(f"position {place} has {max(counts)} entries, and {k} were asked for")
    for row, numbers in zip(ids, values, strict=True):
        if len(row) == k:
            row.append(-1)
            numbers.append(-np.inf)
    try:
        return top_k_rows(np.array(ids, np.int64), np.array(values, np.float64), k)
    except (TypeError, ValueError, OverflowError) as exc:
        raise EngineAnswerError(f"the entries are no numbers: {exc}") from exc
