"""The engines' endpoints for scoring prompts: how to make the request for a sequence, and how to read the answer.

The endpoints are vLLM's `/inference/v1/generate` (token ids in and out, no detokenization) and `/v1/completions`, and
SGLang's `/generate`. Requests set temperature 1 and no penalties. Prompt log-probabilities should ignore both, but an
engine might otherwise apply the model's own generation settings.

In an engine's answer, position p holds the prediction of token p itself, while row t of EDL's labels holds the
prediction of token t + 1. So a sequence of T tokens is sent with one more token at its end, and row t is read from
position t + 1. Any token will do, because each of a causal model's predictions depends only on the tokens before it.

Labels for one position must not be mistaken for labels for another. vLLM lists the prompt's own token at every
position. This token must be in the list; if it makes the list longer than k, its value must be the smallest. SGLang
reports the prompt's tokens and their log-probabilities separately. The value of such a token must equal its value in
the list; if the token is not in the list, its value must not exceed the smallest value in the list.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from edl.protocol.tensors import Array
from edl_serving.backends.backend import TopKArrays

_MASS_TOLERANCE = 1e-2
"""How far the sum of the k probabilities may exceed 1. With bfloat16 logits, the sum exceeds 1 by a few thousandths. If
the values were logits, or log-probabilities at another temperature, it would exceed 1 by far more."""
_AGREEMENT = 1e-3
"""How much two log-probabilities of a token may differ: little, because an engine takes both from the same numbers."""
_RESOLUTION = 2.0**-24
"""Half the distance from 1 to the next float32. An engine computes in float32, in which 1 - p cannot be smaller without
being 0."""


class EngineAnswerError(Exception):
    """Raised if an engine's answer is not what was asked for; the message says what the answer has instead."""


def top_k_rows(ids: Array, values: Array, k: int) -> TopKArrays:
    """Return each row's k largest entries (equal values by ascending id), and the log of the remaining probability.

    `ids` (int64) and `values` (float64 log-probabilities at temperature 1) have shape `[rows, entries]`, with at least
    k entries in each row. Shorter rows are padded with an id of -1 and a value of -inf.
    """
    order = np.lexsort((ids, -values), axis=-1)
    ids = np.take_along_axis(ids, order, -1)
    values = np.take_along_axis(values, order, -1)
    _check_entries(ids, values)
    if (ids[:, :k] < 0).any():
        raise EngineAnswerError(
            f"position {_first_row(ids[:, :k] < 0)} has a token id below 0, or fewer than {k} tokens with a "
            "probability above 0"
        )
    kept = values[:, :k]
    tail = np.log(_left_out(kept))
    return TopKArrays(ids[:, :k].astype(np.int32), kept.astype(np.float32), tail.astype(np.float32))


def _left_out(kept: Array) -> Array:
    """Return the remaining probability of each row, `[rows]`, from log-probabilities in descending order."""
    # `expm1` gives 1 - p of the largest exactly even if p is nearly 1; the others are summed from the smallest.
    left: Array = -np.expm1(kept[:, 0]) - np.exp(kept[:, :0:-1]).sum(-1)
    # If rounding leaves nothing: a token that is left out has at most the probability of the last one in the list.
    least = np.minimum(np.exp(kept[:, -1]), _RESOLUTION)
    return np.maximum(left, np.maximum(least, np.finfo(np.float32).tiny))


def _check_entries(ids: Array, values: Array) -> None:
    if np.isnan(values).any() or (values == np.inf).any():
        raise EngineAnswerError(
            f"a value at position {_first_row(np.isnan(values) | (values == np.inf))} is not a number"
        )
    listed = np.sort(ids, axis=-1)
    twice = (listed[:, 1:] == listed[:, :-1]) & (listed[:, 1:] >= 0)
    if twice.any():
        raise EngineAnswerError(f"position {_first_row(twice)} has a token twice")
    if ids.max(initial=0) > np.iinfo(np.int32).max:
        raise EngineAnswerError("a token id exceeds 32 bits")
    mass = np.exp(np.minimum(values, 1.0)).sum(-1)
    if (mass > 1 + _MASS_TOLERANCE).any():
        row = int((mass > 1 + _MASS_TOLERANCE).argmax())
        raise EngineAnswerError(
            f"the probabilities at position {row + 1} add up to {mass[row]:.4g}: these are not log-probabilities "
            "(vLLM gives other numbers with --logprobs-mode raw_logits or processed_logits: omit that option)"
        )


