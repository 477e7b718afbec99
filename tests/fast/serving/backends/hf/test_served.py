"""`edl serve --hf` as a process, asked over KServe v2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from edl.discovery import open_registry
from edl.protocol import names
from edl.testing import LocalTeacher
from edl.tokenizer_hash import hash_tokenizer
from edl_serving import Array
from tests.fast.serving.backends.hf.checkpoints import VOCABULARY
from tests.fast.serving.backends.hf.test_oracle import assert_agrees, oracle, tokens
from tests.fast.serving.conftest import Client, outputs_of, request_bytes

pytest.importorskip("transformers")

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def teacher(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTeacher]:
    folder = checkpoint("llama")
    (folder / "vocab.txt").write_text("a\nb\n")  # stands for a tokenizer
    discovery = f"sqlite:///{tmp_path_factory.mktemp('hf')}/d.db"
    serve: dict[str, Any] = {"hf": str(folder), "task": "causal-lm", "top-k": 16, "max-tokens": 40, "threads": 1}
    serve |= {"dtype": "float32", "device": "cpu", "canary": "1s"}
    with LocalTeacher("", serve=serve, service="lm", discovery=discovery, timeout_s=110) as teacher:
        teacher.discovery = discovery  # type: ignore[attr-defined]
        yield teacher


def infer(teacher: LocalTeacher, inputs: dict[str, Array], **parameters: Any) -> dict[str, Array]:
    client = Client(teacher.endpoint)
    try:
        answer = client.infer_bytes(request_bytes(inputs, **parameters), timeout=DEADLINE_S)
        return {name: array.copy() for name, array in outputs_of(answer).items()}
    finally:
        client.close()


def test_it_answers_as_transformers(teacher: LocalTeacher, checkpoint: Callable[[str], Path]) -> None:
    inputs = tokens((30, 12, 40, 1, 17))  # more than a batch of 40
    logits = oracle(checkpoint("llama"), "AutoModelForCausalLM", inputs)
    answer = infer(teacher, inputs, edl_top_k=8, edl_temperature=2.0)
    parts = [answer[name] for name in names.top_k_names("logprobs")]
    assert_agrees({"logprobs": parts}, logits, 8, 2.0)
    half = infer(teacher, inputs, edl_top_k=3, edl_dtype="FP16")["logprobs__topk_values"]
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, parts[1][:, :3], rtol=1e-3)


def test_targets_are_answered(teacher: LocalTeacher, checkpoint: Callable[[str], Path]) -> None:
    inputs = tokens((5, 6))
    targets = np.arange(22, dtype=np.int32).reshape(11, 2)
    found = infer(teacher, {**inputs, "targets": targets}, edl_top_k=1)["target_logprobs"]
    expected = oracle(checkpoint("llama"), "AutoModelForCausalLM", inputs).log_softmax(-1).numpy()
    np.testing.assert_allclose(found, np.take_along_axis(expected, targets.astype(np.int64), 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "parameters", "said"),
    [
        ({}, {}, "'logprobs' has 97 values a row and is never sent whole"),
        ({}, {"edl_top_k": 17}, "edl_top_k=17: this server computes 16 at most"),
        ({"ids": np.full(4, VOCABULARY, np.int32)}, {"edl_top_k": 2}, "'ids' is 97 in row 0"),
        ({"position": np.arange(1, 5, dtype=np.int32)}, {"edl_top_k": 2}, "a request holds whole sequences"),
    ],
)
def test_what_is_refused(teacher: LocalTeacher, changed: dict[str, Array], parameters: Any, said: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        infer(teacher, {**tokens((4,)), **changed}, **parameters)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in refused.value.details()


def test_students_find_the_limits(teacher: LocalTeacher, checkpoint: Callable[[str], Path]) -> None:
    client = Client(teacher.endpoint)
    config = client.ask("ModelConfig", name="m").config
    client.close()
    said = {name: parameter.string_value for name, parameter in config.parameters.items()}
    expected = {"edl_sequences": "position", "edl_max_sequence": "40", "edl_max_top_k": "16", "edl_max_rows": "1024"}
    assert expected.items() <= said.items()
    assert config.max_batch_size == 40
    with open_registry(teacher.discovery) as registry:  # type: ignore[attr-defined]
        (instance,) = registry.snapshot("lm").instances
    assert instance.meta["tokenizer"] == said["edl_tokenizer"]
    assert instance.meta["tokenizer"] == hash_tokenizer(checkpoint("llama"))
