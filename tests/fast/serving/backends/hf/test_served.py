"""Models of transformers behind a server: labels are those of transformers in process, whoever else asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.protocol import names
from edl.tokenizer_hash import hash_tokenizer
from edl_serving import Array
from tests.fast.serving.backends.hf.checkpoints import VOCABULARY
from tests.fast.serving.backends.hf.test_oracle import assert_agrees, load, oracle, tokens
from tests.fast.serving.conftest import TIMEOUT_S, Client, Inside, outputs_of, request_bytes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Folder = Callable[[str], Path]


def inputs_of(found: list[Array]) -> dict[str, Array]:
    position = np.concatenate([np.arange(len(ids), dtype=np.int32) for ids in found])
    return {"ids": np.concatenate(found).astype(np.int32), "position": position}


@pytest.fixture(scope="module")
def llama(checkpoint: Folder) -> Path:
    (checkpoint("llama") / "vocab.txt").write_text("a\nb\n")  # stands for a tokenizer
    return checkpoint("llama")


@pytest.fixture(scope="module")
def teacher(llama: Path) -> Iterator[Inside]:
    served = Inside(load(llama, "causal-lm", top_k=16, max_tokens=40), max_batch_rows=40)
    yield served
    served.close()


def infer(teacher: Inside, inputs: dict[str, Array], **parameters: Any) -> dict[str, Array]:
    with contextlib.closing(Client(teacher.target)) as client:
        answer = client.infer_bytes(request_bytes(inputs, **parameters), timeout=TIMEOUT_S)
    return {name: array.copy() for name, array in outputs_of(answer).items()}


def test_it_answers_as_transformers(teacher: Inside, llama: Path) -> None:
    inputs = tokens((30, 12, 40, 1, 17))  # more than a batch of 40
    targets = np.arange(200, dtype=np.int32).reshape(100, 2) % VOCABULARY
    logits = oracle(llama, "AutoModelForCausalLM", inputs)
    answer = infer(teacher, {**inputs, "targets": targets}, edl_top_k=8, edl_temperature=2.0)
    parts = [answer[name] for name in names.top_k_names("logprobs")]
    assert_agrees({"logprobs": parts}, logits, 8, 2.0)
    expected = np.take_along_axis(logits.log_softmax(-1).numpy(), targets.astype(np.int64), 1)
    np.testing.assert_allclose(answer["target_logprobs"], expected, rtol=0, atol=1e-4)
    half = infer(teacher, inputs, edl_top_k=3, edl_dtype="FP16")["logprobs__topk_values"]
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, parts[1][:, :3], rtol=1e-3)


def test_students_find_the_limits(teacher: Inside, llama: Path) -> None:
    config = teacher.server.model.config().config
    said = {name: parameter.string_value for name, parameter in config.parameters.items()}
    expected = {"edl_sequences": "position", "edl_max_sequence": "40", "edl_max_top_k": "16", "edl_max_rows": "1024"}
    assert expected.items() <= said.items()
    assert config.max_batch_size == 40
    assert teacher.server.model.instance_meta["tokenizer"] == said["edl_tokenizer"] == hash_tokenizer(llama)
