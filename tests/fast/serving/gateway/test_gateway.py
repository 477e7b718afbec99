"""The gateway before a small engine with a formula, its rows from answers that engines have given, and as a process."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from edl.errors import SettingsError
from edl.protocol import names
from edl.tokenizer_hash import hash_tokenizer
from edl_serving.backends.backend import TopKArrays
from edl_serving.gateway.backend import EngineHealth, GatewayBackend
from edl_serving.gateway.command import GatewayConfig
from edl_serving.gateway.endpoints import (
    CompletionsEndpoint,
    EngineAnswerError,
    GenerateEndpoint,
    ScoringEndpoint,
    SGLangEndpoint,
    top_k_rows,
)
from edl_serving.gateway.engine import (
    EngineAccess,
    EngineAddress,
    EngineConnection,
    EngineFacts,
    find_facts,
    names_engine,
)
from edl_serving.request_error import RequestError
from tests.fast.serving.gateway.conftest import Gateways, ask, inputs_of
from tests.fast.serving.gateway.formula_engine import MAX_MODEL_LEN, FormulaEngine, log_probabilities
from tests.waiting import DEADLINE_S, wait_until

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
        return stack.enter_context(closing(GatewayBackend(health, "r1")))

    return open_


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
        ({"ids": np.array([1, -5], np.int32)}, 1.0, "row 1: not a token id"),
        ({"targets": np.array([[3], [4]], np.int32)}, 1.0, "'targets' is 3 in row 0, but the next token is 2"),
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
    key.chmod(0o600)
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


def test_full_engine_is_lost_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue of connections is full: no answer was ever asked for."""
    monkeypatch.setattr("edl_serving.gateway.engine._CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        port = full.getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))

        async def post() -> None:
            connection = EngineConnection(EngineAccess(EngineAddress("vllm", "127.0.0.1", port), timeout_s=60.0))
            try:
                await connection.post("/v1/completions", {}, 100)
            finally:
                await connection.close()

        with pytest.raises(RequestError, match=r"accepted no connection within 0\.1 s") as caught:
            asyncio.run(post())
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "engine-lost")


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
    assert "The gateway keeps running" in caplog.text
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


VLLM = json.loads(Path(__file__).with_name("recorded_vllm.json").read_text())
SGLANG = json.loads(Path(__file__).with_name("recorded_sglang.json").read_text())
PROMPT = [*VLLM["tokens"], VLLM["tokens"][0]]
BOTH = [(GenerateEndpoint(), "generate"), (CompletionsEndpoint(), "completions")]


def answer_of(name: str) -> Any:
    return copy.deepcopy(VLLM[name]["body"])


