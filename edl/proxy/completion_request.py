"""What a client asks for: the body of `POST /v1/completions`, checked.

Fields are those of vLLM's protocol. What cannot be done is refused by name; what means nothing where nothing is
generated (penalties, `top_p`, `seed`, `echo`, ...) is let pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edl.quoting import clip, shown

__all__ = ["CompletionRequest", "RequestRefusal", "read_request"]

_MAX_ID: Final = np.iinfo(np.int32).max
_SINGLE: Final = ("n", "best_of")
_CHANGING: Final = ("truncate_prompt_tokens", "prompt_embeds")
"""What would be another prompt than the ids."""
_LEAST_WEIGHT: Final = 16  # tokens, whose labels have about the bytes of what is held by prompt besides


class RequestRefusal(Exception):
    """Raised for a request that is answered with an error.

    Args:
        status: of HTTP.
        message: why, and what to change.
        retry_after_s: when to ask again; None not to say.

    Attributes:
        status: as given.
        message: as given.
        retry_after_s: as given.
    """

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts whose tokens are to be scored.

    Attributes:
        prompts: int32 [tokens] each, of one token at least.
        k: entries of a position, besides the prompt's own token.
        with_ids: whether the answer repeats the prompts' ids.
    """

    prompts: list[npt.NDArray[np.int32]]
    k: int
    with_ids: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def weight(self) -> int:
        """Tokens as they count for the memory that is held: of a prompt 16 at least."""
        return sum(max(len(ids), _LEAST_WEIGHT) for ids in self.prompts)


def read_request(body: bytes, model: str, max_k: int) -> CompletionRequest:
    """Read and check the body of a request.

    Args:
        body: JSON.
        model: the name that clients may ask for.
        max_k: the largest k.

    Raises:
        RequestRefusal: 400 or 404, with the offending name and value.
    """
    try:
        return _read_fields(json.loads(body), model, max_k)
    except (ValueError, RecursionError) as exc:
        raise RequestRefusal(400, f"the body is no JSON: {clip(str(exc), 200)}") from exc


def _read_fields(fields: object, model: str, max_k: int) -> CompletionRequest:
    if not isinstance(fields, dict):
        raise RequestRefusal(400, "the body is not a JSON object")
    named = fields.get("model")
    if named is not None and named != model:
        raise RequestRefusal(404, f"the model {_shown(named)} does not exist; this proxy has {model!r}")
    _refuse_generation(fields)
    return CompletionRequest(_prompts(fields.get("prompt")), _k(fields, max_k), fields.get("return_token_ids") is True)


def _refuse_generation(fields: Mapping[str, Any]) -> None:
    """Refuse what only a server that generates can do, and other temperatures than 1."""
    tokens = fields.get("max_tokens")
    if tokens is not None and (isinstance(tokens, bool) or tokens not in (0, 1)):
        raise RequestRefusal(
            400,
            f"max_tokens={_shown(tokens)}: this proxy scores prompts and generates nothing: ask with max_tokens 1 and "
            "prompt_logprobs, and generate with the student or a vLLM of its own",
        )
    if fields.get("stream"):
        raise RequestRefusal(400, "stream: nothing is generated, so there is nothing to stream")
    for name in _SINGLE:
        if fields.get(name) not in (None, 1):
            raise RequestRefusal(400, f"{name}={_shown(fields[name])}: nothing is generated, so there is one answer")
    for name in _CHANGING:
        value = fields.get(name)
        if value is not None and value is not False:
            raise RequestRefusal(400, f"{name}: not known here: the ids of `prompt` are scored, all of them")
    temperature = fields.get("temperature")
    if temperature is None:
        return
    # 0 is what clients send for the token that is generated and thrown away. It cannot be meant for the teacher.
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature not in (0, 1):
        raise RequestRefusal(
            400,
            f"temperature={_shown(temperature)}: log-probabilities of a prompt are those at temperature 1, which is "
            "not what was asked for. Distill at temperature 1",
        )


def _k(fields: Mapping[str, Any], max_k: int) -> int:
    k, name = fields.get("prompt_logprobs"), "prompt_logprobs"
    if k is None:
        # Of tokens that are generated; where none are, those of the prompt can be meant alone (ms-swift asks so).
        k, name = fields.get("logprobs"), "logprobs"
    if k is None:
        raise RequestRefusal(400, "prompt_logprobs is missing: this proxy scores prompts, and generates nothing")
    if isinstance(k, bool) or not isinstance(k, int):
        raise RequestRefusal(400, f"{name}={_shown(k)}: expected a whole number from 0 to {max_k}")
    if k < 0:
        raise RequestRefusal(400, f"{name}={_shown(k)}: expected 0 to {max_k}; the whole vocabulary is never sent")
    if k > max_k:
        raise RequestRefusal(
            400,
            f"Requested prompt logprobs of {_shown(k)}, which is greater than max allowed: {max_k} (edl proxy --top-k)",
        )
    return k


def _prompts(prompt: object) -> list[npt.NDArray[np.int32]]:
    if isinstance(prompt, str) or (isinstance(prompt, list) and any(isinstance(part, str) for part in prompt)):
        raise RequestRefusal(400, "prompt is text: this proxy has no tokenizer; send the token ids")
    if not isinstance(prompt, list) or not prompt:
        raise RequestRefusal(400, "prompt: expected a list of token ids, or a list of such lists, that is not empty")
    lists = prompt if isinstance(prompt[0], list) else [prompt]
    return [_ids(part, number) for number, part in enumerate(lists)]


def _ids(part: object, number: int) -> npt.NDArray[np.int32]:
    if not isinstance(part, list) or not part:
        raise RequestRefusal(400, f"prompt {number}: expected a list of token ids that is not empty")
    if set(map(type, part)) != {int}:
        wrong = next(item for item in part if type(item) is not int)
        raise RequestRefusal(400, f"prompt {number} has {_shown(wrong)}: expected token ids alone")
    if min(part) < 0 or max(part) > _MAX_ID:
        wrong = next(item for item in part if not 0 <= item <= _MAX_ID)
        raise RequestRefusal(400, f"prompt {number}: token id {_shown(wrong)} is out of vocabulary")
    return np.array(part, np.int32)


def _shown(value: object) -> str:
    return shown(json.dumps(value), 100)
