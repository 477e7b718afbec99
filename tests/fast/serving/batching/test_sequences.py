"""Rows that are tokens of sequences, and models that compute the largest values of an output themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import SettingsError
from edl.protocol import kserve, names
from edl.protocol.tensors import split_top_k
from edl_serving import Array, Backend, TensorSpec
from edl_serving.backends.backend import TopKArrays
from edl_serving.batching.batch_queue import InferenceJob
from edl_serving.request import check_sequences
from edl_serving.request_error import RequestError, invalid_argument
from edl_serving.request_plan import cut_top_k, plan_request
from tests.fast.distill.sequences.language_model import PrefixModel
from tests.fast.serving import fakes
from tests.fast.serving.conftest import outputs_of
from tests.fast.serving.fakes import refusal_of

VOCABULARY = 11


def logprobs_of(ids: Array, position: Array) -> Array:
    """Log-probabilities that depend on the token, and on where it stands."""
    logits = np.sin(ids[:, None] * 3.1 + position[:, None] * 1.7 + np.arange(VOCABULARY) * 0.9) * 4
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


class LanguageModel(PrefixModel):
    """Answers `logprobs_of`, by their largest values, and remembers the batches that it was given."""

    def __init__(self, max_top_k: int | None = 5, max_sequence: int | None = None) -> None:
        super().__init__(max_top_k, max_sequence)
        self._model = lambda inputs: {"logprobs": logprobs_of(inputs["ids"], inputs["position"])}  # type: ignore[assignment]
        self.batches: list[Mapping[str, Array]] = []
        self.ks: list[int] = []

    outputs = (TensorSpec("logprobs", "FP32", (VOCABULARY,)), TensorSpec("target_logprobs", "FP32", (-1,)))
    warm_up = Backend.warm_up

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        if inputs["ids"].max() >= VOCABULARY:
            raise invalid_argument("input 'ids': no such token")

    def predict_top_k(self, inputs: Mapping[str, Array], k: int, temperature: float) -> Mapping[str, Any]:
        self.batches.append({name: array.copy() for name, array in inputs.items()})
        self.ks.append(k)
        if (inputs["ids"] == 7).any():
            raise invalid_argument("token 7 is refused late")
        return super().predict_top_k(inputs, k, temperature)


class Bench(fakes.Bench):
    """A language model behind an executor."""

    def __init__(self, backend: LanguageModel | None = None, **settings: Any) -> None:
        self.backend = backend or LanguageModel()
        super().__init__(self.backend, **settings)

    def job(self, inputs: Mapping[str, Array], deadline: float = math.inf, **parameters: Any) -> InferenceJob:
        return super().job(inputs, deadline, **{"edl_top_k": 3, **parameters})

    def run(self, *jobs: InferenceJob) -> list[Any]:
        answers = super().run(*jobs)
        return [answer if isinstance(answer, RequestError) else outputs_of(answer) for answer in answers]


def tokens(*lengths: int, seed: int = 0) -> dict[str, Array]:
    """Sequences of these lengths, of tokens below 7."""
    ids = np.random.default_rng(seed).integers(0, 7, sum(lengths)).astype(np.int32)
    return {"ids": ids, "position": np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])}


def assert_top_k(answer: dict[str, Array], inputs: Mapping[str, Array], k: int, temperature: float = 1.0) -> None:
    ids, values, tail = split_top_k(logprobs_of(inputs["ids"], inputs["position"]), k, temperature)
    found = [answer[name] for name in names.top_k_names("logprobs")]
    np.testing.assert_array_equal(found[1], values)
    np.testing.assert_allclose(found[2], tail, rtol=1e-5)
    np.testing.assert_array_equal(np.sort(found[0]), np.sort(ids))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(9, 40))
def test_parts_end_between_sequences(lengths: list[int], max_batch_rows: int) -> None:
    bench = Bench(max_batch_rows=max_batch_rows)
    inputs = tokens(*lengths)
    (answer,) = bench.run(bench.job(inputs))
    assert_top_k(answer, inputs, 3)
    for batch in bench.backend.batches:
        assert len(batch["ids"]) <= max_batch_rows
        check_sequences("position", batch["position"], 9)
    positions = np.concatenate([batch["position"] for batch in bench.backend.batches])
    np.testing.assert_array_equal(positions, inputs["position"])


def test_clients_share_a_batch_with_own_k() -> None:
    bench = Bench()
    asked = [(tokens(4, 2, seed=1), 2), (tokens(3, seed=2), 5), (tokens(1, 1, seed=3), 1)]
    answers = bench.run(*[bench.job(inputs, edl_top_k=k, edl_temperature=2.0) for inputs, k in asked])
    assert (len(bench.backend.batches), bench.backend.ks) == (1, [5])
    for answer, (inputs, k) in zip(answers, asked, strict=True):
        assert_top_k(answer, inputs, k, 2.0)
    assert bench.job(inputs).shapes == bench.job(inputs, edl_top_k=5).shapes
    assert bench.job(inputs).shapes != bench.job(inputs, edl_temperature=2.0).shapes, "temperatures do not share"


def test_targets_are_optional() -> None:
    bench = Bench()
    inputs = tokens(4, 2)
    targets = np.arange(12, dtype=np.int32).reshape(6, 2) % VOCABULARY
    with_targets = bench.job({**inputs, "targets": targets})
    assert with_targets.shapes != bench.job(inputs).shapes
    (answer,) = bench.run(with_targets)
    assert_top_k(answer, inputs, 3)
    whole = logprobs_of(inputs["ids"], inputs["position"])
    np.testing.assert_array_equal(answer["target_logprobs"], np.take_along_axis(whole, targets, -1))
    (half,) = bench.run(bench.job({**inputs, "targets": targets}, edl_dtype="FP16"))
    found = [half[name].dtype for name in (*names.top_k_names("logprobs"), "target_logprobs")]
    assert found == [np.int32, np.float16, np.float32, np.float32], "students sum targets up, and leave of 1 the rest"
    (plain,) = bench.run(bench.job(inputs))
    assert set(plain) == set(names.top_k_names("logprobs"))


def test_an_output_without_its_input() -> None:
    bench = Bench()
    header = kserve.ModelInferRequest(model_name="m")
    for name, array in tokens(2).items():
        header.inputs.add(name=name, datatype="INT32", shape=array.shape)
    header.outputs.add(name="target_logprobs")
    said = refusal_of(lambda: plan_request(header, bench.model, 100))
    assert said == "output 'target_logprobs' comes with input 'targets', which was not sent"


def test_a_late_refusal_is_one_clients() -> None:
    bench = Bench()
    bad = tokens(3)
    bad["ids"][1] = 7
    good = tokens(2, 2, seed=4)
    refused, answer = bench.run(bench.job(bad), bench.job(good))
    assert (refused.code.name, refused.message) == ("INVALID_ARGUMENT", "token 7 is refused late")
    assert_top_k(answer, good, 3)


@pytest.mark.parametrize(
    ("position", "said"),
    [
        ([1, 2], "is 1 in row 0"),
        ([0, 1, 3], "is 3 in row 2, after 1"),
        ([0, 2**31 - 1, -(2**31)], "is 2147483647 in row 1, after 0"),
        ([0, 0, 1, 2, 3, 4], "sequence that begins in row 1 has 5 rows, but at most 4"),
    ],
)
def test_rows_that_are_no_sequences(position: list[int], said: str) -> None:
    assert said in refusal_of(lambda: check_sequences("position", np.array(position, np.int32), 4))


def test_positions_must_be_an_input() -> None:
    class Wrong(LanguageModel):
        sequence_input = "positions"  # type: ignore[assignment]

    with pytest.raises(SettingsError, match="no input 'positions'"):
        Bench(Wrong())


def test_warm_up_calls_the_top_k() -> None:
    backend = LanguageModel()
    backend.warm_up(8)
    assert [len(batch["ids"]) for batch in backend.batches] == [1, 8]
    assert "targets" not in backend.batches[0]


@settings(max_examples=40)
@given(st.integers(1, 11), st.data(), st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 100))
def test_a_smaller_k_is_cut_exactly(larger: int, data: st.DataObject, temperature: float, seed: int) -> None:
    smaller = data.draw(st.integers(1, larger))
    logits = np.random.default_rng(seed).normal(0, 8, (4, 11)).astype(np.float32)
    logits[0, :3] = -np.inf  # masked classes
    cut = cut_top_k(TopKArrays(*split_top_k(logits, larger, temperature)), smaller, temperature)
    direct = split_top_k(logits, smaller, temperature)
    np.testing.assert_array_equal(cut.ids[1:], direct[0][1:])
    np.testing.assert_array_equal(cut.values, direct[1])
    np.testing.assert_allclose(cut.tail, direct[2], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("parameters", [{}, {"edl_top_k": 5, "edl_temperature": 2.0}, {"edl_dtype": "FP16"}])
def test_a_queue_counts_answers(parameters: dict[str, Any]) -> None:
    bench = Bench(max_batch_rows=8)
    plain = tokens(4, 7, 3)
    for inputs in (plain, {**plain, "targets": np.zeros((14, 3), np.int32)}):
        job = bench.job(inputs, **parameters)
        (answer,) = bench.run(bench.job(inputs, **parameters))
        assert job.nbytes == sum(array.nbytes for array in answer.values()) == job.request.plan.answer_bytes