def positions_of(answer: Any) -> list[Any]:
    return answer["prompt_logprobs"] if "prompt_logprobs" in answer else answer["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize(("endpoint", "name"), BOTH)
def test_vllm_rows_are_those_of_transformers(endpoint: ScoringEndpoint, name: str) -> None:
    rows, _ = endpoint.read(answer_of(name), PROMPT, 3)
    expected = VLLM["transformers"]  # of the sequence alone, without the token behind it
    assert rows.ids.tolist() == expected["ids"]
    np.testing.assert_allclose(rows.values, expected["values"], atol=1e-5)
    np.testing.assert_allclose(rows.tail, expected["tail"], atol=1e-5)


SPOIL: list[Callable[[list[Any]], object]] = [
    lambda positions: positions.append(positions.pop(1)),
    lambda positions: positions.pop(),
    lambda positions: positions.__setitem__(2, None),
    lambda positions: (positions[2].pop("946"), positions[2].pop("373")),
    lambda positions: positions[2].update({"1": {"logprob": -9.0}, "2": {"logprob": -9.0}}),
    lambda positions: positions[2].update(word=positions[2].pop("946")),
    lambda positions: positions[2]["946"].update(logprob="high"),
    lambda positions: positions[2]["946"].update(logprob=None),
    lambda positions: positions[2].update({"946": -1.5}),
    lambda positions: positions[2].update({"0946": positions[2].pop("373")}),
    lambda positions: positions[2].update({"5": {"logprob": -90.0}}),  # longer by a token that is not the prompt's
]


@pytest.mark.parametrize(("endpoint", "name"), BOTH)
def test_spoiled_answers_are_refused(endpoint: ScoringEndpoint, name: str) -> None:
    for number, spoil in enumerate(SPOIL):
        answer = answer_of(name)
        spoil(positions_of(answer))
        with pytest.raises(EngineAnswerError):
            pytest.fail(f"{number}: {endpoint.read(answer, PROMPT, 3)}")


def read_sglang(change: Callable[[Any], object] = lambda meta: None) -> TopKArrays:
    answer = copy.deepcopy(SGLANG["answer"])
    change(answer["meta_info"])
    return SGLangEndpoint().read(answer, [6722, 315, 9625, 374], 3)[0]


def test_sglang_rows() -> None:
    body = SGLangEndpoint().body("m", [1, 2], 5)
    assert (body["logprob_start_len"], body["top_logprobs_num"], body["return_logprob"]) == (0, 5, True)
    rows = read_sglang()
    assert rows.ids.tolist() == [[315, 3283, 374], [279, 9625, 5616], [13, 58883, 11]]
    assert rows.values[0].tolist() == [-0.58203125, -2.140625, -3.765625]
    np.testing.assert_allclose(np.exp(rows.tail) + np.exp(rows.values).sum(-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("input_top_logprobs"),
        lambda meta: meta["input_top_logprobs"].pop(),
        lambda meta: meta["input_top_logprobs"][1].pop(),
        lambda meta: meta["input_token_logprobs"].reverse(),
        lambda meta: meta["input_top_logprobs"][2].append([-9.0]),
        lambda meta: meta["input_top_logprobs"].__setitem__(2, None),
        lambda meta: meta["input_top_logprobs"].append(meta["input_top_logprobs"].pop(1)),
        lambda meta: meta["input_token_logprobs"][3].__setitem__(0, -0.01),
    ],
)
def test_spoiled_sglang_is_refused(change: Callable[[Any], object]) -> None:
    with pytest.raises(EngineAnswerError):
        read_sglang(change)


def test_tails_are_finite_and_not_cancelled() -> None:
    # 1 - p as a difference of float32 would be 0, and its logarithm -inf.
    tail = top_k_rows(np.array([[0]]), np.array([[math.log1p(-1e-6)]]), 1).tail
    assert float(np.exp(tail[0])) == pytest.approx(1e-6, rel=1e-5)
    rounded = top_k_rows(np.array([[0, 1]]), np.array([[math.log(1 - 1e-9), math.log(1e-9) + 1e-3]]), 2).tail
    assert 0 < float(np.exp(rounded[0])) <= 1.1e-9, "no token that is left out has more than the last one"
    # vLLM writes -inf as -9999.0, which JSON can hold.
    clamped = top_k_rows(np.array([[0, 1]]), np.array([[0.0, -9999.0]]), 2)
    assert np.isfinite(clamped.tail).all()
    assert clamped.values.tolist() == [[0.0, -9999.0]]


@pytest.mark.parametrize(
    ("ids", "values", "words"),
    [
        ([[1, 2]], [[math.nan, -1.0]], "not a number"),
        ([[1, 1]], [[-1.0, -1.0]], "twice"),
        ([[1, 2**31]], [[-1.0, -2.0]], "32 bits"),
        ([[1, -5]], [[-1.0, -2.0]], "position 1 has a token id below 0"),
        ([[1, -1, 7]], [[-1.0, -math.inf, -math.inf]], "fewer than 2 tokens with a probability"),
        ([[1, 2]], [[3.0, 2.0]], "--logprobs-mode"),
        ([[1, 2]], [[-0.1, -0.2]], "--logprobs-mode"),
    ],
)
def test_other_values_are_refused(ids: list[list[int]], values: list[list[float]], words: str) -> None:
    with pytest.raises(EngineAnswerError, match=words):
        top_k_rows(np.array(ids), np.array(values), 2)


GIVEN = {"model": "m", "model_version": "r1", "store": "none"}


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("vllm://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("sglang://host.example:30000/", "http://host.example:30000"),
        ("vllm+https://[::1]:8000", "https://[::1]:8000"),
        *(("vllm://", ""), ("vllm://host", ""), ("vllm://host:0", ""), ("vllm://host:70000", "")),
        *(("vllm://a@b:1", ""), ("vllm+http://h:1", ""), ("vllm://h:1/v1", "")),
    ],
)
def test_addresses(text: str, url: str) -> None:
    if url:
        assert names_engine(text)
        assert EngineAddress.parse(text).base_url == url
    else:
        with pytest.raises(SettingsError, match="vllm://host:port"):
            EngineAddress.parse(text)