def _first_row(wrong: Array) -> int:
    """Return the position in the engine's answer that belongs to the first row in which `wrong` is true."""
    return int(wrong.any(-1).argmax()) + 1


_ABOVE_CERTAIN = 0.01
"""Largest accepted log-probability. With bfloat16 logits, a log-probability may be a few thousandths above 0; logits
are far larger."""


Entries: TypeAlias = tuple[list[list[int]], list[list[Any]], list[Any]]
"""Ids and values at each position except the first, and the values of the prompt's own tokens at these positions."""


class ScoringEndpoint(abc.ABC):
    """An endpoint at `path` that returns log-probabilities for the positions of a prompt."""

    path: str

    @abc.abstractmethod
    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """Return the request body for a prompt, which is a sequence and one more token."""

    @abc.abstractmethod
    def entries(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> Entries:
        """Read the answer to `body`."""

    def read(self, answer: Mapping[str, Any], tokens: Sequence[int], k: int) -> tuple[TopKArrays, Array]:
        """Read the answer to `body`.

        Returns a row for each token but the last, and the float32 log-probabilities of the next tokens. Raises
        `EngineAnswerError` if the answer does not contain these.
        """
        ids, values, own = self.entries(answer, tokens)
        for place, row in enumerate(ids, 1):
            if not k <= len(row) <= k + 1:
                raise EngineAnswerError(f"position {place} has {len(row)} entries, but {k} were requested")
        try:
            all_ids = np.array([row if len(row) > k else [*row, -1] for row in ids], np.int64)
            all_values = np.array([row if len(row) > k else [*row, -np.inf] for row in values], np.float64)
            own_values = np.array(own, np.float32)
        except (TypeError, ValueError, OverflowError) as exc:
            raise EngineAnswerError(f"the log-probabilities are not numbers: {exc}") from exc
        if own_values.ndim != 1 or not (own_values <= _ABOVE_CERTAIN).all():
            raise EngineAnswerError("the log-probability of a token of the prompt is missing")
        rows = top_k_rows(all_ids, all_values, k)
        _check_positions(all_ids, all_values, np.array(tokens[1:], np.int64), own_values, rows.values[:, -1])
        return rows, own_values

    def weight_version(self, answer: Mapping[str, Any]) -> str:
        """Return the version of the weights that the answer states; empty if the answer states none."""
        return ""

    def model(self, answer: Mapping[str, Any]) -> str:
        """Return the model named in the answer, which a router may have chosen; empty if the answer names none."""
        name = answer.get("model")
        return name if isinstance(name, str) else ""


def _check_positions(ids: Array, values: Array, tokens: Array, own: Array, smallest: Array) -> None:
    """Raise if a list belongs to another position; `smallest` holds the k-th value of each list."""
    is_own = ids == tokens[:, None]
    listed = np.where(is_own, values, -np.inf).max(-1)
    with np.errstate(invalid="ignore"):  # -inf beside -inf
        wrong = np.where(is_own.any(-1), np.abs(listed - own) > _AGREEMENT, own > smallest + _AGREEMENT)
    wrong |= (ids[:, -1] >= 0) & ~(
        is_own.any(-1) & (listed <= smallest + _AGREEMENT)
    )  # only the prompt's own token can make a list longer than k
    if wrong.any():
        place = int(wrong.argmax())
        raise EngineAnswerError(
            f"position {place + 1} does not agree with the log-probability of the prompt's own token {tokens[place]}, "
            f"{own[place]:.4g}: its list belongs to a different position"
        )


class CompletionsEndpoint(ScoringEndpoint):
    """vLLM's `/v1/completions`, which every vLLM server offers."""

    path = "/v1/completions"

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        return {"model": model, "prompt": list(tokens), **_sampling(k)}

    def entries(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> Entries:
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
            raise EngineAnswerError("the answer does not have exactly one element in 'choices'")
        return _read_positions(choices[0].get("prompt_logprobs"), tokens)


class GenerateEndpoint(ScoringEndpoint):
    """vLLM's `/inference/v1/generate`, which needs `--enable-scale-out`."""

    path = "/inference/v1/generate"

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        return {"model": model, "token_ids": list(tokens), "sampling_params": {**_sampling(k), "detokenize": False}}

    def entries(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> Entries:
        return _read_positions(answer.get("prompt_logprobs"), tokens)

    def weight_version(self, answer: Mapping[str, Any]) -> str:
        """Return the tag of the weights, which vLLM changes when a trainer sends it new weights."""
        try:
            return str(answer["choices"][0]["weight_versions"][0]["version"])
        except (KeyError, IndexError, TypeError):
            return ""


class SGLangEndpoint(ScoringEndpoint):
    """SGLang's `/generate`."""

    path = "/generate"

    def body(self, model: str, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """Make the request for a prompt. SGLang serves a single model, so the request does not name it."""
        return {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
            "return_text_in_logprobs": False,
        }

    def entries(self, answer: Mapping[str, Any], tokens: Sequence[int]) -> Entries:
        meta = answer.get("meta_info")
        top = meta.get("input_top_logprobs") if isinstance(meta, Mapping) else None
        own = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
        if not isinstance(top, list) or not isinstance(own, list) or not len(top) == len(own) == len(tokens):
            raise EngineAnswerError(
                "the answer does not have 'input_top_logprobs' and 'input_token_logprobs' for each token of the prompt"
            )
        try:
            shown = [int(entry[1]) for entry in own]
            ids = [[int(token) for _, token, *_ in position] for position in top[1:]]
            values = [[value for value, *_ in position] for position in top[1:]]
        except (TypeError, ValueError, IndexError) as exc:
            raise EngineAnswerError(f"an entry is not [log-probability, token, text]: {exc}") from exc
        if shown != list(tokens):
            raise EngineAnswerError("'input_token_logprobs' covers different tokens than the prompt")
        return ids, values, [entry[0] for entry in own[1:]]


ENDPOINTS: Mapping[str, tuple[type[ScoringEndpoint], ...]] = {
    "vllm": (GenerateEndpoint, CompletionsEndpoint),
    "sglang": (SGLangEndpoint,),
}
"""The endpoints of each kind of engine, in order of preference."""


def _sampling(k: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters. At least one token must be generated; it is ignored."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    no_penalty = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return {"max_tokens": 1, "prompt_logprobs": k, **neutral, **no_penalty}


def _read_positions(positions: object, tokens: Sequence[int]) -> Entries:
    """Read vLLM's `prompt_logprobs`: null for the first position, `{token: {"logprob": …}}` for the others."""
    if not isinstance(positions, list):
        raise EngineAnswerError("the answer has no 'prompt_logprobs'")
    if len(positions) != len(tokens):
        raise EngineAnswerError(f"'prompt_logprobs' has {len(positions)} positions, but the prompt {len(tokens)}")
    ids: list[list[int]] = []
    values: list[list[Any]] = []
    own: list[Any] = []
    for place, (entries, token) in enumerate(zip(positions[1:], tokens[1:], strict=True), 1):
        if not isinstance(entries, dict):
            raise EngineAnswerError(f"position {place} of 'prompt_logprobs' is {type(entries).__name__}, not an object")
        if str(token) not in entries:
            raise EngineAnswerError(
                f"position {place} of 'prompt_logprobs' lacks the prompt's own token {token}: "
                "the list is for another position"
            )
        try:
            ids.append([int(text) for text in entries])
            values.append([entry["logprob"] for entry in entries.values()])
            own.append(entries[str(token)]["logprob"])
        except (TypeError, ValueError, KeyError) as exc:
            raise EngineAnswerError(f"position {place} has an entry without a number: {exc}") from exc
    return ids, values, own
