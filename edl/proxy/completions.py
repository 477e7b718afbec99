"""vLLM's completions protocol: checks the body of `POST /v1/completions`, and encodes answers as JSON.

If a field of a request asks for something that the proxy cannot do, the request is refused, and the error names the
field. Fields that matter only for generation (penalties, `top_p`, `seed`, ...) are ignored. Position p of
`prompt_logprobs` is the prediction OF token p, which is row p - 1 of the labels; position 0 is null.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edl.distill.compress import TopK
from edl.quoting import clip, listed, shown

_MAX_ID: Final = np.iinfo(np.int32).max
_SINGLE: Final = ("n", "best_of")
_CHANGING: Final = ("truncate_prompt_tokens", "prompt_embeds")  # these would change the prompt
_LEAST_WEIGHT: Final = 16  # tokens, whose labels take about as many bytes as the rest of a prompt's state
PIECE_ENTRIES: Final = 4096  # encoded at a time: some megabytes, and milliseconds that block other requests
_LEAST: Final = -9999.0  # replaces minus infinity, which JSON lacks; vLLM writes the same
_ERROR_TYPES: Final = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}


class RequestRefusal(Exception):
    """Raised to refuse a request; contains the HTTP status, the reason with what to change, and when to retry."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts whose tokens a client wants scored."""

    model: str
    prompts: list[npt.NDArray[np.int32]]  # [tokens] each, at least one token
    k: int  # entries per position, besides the prompt's own token
    temperature: float = 1.0
    with_ids: bool = False  # whether the answer repeats the prompts' ids

    @property
    def tokens(self) -> int:
        """Total tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def weight(self) -> int:
        """Number of tokens that count towards the memory limit: at least 16 per prompt."""
        return sum(max(len(ids), _LEAST_WEIGHT) for ids in self.prompts)


def read_request(body: bytes, models: Collection[str], max_k: int) -> CompletionRequest:
    """Read and check the body of a request to one of these models; raise `RequestRefusal` (400 or 404)."""
    try:
        return _read_fields(json.loads(body), models, max_k)
    except (ValueError, RecursionError) as exc:
        raise RequestRefusal(400, f"the body is not JSON: {clip(str(exc), 200)}") from exc


def _read_fields(fields: object, models: Collection[str], max_k: int) -> CompletionRequest:
    if not isinstance(fields, dict):
        raise RequestRefusal(400, "the body is not a JSON object")
    named = fields.get("model")
    if named is None and len(models) > 1:
        raise RequestRefusal(
            400,
            f"model is missing: set it to one of {listed(models)}, or use a model's URL, such as /{next(iter(models))}",
        )
    model = next(iter(models)) if named is None else named
    if model not in list(models):  # a list also accepts unhashable values
        raise RequestRefusal(404, f"the model {_shown(model)} does not exist; available: {listed(models)}")
    _refuse_generation(fields)
    k, with_ids = _k(fields, max_k), fields.get("return_token_ids") is True
    return CompletionRequest(model, _prompts(fields.get("prompt")), k, _temperature(fields), with_ids)


def _refuse_generation(fields: Mapping[str, Any]) -> None:
    tokens = fields.get("max_tokens")
    if tokens is not None and (isinstance(tokens, bool) or tokens not in (0, 1)):
        raise RequestRefusal(
            400,
            f"max_tokens={_shown(tokens)}: this proxy scores prompts and generates nothing: ask with max_tokens 1 and "
            "prompt_logprobs, and generate with the student or a separate vLLM",
        )
    if fields.get("stream"):
        raise RequestRefusal(400, "stream: nothing is generated, so there is nothing to stream")
    for name in _SINGLE:
        if fields.get(name) not in (None, 1):
            raise RequestRefusal(400, f"{name}={_shown(fields[name])}: nothing is generated, so there is one answer")
    for name in _CHANGING:
        value = fields.get(name)
        if value is not None and value is not False:
            raise RequestRefusal(400, f"{name}: not supported: all ids of `prompt` are scored")


def _temperature(fields: Mapping[str, Any]) -> float:
    temperature = fields.get("temperature")
    # Clients send 0 for the generated token, which they discard. It cannot be meant for the teacher.
    if temperature is None or (temperature == 0 and not isinstance(temperature, bool)):
        return 1.0
    # With less than 0.01, a float32 could not hold log-probabilities.
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not 0.01 <= temperature <= 100:
        raise RequestRefusal(400, f"temperature={_shown(temperature)}: expected a number from 0.01 to 100, or 0")
    return float(temperature)


def _k(fields: Mapping[str, Any], max_k: int) -> int:
    k, name = fields.get("prompt_logprobs"), "prompt_logprobs"
    if k is None:
        # `logprobs` is for generated tokens; without any, it can only mean the prompt's (ms-swift sends this).
        k, name = fields.get("logprobs"), "logprobs"
        if k is not None and fields.get("echo"):
            raise RequestRefusal(400, "echo with logprobs: this proxy answers only prompt_logprobs; send that instead")
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
        raise RequestRefusal(400, "prompt: expected a non-empty list of token ids, or a non-empty list of such lists")
    lists = prompt if isinstance(prompt[0], list) else [prompt]
    return [_ids(part, number) for number, part in enumerate(lists)]


def _ids(part: object, number: int) -> npt.NDArray[np.int32]:
    if not isinstance(part, list) or not part:
        raise RequestRefusal(400, f"prompt {number}: expected a non-empty list of token ids")
    if set(map(type, part)) != {int}:
        wrong = next(item for item in part if type(item) is not int)
        raise RequestRefusal(400, f"prompt {number} contains {_shown(wrong)}: expected only token ids")
    if min(part) < 0 or max(part) > _MAX_ID:
        wrong = next(item for item in part if not 0 <= item <= _MAX_ID)
        raise RequestRefusal(400, f"prompt {number}: token id {_shown(wrong)} is out of vocabulary")
    return np.array(part, np.int32)


def _shown(value: object) -> str:
    return shown(json.dumps(value), 100)


def at_temperature(labels: TopK, own: npt.NDArray[Any], temperature: float) -> tuple[TopK, npt.NDArray[Any]]:
    """Convert log-probabilities at temperature 1 to `temperature`, at which `labels.tail_lse` was computed."""
    if temperature == 1:
        return labels, own
    values = np.asarray(labels.values, np.float64) / temperature
    total = np.logaddexp(np.logaddexp.reduce(values, axis=-1), np.asarray(labels.tail_lse, np.float64))[:, None]
    return TopK(labels.ids, values - total, labels.tail_lse), np.asarray(own, np.float64) / temperature - total


def encode_choice(
    index: int, prompt: npt.NDArray[np.int32], labels: TopK, own: npt.NDArray[Any], k: int, with_ids: bool
) -> Iterator[bytes]:
    """Encode an element of `choices` in pieces of some thousand entries: an element may take hundreds of megabytes.

    Args:
        index: Number of the prompt.
        prompt: The prompt's ids, int32 [tokens].
        labels: `TopK` with one row per token; each row has at least k entries, by descending value.
        own: Log-probability, in each row, of the prompt's next token, float [tokens, 1].
        k: Number of entries to write per row. If the prompt's own token is not among these entries, it is added with
            its rank in `labels`. If `labels` lacks the token, the token gets the rank after the last entry of `labels`;
            its true rank may be a later one.
        with_ids: Whether to repeat the prompt's ids in the answer.
    """
    yield (
        f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"length","stop_reason":null,'
        f'"token_ids":{"[]" if with_ids else "null"},"prompt_logprobs":[null'
    ).encode()
    ids, values, last = np.asarray(labels.ids), np.asarray(labels.values), np.asarray(own)[:, 0]
    k = min(k, ids.shape[1])  # a small vocabulary may have fewer
    rows = max(1, PIECE_ENTRIES // ids.shape[1])  # all entries are examined, even if k is less
    for start in range(0, len(prompt) - 1, rows):
        end = min(start + rows, len(prompt) - 1)
        yield _encode_positions(prompt[start + 1 : end + 1], ids[start:end], values[start:end], last[start:end], k)
    ids_text = json.dumps(prompt.tolist(), separators=(",", ":")) if with_ids else "null"
    yield f'],"prompt_token_ids":{ids_text}}}'.encode()


def _encode_positions(
    tokens: npt.NDArray[np.int32], ids: npt.NDArray[Any], values: npt.NDArray[Any], own: npt.NDArray[Any], k: int
) -> bytes:
    """Encode the predictions of tokens, each preceded by a comma."""
    same = ids == tokens[:, None]
    ranks = np.where(same.any(-1), same.argmax(-1), same.shape[1]) + 1
    last = np.maximum(own.astype(np.float64), _LEAST)
    cells = np.empty((len(tokens), 2 * k), object)  # ids and values alternate, as Python numbers
    cells[:, ::2], cells[:, 1::2] = ids[:, :k], np.maximum(values[:, :k].astype(np.float64), _LEAST)
    known, added = _template(k), _template(k, added=True)
    return "".join(
        known % tuple(row) if rank <= k else added % (*row, token, value, rank)
        for row, rank, token, value in zip(cells.tolist(), ranks.tolist(), tokens.tolist(), last.tolist(), strict=True)
    ).encode()


def answer_head(number: str, created: int, model: str) -> bytes:
    """Encode the part before the choices; `created` is Unix time."""
    head = {"id": f"cmpl-{number}", "object": "text_completion", "created": created, "model": model}
    return json.dumps(head, separators=(",", ":"))[:-1].encode() + b',"choices":['


def answer_tail(tokens: int) -> bytes:
    """Encode the part after the choices; `tokens` is the number of tokens in all prompts."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    return b'],"usage":' + json.dumps(usage, separators=(",", ":")).encode() + b"}"


def encode_error(status: int, message: str) -> bytes:
    """Encode an error."""
    kind = _ERROR_TYPES.get(status, "ServiceUnavailableError" if status >= 500 else "BadRequestError")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


@functools.lru_cache(maxsize=256)  # clients use one or two values of k
def _template(entries: int, *, added: bool = False) -> str:
    """Return the format string for a position with `entries` entries, and one more of any rank if `added`."""
    ranks = [*map(str, range(1, entries + 1)), *(["%d"] if added else [])]
    parts = [f'"%d":{{"logprob":%.9g,"rank":{rank},"decoded_token":null}}' for rank in ranks]  # 9 digits: all float32
    return ",{" + ",".join(parts) + "}"