def test_two_batches_are_in_flight() -> None:
    """And more than those may wait."""
    for given, sizes in (({}, (8192, 32768)), ({"max_tokens": 1000, "max_queue": 5000}, (500, 5000))):
        server = GatewayConfig.of("vllm://127.0.0.1:8000", {**GIVEN, **given}).server
        assert (server.max_batch_rows, server.max_queue_rows) == sizes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, "--service"),
        ({"model_version": None}, "--model-version"),
        ({"engine_ca": "ca.pem"}, r"vllm\+https://"),
        ({"max_tokens": 1}, "--max-tokens"),
        ({"engine_timeout": 0.0}, "--engine-timeout"),
        ({"tokenizer": "/nowhere/at/all"}, "--tokenizer"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, Any], words: str) -> None:
    given = {name: value for name, value in {**GIVEN, **change}.items() if value is not None}
    with pytest.raises(SettingsError, match=words):
        GatewayConfig.of("vllm://127.0.0.1:8000", given)


def test_token_file(tmp_path: Path) -> None:
    address = EngineAddress("vllm", "h", 1)
    path = tmp_path / "key"
    path.write_text(" key \nother\n")
    with pytest.raises(SettingsError, match=r"--engine-token-file.* every user"):
        EngineAccess(address, token_file=str(path)).read_token()
    path.chmod(0o600)
    assert EngineAccess(address, token_file=str(path)).read_token() == "key"
    for content in ("\n", "a\x00b", "\u00e9"):
        path.write_text(content)
        with pytest.raises(SettingsError, match="--engine-token-file"):
            EngineAccess(address, token_file=str(path)).read_token()


@pytest.mark.parametrize(
    ("endpoint", "more", "sent"),
    [
        ("vllm://10.0.0.9:8000", {}, False),
        ("vllm://10.0.0.9:8000", {"allow_insecure_tokens": True}, True),
        ("vllm+https://10.0.0.9:8000", {}, True),
        ("sglang://127.0.0.1:8000", {}, True),
    ],
)
def test_token_without_tls(endpoint: str, more: dict[str, Any], sent: bool) -> None:
    given = {**GIVEN, "engine_token_file": "key", **more}
    if sent:
        assert GatewayConfig.of(endpoint, given).engine.token_file == "key"
    else:
        with pytest.raises(SettingsError, match=r"without TLS.*vllm\+https"):
            GatewayConfig.of(endpoint, given)


def test_students_get_rows(engine: FormulaEngine, gateways: Gateways, tmp_path: Path) -> None:
    """And discovery follows the engine."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    address = f"vllm://127.0.0.1:{engine.port}"
    engine.healthy = False
    process = gateways.launch(address, "--top-k", "8", "--tokenizer", str(tokenizer), "--failures", "2")
    wait_until(lambda: "waiting for the engine" in gateways.log)
    engine.healthy = True
    (instance,) = gateways.wait_instances(1)
    assert instance.meta["version"] == "r1"
    assert instance.meta[names.TOKENIZER_META] == hash_tokenizer(tokenizer)
    check(TopKArrays(*ask(instance.endpoint, SEQUENCES, 8)), SEQUENCES)
    with tritonclient.grpc.InferenceServerClient(instance.endpoint) as client:
        parameters = client.get_model_config("m").config.parameters
    shown = {name: parameters[name].string_value for name in (names.SEQUENCES, names.MAX_TOP_K, names.MAX_SEQUENCE)}
    assert list(shown.values()) == ["position", "8", "62"]
    engine.healthy = False
    gateways.wait_instances(0)
    with pytest.raises(InferenceServerException) as away:
        ask(instance.endpoint, SEQUENCES, 8)
    assert away.value.status() == "StatusCode.UNAVAILABLE"
    engine.healthy = True
    gateways.wait_instances(1)
    assert len(ask(instance.endpoint, SEQUENCES, 8)[0]) == sum(map(len, SEQUENCES))
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0, gateways.log
    gateways.wait_instances(0)
