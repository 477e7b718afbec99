"""Answers that engines have really given: vLLM 0.32's as recorded here, what is published of SGLang's; their rows."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl_serving.backends.backend import TopKArrays
from edl_serving.gateway.endpoints import CompletionsEndpoint, GenerateEndpoint, ScoringEndpoint, SGLangEndpoint
from edl_serving.gateway.top_rows import EngineAnswerError, top_k_rows

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
    rows = endpoint.read(answer_of(name), PROMPT, 3)
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
    return SGLangEndpoint().read(answer, [6722, 315, 9625, 374], 3)


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
    ],
)
def test_spoiled_sglang_is_refused(change: Callable[[Any], object]) -> None:
    with pytest.raises(EngineAnswerError):
        read_sglang(change)


def test_own_token_beyond_k_is_cut() -> None:
    ids, values, tail = top_k_rows(np.array([[8, 1, 2], [1, 2, -1]]), np.log([[0.1, 0.6, 0.2], [0.6, 0.2, 1e-99]]), 2)
    assert ids.tolist() == [[1, 2], [1, 2]]
    assert (ids.dtype, values.dtype) == (np.int32, np.float32)
    np.testing.assert_allclose(values, np.log([[0.6, 0.2], [0.6, 0.2]]), rtol=1e-6)
    np.testing.assert_allclose(tail, np.log([0.2, 0.2]), rtol=1e-6)
    equal = top_k_rows(np.array([[9, 4, 6]]), np.array([[-2.0] * 3]), 2)
    assert equal.ids.tolist() == [[4, 6]], "those of equal values rise"


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
        ([[1, 2]], [[math.nan, -1.0]], "no number"),
        ([[1, 1]], [[-1.0, -1.0]], "twice"),
        ([[1, 2**31]], [[-1.0, -2.0]], "32 bits"),
        ([[1, -5]], [[-1.0, -2.0]], "position 1 has a token's id below 0"),
        ([[1, -1, 7]], [[-1.0, -math.inf, -math.inf]], "fewer than 2 tokens of a probability"),
        ([[1, 2]], [[3.0, 2.0]], "--logprobs-mode"),
        ([[1, 2]], [[-0.1, -0.2]], "--logprobs-mode"),
    ],
)
def test_other_values_are_refused(ids: list[list[int]], values: list[list[float]], words: str) -> None:
    with pytest.raises(EngineAnswerError, match=words):
        top_k_rows(np.array(ids), np.array(values), 2)
