"""The gateway's backend against a small engine with a formula: alignment, failures, and what may be in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from edl.errors import SettingsError
from edl_serving.backends.backend import TopKArrays
from edl_serving.gateway.address import EngineAddress
from edl_serving.gateway.backend import GatewayBackend, GatewayModel
from edl_serving.gateway.engine import EngineAccess
from edl_serving.gateway.health import EngineHealth
from edl_serving.gateway.inspection import EngineFacts, find_facts
from edl_serving.request_error import RequestError
from tests.fast.serving.gateway.formula_engine import MAX_MODEL_LEN, FormulaEngine, log_probabilities
from tests.waiting import wait_until

OpenBackend = Callable[..., GatewayBackend]
SEQUENCES = [[3, 1, 4, 1, 5], [9], [2, 6], list(range(40))]


def reach(engine: FormulaEngine, kind: str = "vllm", **options: Any) -> EngineAccess:
    return EngineAccess(EngineAddress(kind, "127.0.0.1", engine.port), **{"timeout_s": 60.0, **options})


def facts_of(
    engine: EngineAccess, k: int = 8, model: str = "m", exact: bool = True, wait_s: float = 60.0
) -> EngineFacts:
    return asyncio.run(find_facts(engine, model, exact, k, wait_s))


@pytest.fixture
def open_backend(engine: FormulaEngine, stack: ExitStack) -> OpenBackend:
    """Opens backends, and closes them."""

    def open_(kind: str = "vllm", k: int = 8, every_s: float = 0.05, **options: Any) -> GatewayBackend:
        address = reach(engine, kind, **options)
        facts = facts_of(address, k)
        health = stack.enter_context(closing(EngineHealth(address, facts, k, every_s, 60.0, 2)))
        return stack.enter_context(closing(GatewayBackend(GatewayModel(address, facts, k, "r1"), health)))

    return open_


def inputs_of(sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    ids = np.concatenate([np.asarray(tokens, np.int32) for tokens in sequences])
    return {"ids": ids, "position": np.concatenate([np.arange(len(tokens), dtype=np.int32) for tokens in sequences])}


def score(backend: GatewayBackend, sequences: Sequence[Sequence[int]], k: int = 8) -> TopKArrays:
    answer = backend.predict_top_k(inputs_of(sequences), k, 1.0)["logprobs"]
    assert isinstance(answer, TopKArrays)
    return answer


def check(answer: TopKArrays, sequences: Sequence[Sequence[int]], k: int = 8) -> None:
    """Row t holds the prediction of token t + 1, and the last row what would follow."""
    expected = np.concatenate([log_probabilities(tokens) for tokens in sequences])
    order = np.argsort(-expected, axis=-1, kind="stable")
    np.testing.assert_array_equal(answer.ids, order[:, :k])
    np.testing.assert_allclose(answer.values, np.take_along_axis(expected, order[:, :k], -1), atol=1e-6)
    rest = np.log(np.exp(np.take_along_axis(expected, order[:, k:], -1)).sum(-1))
    np.testing.assert_allclose(answer.tail, rest, atol=1e-5)


@pytest.mark.parametrize(("kind", "scale_out"), [("vllm", True), ("vllm", False), ("sglang", True)])
def test_rows_predict_next_tokens(engine: FormulaEngine, open_backend: OpenBackend, kind: str, scale_out: bool) -> None:
    """Of the last row any target is answered: it is the token that is asked about behind the sequence."""
    engine.scale_out = scale_out
    backend = open_backend(kind)
    assert backend.max_sequence == MAX_MODEL_LEN - (8 if kind == "sglang" else 2)
    paths = {"vllm": ("/v1/completions", "/inference/v1/generate")[scale_out], "sglang": "/generate"}
    sequences = [*SEQUENCES, [49] * backend.max_sequence]
    engine.gather_tokens = sum(map(len, sequences))  # none is answered before all have come
    check(score(backend, sequences), sequences)
    path, body = engine.requests[-1]
    assert path == paths[kind]
    sampling = body.get("sampling_params", body)
    assert sampling["temperature"] == 1.0, "a model's generation_config.json is the default of what is left out"
    if kind == "vllm":
        assert (sampling["top_p"], sampling["repetition_penalty"], sampling["max_tokens"]) == (1.0, 1.0, 1)
    targets = np.concatenate([np.array([*tokens[1:], 23], np.int32) for tokens in sequences])[:, None]
    inputs = {**inputs_of(sequences), "targets": targets}
    backend.check_inputs(inputs, 1.0)
    answers = backend.predict_top_k(inputs, 4, 1.0)
    whole = np.concatenate([log_probabilities(tokens) for tokens in sequences])
    np.testing.assert_allclose(answers["target_logprobs"], np.take_along_axis(whole, targets, -1), atol=1e-6)
    check(answers["logprobs"], sequences, 4)


@pytest.mark.parametrize(
    ("change", "temperature", "words"),
    [
        ({}, 2.0, "temperature 1"),
        ({"ids": np.array([1, -5], np.int32)}, 1.0, "row 1: no token"),
        ({"targets": np.array([[3], [4]], np.int32)}, 1.0, "'targets' is 3 in row 0, and the next token is 2"),
    ],
)
def test_other_inputs_are_refused(
    open_backend: OpenBackend, change: dict[str, Any], temperature: float, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        open_backend().check_inputs({**inputs_of([[1, 2]]), **change}, temperature)
    assert refused.value.code.name == "INVALID_ARGUMENT"


def test_rotated_key(engine: FormulaEngine, open_backend: OpenBackend, tmp_path: Any) -> None:
    key = tmp_path / "key"
    engine.token = "old"
    with pytest.raises(SettingsError, match="--engine-token-file"):
        facts_of(reach(engine))
    key.write_text("old\n")
    backend = open_backend(token_file=str(key))
    check(score(backend, [[1, 2]]), [[1, 2]])
    engine.token = "new"
    with pytest.raises(RequestError, match="401"):
        score(backend, [[1, 2]])
    key.write_text("new\n")
    wait_until(lambda: not backend.find_fault())
    check(score(backend, [[1, 2]]), [[1, 2]])


@pytest.mark.parametrize("how", ["cut", "close"])
def test_broken_connection_is_tried_again(engine: FormulaEngine, open_backend: OpenBackend, how: str) -> None:
    backend = open_backend()
    broken = len(engine.requests) + 1
    engine.failure = lambda path, number: how if number == broken else None
    check(score(backend, [[1, 2, 3]]), [[1, 2, 3]])
    assert len(engine.requests) == broken + 1
    engine.failure = lambda path, number: how
    with pytest.raises(RequestError) as lost:
        score(backend, [[1, 2, 3]])
    assert (lost.value.code.name, lost.value.retry_after_ms) == ("UNAVAILABLE", None)


@pytest.mark.parametrize(
    ("status", "headers", "code", "hint_ms"),
    [
        (429, {"Retry-After": "2"}, "UNAVAILABLE", 2000),
        (503, {"Retry-After": "soon"}, "UNAVAILABLE", 500),
        (500, {}, "INTERNAL", None),
        (401, {}, "UNAVAILABLE", None),
        (400, {}, "INVALID_ARGUMENT", None),
        (307, {"Location": "http://127.0.0.1:1/"}, "INTERNAL", None),
    ],
)
def test_refusals_become_statuses(
    engine: FormulaEngine,
    open_backend: OpenBackend,
    status: int,
    headers: dict[str, str],
    code: str,
    hint_ms: int | None,
) -> None:
    backend = open_backend()
    engine.failure = lambda path, number: (status, {"error": {"message": "words"}}, headers)
    with pytest.raises(RequestError, match="words") as refused:
        score(backend, [[1, 2, 3]])
    assert (refused.value.code.name, refused.value.retry_after_ms) == (code, hint_ms)


def test_dying_engine_is_unavailable(engine: FormulaEngine, open_backend: OpenBackend) -> None:
    backend = open_backend(every_s=60.0)
    words = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    engine.failure = lambda path, number: (500, {"error": {"message": words}})
    engine.healthy = False
    with pytest.raises(RequestError, match="not healthy") as lost:
        score(backend, [[1, 2, 3]])
    assert lost.value.code.name == "UNAVAILABLE"


def test_garbage_is_an_error(engine: FormulaEngine, open_backend: OpenBackend) -> None:
    backend = open_backend()
    for content in (b"[]", b"{", b"\xff\xfe", b"[" * 100_000):
        engine.failure = lambda path, number, content=content: (200, content)
        with pytest.raises(RequestError) as failed:
            score(backend, [[1, 2, 3]])
        assert failed.value.code.name == "INTERNAL"
    engine.failure = lambda path, number: (200, b" " * (3 << 20))
    with pytest.raises(RequestError, match="more than"):
        score(backend, [[1, 2, 3]])


def test_late_answer_has_deadline(engine: FormulaEngine, open_backend: OpenBackend) -> None:
    backend = open_backend(timeout_s=1.0)
    engine.released.clear()
    with pytest.raises(RequestError) as late:
        score(backend, [[1, 2, 3]])
    assert late.value.code.name == "DEADLINE_EXCEEDED"


def test_fault_while_engine_is_away(
    engine: FormulaEngine, open_backend: OpenBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that dies is no error of the gateway, which goes on; other weights are."""
    backend = open_backend()
    assert not backend.find_fault()
    engine.healthy = False
    assert "503" in wait_until(backend.find_fault)
    with pytest.raises(RequestError) as away:
        score(backend, [[1]])
    assert away.value.code.name == "UNAVAILABLE"
    engine.healthy = True
    wait_until(lambda: not backend.find_fault())
    check(score(backend, [[1, 2]]), [[1, 2]])
    wait_until(lambda: "is back" in caplog.text)
    assert "The gateway goes on" in caplog.text
    assert {record.levelname for record in caplog.records} <= {"INFO", "WARNING"}
    engine.models = ["other"]
    wait_until(lambda: "--model-version" in caplog.text)
    assert caplog.records[-1].levelname == "ERROR"
    engine.models = ["m"]
    looks = engine.looks
    wait_until(lambda: engine.looks > looks + 2)
    assert "--model-version" in backend.find_fault(), "nobody knows what its weights are after that"


