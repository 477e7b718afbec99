"""The JSON of answers, as vLLM writes it.

Position p of `prompt_logprobs` is the prediction OF token p, which is row p - 1 of the labels; position 0 is null.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edl.distill.compress import TopK

__all__ = ["PIECE_ENTRIES", "answer_head", "answer_tail", "encode_choice", "encode_error"]

PIECE_ENTRIES: Final = 4096
"""Of a position, that are encoded at a time: milliseconds, in which nobody else is answered, and some megabytes."""
_LEAST: Final = -9999.0
"""In place of minus infinity, which JSON has not: vLLM writes the same."""
_ERROR_TYPES: Final = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}


def encode_choice(
    index: int, prompt: npt.NDArray[np.int32], labels: TopK, own: npt.NDArray[Any], k: int, with_ids: bool
) -> Iterator[bytes]:
    """Encode an element of `choices`, piece by piece: as a whole it may have hundreds of megabytes.

    Args:
        index: of the prompt.
        prompt: its ids, int32 [tokens].
        labels: `TopK` of as many rows, by falling value, of k entries at least.
        own: log-probability of the prompt's next token in each row, float [tokens, 1].
        k: how many entries of a row to write. The prompt's own token is added where it is not among them, with its rank
            in `labels`; where it is not in these, with the rank behind their last: its true one is that or later.
        with_ids: whether to repeat the ids.

    Yields:
        Pieces of some thousand entries.
    """
    yield (
        f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"length","stop_reason":null,'
        f'"token_ids":{"[]" if with_ids else "null"},"prompt_logprobs":[null'
    ).encode()
    ids, values, last = np.asarray(labels.ids), np.asarray(labels.values), np.asarray(own)[:, 0]
    rows = max(1, PIECE_ENTRIES // ids.shape[1])  # all that are there are looked at, even if k is less
    for start in range(0, len(prompt) - 1, rows):
        end = min(start + rows, len(prompt) - 1)
        yield _encode_positions(prompt[start + 1 : end + 1], ids[start:end], values[start:end], last[start:end], k)
    ids_text = json.dumps(prompt.tolist(), separators=(",", ":")) if with_ids else "null"
    yield f'],"prompt_token_ids":{ids_text}}}'.encode()


def _encode_positions(
    tokens: npt.NDArray[np.int32], ids: npt.NDArray[Any], values: npt.NDArray[Any], own: npt.NDArray[Any], k: int
) -> bytes:
    """Encode the predictions of tokens, each behind a comma."""
    same = ids == tokens[:, None]
    ranks = np.where(same.any(-1), same.argmax(-1), same.shape[1]) + 1
    last = np.maximum(own.astype(np.float64), _LEAST)
    cells = np.empty((len(tokens), 2 * k), object)  # ids and values take turns, as Python's own numbers
    cells[:, ::2], cells[:, 1::2] = ids[:, :k], np.maximum(values[:, :k].astype(np.float64), _LEAST)
    known, added = _template(k), _template(k, added=True)
    return "".join(
        known % tuple(row) if rank <= k else added % (*row, token, value, rank)
        for row, rank, token, value in zip(cells.tolist(), ranks.tolist(), tokens.tolist(), last.tolist(), strict=True)
    ).encode()


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
def _template(entries: int, *, added: bool = False) -> str:
    """Return the form of a position, with a last entry of any rank if `added`."""
    ranks = [*map(str, range(1, entries + 1)), *(["%d"] if added else [])]
    # 9 digits tell all float32 apart.
    parts = [f'"%d":{{"logprob":%.9g,"rank":{rank},"decoded_token":null}}' for rank in ranks]
    return ",{" + ",".join(parts) + "}"
