"""What clients of a vLLM send, and what they make of the answer.

The requests are those of TRL 1.16.0 (`VLLMClient.get_sequence_logprobs` and the asynchronous trainer's
`_score_with_teacher`), of Axolotl's online teacher and of ms-swift's, written down from their sources. TRL's own client
runs against the proxy in test_trl_client.py.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.testing.models import prefix_scores_of
from tests.fast.distill.sequences.language_model import VOCABULARY


def trl_request(sequences: Sequence[Sequence[int]], k: int, model: str) -> dict[str, Any]:
    prompt = [list(sequence) for sequence in sequences]
    return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}


def trl_async_request(sequence: Sequence[int], k: int, model: str) -> dict[str, Any]:
    return {**trl_request([sequence], k, model), "prompt": list(sequence)}


def axolotl_request(sequences: Sequence[Sequence[int]], k: int) -> dict[str, Any]:
    return {
        "prompt": [list(sequence) for sequence in sequences],
        "echo": True,
        "logprobs": True,
        "prompt_logprobs": k,
        "top_logprobs": k,
        "max_new_tokens": 0,
        "skip_special_tokens": False,
        "temperature": 1.0,
        "sampling_params": {"max_tokens": 0},
    }


def swift_request(sequence: Sequence[int], k: int, model: str) -> dict[str, Any]:
    return {"model": model, "prompt": list(sequence), "max_tokens": 0, "temperature": 0, "logprobs": k}


def ask(
    port: int,
    body: Any = None,
    path: str = "/v1/completions",
    headers: dict[str, str] | None = None,
    timeout_s: float = 100,
) -> tuple[int, Any, dict[str, str]]:
    """POST with a body, GET without: the status, the JSON (or the text) and the headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", path, data, headers or {})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    is_json = (answer.getheader("Content-Type") or "").startswith("application/json")
    return answer.status, json.loads(content) if is_json else content.decode(), dict(answer.getheaders())


def check_choice(choice: dict[str, Any], sequence: Sequence[int], k: int, sign: int = 1) -> None:
    """Position p holds the prediction of token p, the k best by rank, and the prompt's own token."""
    expected = sign * prefix_scores_of(np.asarray(sequence, np.int32), VOCABULARY)
    positions = choice["prompt_logprobs"]
    assert len(positions) == len(sequence)
    assert positions[0] is None
    for place, entries in enumerate(positions[1:], 1):
        row, own = expected[place - 1], sequence[place]
        assert entries[str(own)]["logprob"] == float(row[own]), f"position {place}"
        ranked = sorted(entries.items(), key=lambda item: item[1]["rank"])
        assert [entry["logprob"] for _, entry in ranked[:k]] == (-np.sort(-row)[:k]).tolist()
        assert all(float(row[int(token)]) == entry["logprob"] for token, entry in ranked)
        assert len(entries) in (k, k + 1)