def test_fault_where_weights_changed(engine: FormulaEngine, open_backend: OpenBackend) -> None:
    backend = open_backend()
    engine.weight_version = "step-100"
    with pytest.raises(RequestError, match="step-100") as changed:
        score(backend, [[1, 2]])
    assert changed.value.code.name == "UNAVAILABLE"
    assert "step-100" in backend.find_fault()


def test_fault_where_other_weights_come_back(engine: FormulaEngine, open_backend: OpenBackend) -> None:
    """Nothing but what the engine answers about a prompt says so."""
    backend = open_backend()
    first, engine.healthy = engine.predict, False
    wait_until(backend.find_fault)
    engine.predict, engine.healthy = lambda tokens: np.roll(first(tokens), 1, axis=-1), True
    wait_until(lambda: "the same prompt" in backend.find_fault())
    engine.predict = first
    with pytest.raises(RequestError, match="--model-version"):
        score(backend, [[1, 2]])


@pytest.mark.parametrize("scale_out", [True, False])
def test_fallback_of_a_router(engine: FormulaEngine, open_backend: OpenBackend, scale_out: bool) -> None:
    """Another model's answer is no label, whatever its values; the teacher is back with the model of the start."""
    engine.scale_out = scale_out
    engine.answering = "m-r1"  # an alias of a router is no fault
    backend = open_backend()
    check(score(backend, [[1, 2]]), [[1, 2]])
    first = engine.predict
    engine.predict, engine.answering = lambda tokens: np.roll(first(tokens), 1, axis=-1), "spare"
    with pytest.raises(RequestError, match=r"'spare'.*'m-r1'") as refused:
        score(backend, [[1, 2]])
    assert refused.value.code.name == "UNAVAILABLE"
    looks = engine.looks
    wait_until(lambda: engine.looks > looks + 3)
    assert "'spare'" in backend.find_fault()
    engine.predict, engine.answering = first, "m-r1"
    wait_until(lambda: not backend.find_fault())
    check(score(backend, [[1, 2]]), [[1, 2]])


@pytest.mark.parametrize(
    ("state", "asked", "words"),
    [
        ({}, {"k": 64}, r"--max-logprobs 64.*--top-k 20"),
        ({"models": ["a", "b"]}, {"exact": False}, r"'a', 'b'.*--engine-model"),
        ({"models": ["./path"]}, {}, "--engine-model"),
        ({"healthy": False}, {"wait_s": 0.0}, "--engine-wait"),
        ({"answer": {"choices": [{"text": "x", "prompt_logprobs": None}]}}, {}, "does not give log-probabilities"),
        ({"answer": {}}, {}, "does not give log-probabilities"),
    ],
)
def test_start_says_what_to_change(
    engine: FormulaEngine, state: dict[str, Any], asked: dict[str, Any], words: str
) -> None:
    vars(engine).update(state, scale_out="answer" not in state)
    if "answer" in state:
        engine.failure = lambda path, number: (200, state["answer"]) if path == "/v1/completions" else None
    with pytest.raises(SettingsError, match=words):
        facts_of(reach(engine), **asked)
    if "models" in state:
        engine.models = ["./path"]
        assert facts_of(reach(engine), exact=False).model == "./path", "its only model, whatever its name is"
