"""A small HTTP server that answers as vLLM and SGLang do, with log-probabilities by a formula.

What it sends has the shape of the answers recorded from the real vLLM 0.32 (tests/fast/serving/gateway), and so have
its refusals. A test may have it fail in the ways in which engines do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from tests.waiting import DEADLINE_S, wait_until

VOCABULARY = 50
MAX_MODEL_LEN = 64


def log_probabilities(tokens: Sequence[int]) -> np.ndarray:
    """Of the token behind each one, float64 `[tokens, VOCABULARY]`: of all tokens up to there, so that a shift, a cut
    and another order show."""
    mixed = np.cumsum(np.asarray(tokens, np.float64) + 1) % 17
    logits = np.sin(np.outer(mixed + 1, np.arange(1, VOCABULARY + 1))) * 3
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class FormulaEngine:
    """A server on a free port, until `close`.

    Attributes:
        predict: log-probabilities behind each token, float64 [tokens, VOCABULARY or another number].
        answering: the model that answers name, as a router's fallback does; None for the one that was asked for.
        failure: called with the path and the number of the request before it is answered. It returns a status and a
            JSON value to answer with, "cut" to end the connection in the middle of an answer, "close" to end it
            without one, or None for the right answer.
        gather_tokens: answers wait until so many tokens were asked for at the same time.
        released: answers wait until this is set.
        looks: questions about health so far.
        requests: paths and bodies so far.
        most_tokens: that were asked for at the same time.
    """

    def __init__(self) -> None:
        self.predict: Callable[[Sequence[int]], np.ndarray] = log_probabilities
        self.max_logprobs = 20
        self.scale_out = True
        self.token = ""
        self.models = ["m"]
        self.weight_version = "default"
        self.answering: str | None = None
        self.healthy = True
        self.failure: Callable[[str, int], Any] | None = None
        self.gather_tokens = 0
        self.released = threading.Event()
        self.released.set()
        self.looks = 0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.most_tokens = 0
        self._tokens = 0
        self._lock = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_request(self, code: object = "-", size: object = "-") -> None:
                pass

            def do_GET(self) -> None:
                engine._get(self)

            def do_POST(self) -> None:
                engine._post(self)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # with the library's 5, clients that connect together wait for seconds

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away, as it should

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/health":
            self.looks += 1
            _send(handler, 200 if self.healthy else 503, None)
        elif self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            _send(handler, 401, {"error": "Unauthorized"})
        elif handler.path == "/v1/models":
            data = [{"id": name, "root": f"./{name}", "max_model_len": MAX_MODEL_LEN} for name in self.models]
            _send(handler, 200, {"object": "list", "data": data})
        else:
            _send(handler, 404, {"detail": "Not Found"})

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        tokens = body.get("prompt") or body.get("token_ids") or body.get("input_ids") or []
        with self._lock:
            self.requests.append((handler.path, body))
            number = len(self.requests)
            self._tokens += len(tokens)
            self.most_tokens = max(self.most_tokens, self._tokens)
        try:
            self._answer(handler, body, tokens, number)
        finally:
            with self._lock:
                self._tokens -= len(tokens)

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], tokens: list[int], number: int) -> None:
        wait_until(lambda: self.most_tokens >= self.gather_tokens, "tokens at the same time")
        self.released.wait(DEADLINE_S)
        wanted = self.failure(handler.path, number) if self.failure is not None else None
        if wanted == "close":
            handler.close_connection = True
            return
        if isinstance(wanted, tuple):
            _send(handler, *wanted)
            return
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            _send(handler, 401, {"error": "Unauthorized"})
        elif handler.path == "/inference/v1/generate" and not self.scale_out:
            _refuse(handler, 403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out …")
        elif max(tokens) >= VOCABULARY:
            _refuse(handler, 400, f"Token id {max(tokens)} is out of vocabulary")
        elif len(tokens) >= MAX_MODEL_LEN:
            _refuse(handler, 400, f"The decoder prompt (length {len(tokens)}) … is longer than the maximum model")
        else:
            status, answer = self._score(handler.path, body, tokens)
            _send(handler, status, answer, cut=wanted == "cut")

    def _score(self, path: str, body: dict[str, Any], tokens: list[int]) -> tuple[int, Any]:
        k = body.get("sampling_params", body).get("prompt_logprobs", body.get("top_logprobs_num"))
        if k > self.max_logprobs:
            words = f"Requested prompt logprobs of {k}, which is greater than max allowed: {self.max_logprobs}"
            return 400, {"error": {"message": words, "type": "BadRequestError", "code": 400}}
        predicted = self.predict(tokens)[:-1]
        order = np.argsort(-predicted, axis=-1, kind="stable")
        if path == "/generate":
            top = [[[float(row[i]), int(i), None] for i in order[at, :k]] for at, row in enumerate(predicted)]
            own = [[float(row[t]), t, None] for row, t in zip(predicted, tokens[1:], strict=True)]
            meta = {"input_token_logprobs": [[None, tokens[0], None], *own], "input_top_logprobs": [None, *top]}
            return 200, {"text": "", "meta_info": {"prompt_tokens": len(tokens), **meta}}
        named = self.answering or body["model"]
        positions: list[Any] = [None]
        for row, best, token in zip(predicted, order, tokens[1:], strict=True):
            shown = dict.fromkeys([token, *(int(i) for i in best[:k])])  # the prompt's own comes first
            ranks = {int(i): rank for rank, i in enumerate(best, 1)}
            entries = {str(i): {"logprob": float(row[i]), "rank": ranks[i], "decoded_token": None} for i in shown}
            positions.append(entries)
        if path == "/v1/completions":
            return 200, {"model": named, "choices": [{"index": 0, "text": "x", "prompt_logprobs": positions}]}
        versions = [{"version": self.weight_version, "start": 0, "end": 1}]
        choices = [{"index": 0, "weight_versions": versions}]
        return 200, {"model": named, "prompt_logprobs": positions, "choices": choices}


def _refuse(handler: BaseHTTPRequestHandler, status: int, message: str) -> None:
    _send(handler, status, {"error": {"message": message, "type": "…", "param": None, "code": status}})


def _send(
    handler: BaseHTTPRequestHandler,
    status: int,
    value: Any,
    headers: dict[str, str] | None = None,
    *,
    cut: bool = False,
) -> None:
    content = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    for name, text in (headers or {}).items():
        handler.send_header(name, text)
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2] if cut else content)
    if cut:
        handler.close_connection = True
