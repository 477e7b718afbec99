"""The JSON of answers, as vLLM writes it.

Position p of `prompt_logprobs` is the prediction OF token p, which is row p - 1 of the labels; position 0 is null.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edl.distill.compress import TopK

__all__ = ["answer_head", "answer_tail", "encode_choice", "encode_error"]

_LEAST: Final = -9999.0
"""In place of minus infinity, which JSON has not: vLLM writes the same."""
_ERROR_TYPES: Final = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}


def encode_choice(
    index: int, prompt: npt.NDArray[np.int32], labels: TopK, own: npt.NDArray[Any], k: int, with_ids: bool
) -> bytes:
    """Encode an element of `choices`.

    Args:
        index: of the prompt.
        prompt: its ids, int32 [tokens].
        labels: `TopK` of as many rows, by falling value.
        own: log-probability of the prompt's next token in each row, float [tokens, 1].
        k: how many entries of a row to write. The prompt's own token is added where it is not among them, with rank
            k + 1: its true rank is that or a later one.
        with_ids: whether to repeat the ids.
    """
    ids = np.asarray(labels.ids)[:-1, :k]
    values = np.maximum(np.asarray(labels.values)[:-1, :k].astype(np.float64), _LEAST)
    tokens = prompt[1:]
    inside = (ids == tokens[:, None]).any(-1)
    last = np.maximum(np.asarray(own)[:-1, 0].astype(np.float64), _LEAST)
    cells = np.empty((len(tokens), 2 * k), object)  # ids and values take turns, as Python's own numbers
    cells[:, ::2], cells[:, 1::2] = ids, values
    known, added = _template(k), _template(k + 1)
    positions = ["null"]
    for row, is_inside, token, value in zip(
        cells.tolist(), inside.tolist(), tokens.tolist(), last.tolist(), strict=True
    ):
        positions.append(known % tuple(row) if is_inside else added % (*row, token, value))
    ids_text = json.dumps(prompt.tolist(), separators=(",", ":")) if with_ids else "null"
    text = (
        f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"length","stop_reason":null,'
        f'"token_ids":{"[]" if with_ids else "null"},"prompt_logprobs":[{",".join(positions)}],'
        f'"prompt_token_ids":{ids_text}}}'
    )
    return text.encode()


def answer_head(number: str, created: int, model: str) -> bytes:
    """Encode what stands before the choices.

    Args:
        number: of the request.
        created: in seconds since 1970.
        model: its name.
    """
    head = {"id": f"cmpl-{number}", "object": "text_completion", "created": created, "model": model}
    return json.dumps(head, separators=(",", ":"))[:-1].encode() + b',"choices":['


def answer_tail(tokens: int) -> bytes:
    """Encode what stands behind the choices.

    Args:
        tokens: of all prompts.
    """
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return b'],"usage":' + json.dumps(usage, separators=(",", ":")).encode() + b"}"


def encode_error(status: int, message: str) -> bytes:
    """Encode an error.

    Args:
        status: of HTTP.
        message: in words.
    """
    kind = _ERROR_TYPES.get(status, "ServiceUnavailableError" if status >= 500 else "BadRequestError")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


@functools.lru_cache(maxsize=256)  # clients ask for a k or two
def _template(entries: int) -> str:
    # 9 digits tell all float32 apart.
    parts = [f'"%d":{{"logprob":%.9g,"rank":{rank},"decoded_token":null}}' for rank in range(1, entries + 1)]
    return "{" + ",".join(parts) + "}"
