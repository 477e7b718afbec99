"""Students of models of transformers: labels are those of transformers in process, whoever else asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Scorer
from edl_serving import Array
from tests.fast.serving.backends.hf.checkpoints import VOCABULARY
from tests.fast.serving.backends.hf.test_oracle import assert_agrees, load, oracle, sequences
from tests.fast.serving.conftest import StartInside

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Folder = Callable[[str], Path]
WAIT_S = 60.0


def some_sequences(count: int, seed: int) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCABULARY, random.integers(1, 48)) for _ in range(count)]


def inputs_of(found: list[Array]) -> dict[str, Array]:
    position = np.concatenate([np.arange(len(ids), dtype=np.int32) for ids in found])
    return {"ids": np.concatenate(found).astype(np.int32), "position": position}


@pytest.mark.parametrize("packing", [False, True])
def test_two_students_share_batches(checkpoint: Folder, inside: StartInside, packing: bool) -> None:
    """Of different k, and a third one at another temperature."""
    backend = load(checkpoint("gpt2"), "causal-lm", max_tokens=256, packing=packing)
    server = inside(backend, max_batch_rows=256)
    asked = [
        (some_sequences(40, seed), k, temperature) for seed, k, temperature in ((1, 8, 1.0), (2, 3, 1.0), (3, 5, 2.0))
    ]
    answers: list[list[Any]] = [[] for _ in asked]
    with contextlib.ExitStack() as stack:
        epochs = []
        for found, k, temperature in asked:
            reader = DistillReader(["ids"], ["logprobs"], teachers=server.target, top_k=k, temperature=temperature)
            reader.set_sequence_generator(lambda found=found: [(ids,) for ids in found])
            epochs.append(stack.enter_context(reader)())
        for _ in range(40):  # in turns, so that all of them have requests under way
            for epoch, labels in zip(epochs, answers, strict=True):
                labels.append(next(epoch)[1])
    for (found, k, temperature), labels in zip(asked, answers, strict=True):
        inputs = inputs_of(found)
        parts = [np.concatenate([getattr(label, name) for label in labels]) for name in ("ids", "values", "tail_lse")]
        logits = oracle(checkpoint("gpt2"), "AutoModelForCausalLM", inputs)
        assert_agrees({"logprobs": parts}, logits, k, temperature)


def test_a_scorer_gets_targets(checkpoint: Folder, inside: StartInside) -> None:
    server = inside(load(checkpoint("llama"), "causal-lm", max_tokens=128), max_batch_rows=128)
    found = some_sequences(20, 4)
    targets = [np.random.default_rng(len(ids)).integers(0, VOCABULARY, (len(ids), 2)) for ids in found]
    expected = oracle(checkpoint("llama"), "AutoModelForCausalLM", inputs_of(found)).log_softmax(-1).numpy()
    with Scorer(server.target, top_k=4, targets=True) as scorer:
        logprobs = np.concatenate([part for _, part in scorer.score(found, targets=targets).result(WAIT_S)])
    wanted = np.take_along_axis(expected, np.concatenate(targets), 1)
    np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=1e-4)


def test_texts_are_samples(checkpoint: Folder, inside: StartInside) -> None:
    server = inside(load(checkpoint("classifier"), "sequence-classification", max_tokens=128), max_batch_rows=16)
    texts = some_sequences(50, 5)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint("classifier")).eval()
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=ids).logits for ids in sequences(inputs_of(texts))])
    with DistillReader(["ids"], ["logits"], teachers=server.target, teacher_batch_size=7) as reader:
        reader.set_sample_generator(lambda: [(ids.astype("<i4").tobytes(),) for ids in texts])
        found = np.stack([logits for _, logits in reader()])
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-4)
