"""Models of transformers behind a server: labels are those of transformers in process, whoever else asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader
from edl.protocol import names
from edl.tokenizer_hash import hash_tokenizer
from edl_serving import Array
from tests.fast.serving.backends.hf.checkpoints import VOCABULARY
from tests.fast.serving.backends.hf.test_oracle import assert_agrees, load, oracle, sequences, tokens
from tests.fast.serving.conftest import TIMEOUT_S, Client, Inside, StartInside, outputs_of, request_bytes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Folder = Callable[[str], Path]


def some_sequences(count: int, seed: int) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCABULARY, random.integers(1, 48)) for _ in range(count)]


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


def test_three_students_share_batches(checkpoint: Folder, inside: StartInside) -> None:
    """Of different k, and the third one at another temperature."""
    server = inside(load(checkpoint("gpt2"), "causal-lm", max_tokens=256, packing=True), max_batch_rows=256)
    count = 12
    asked = [
        (some_sequences(count, seed), k, temperature)
        for seed, k, temperature in ((1, 8, 1.0), (2, 3, 1.0), (3, 5, 2.0))
    ]
    answers: list[list[Any]] = [[] for _ in asked]
    with contextlib.ExitStack() as stack:
        epochs = []
        for found, k, temperature in asked:
            reader = DistillReader(["ids"], ["logprobs"], teachers=server.target, top_k=k, temperature=temperature)
            reader.set_sequence_generator(lambda found=found: [(ids,) for ids in found])
            epochs.append(stack.enter_context(reader)())
        for _ in range(count):  # in turns, so that all of them have requests under way
            for epoch, labels in zip(epochs, answers, strict=True):
                labels.append(next(epoch)[1])
    for (found, k, temperature), labels in zip(asked, answers, strict=True):
        parts = [np.concatenate([getattr(label, name) for label in labels]) for name in ("ids", "values", "tail_lse")]
        logits = oracle(checkpoint("gpt2"), "AutoModelForCausalLM", inputs_of(found))
        assert_agrees({"logprobs": parts}, logits, k, temperature)


def test_texts_are_samples(checkpoint: Folder, inside: StartInside) -> None:
    server = inside(load(checkpoint("classifier"), "sequence-classification", max_tokens=128), max_batch_rows=16)
    texts = some_sequences(25, 5)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint("classifier")).eval()
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=ids).logits for ids in sequences(inputs_of(texts))])
    with DistillReader(["ids"], ["logits"], teachers=server.target, teacher_batch_size=7) as reader:
        reader.set_sample_generator(lambda: [(ids.astype("<i4").tobytes(),) for ids in texts])
        found = np.stack([logits for _, logits in reader()])
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-4)
