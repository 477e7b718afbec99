"""A stand-in for a language model as a backend, sequences of random tokens, and how its labels are told to be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edl.protocol.tensors import split_top_k
from edl.testing.models import prefix_scores, prefix_scores_of
from edl_serving import Array, Backend, TensorSpec
from edl_serving.backends.backend import TopKArrays

VOCABULARY = 31


class PrefixModel(Backend):
    """Answers `prefix_scores_of` by the largest values, and, for `targets`, theirs."""

    def __init__(
        self, max_top_k: int | None = 8, max_sequence: int | None = None, tokenizer: str = "sha256:ab"
    ) -> None:
        self.max_top_k, self.max_sequence = max_top_k, max_sequence
        self.instance_meta = {"tokenizer": tokenizer}
        self._model = prefix_scores(VOCABULARY)

    inputs = (TensorSpec("ids", "INT32"), TensorSpec("position", "INT32"), TensorSpec("targets", "INT32", (-1,)))  # type: ignore[assignment]
    outputs = (TensorSpec("logprobs", "FP32", (VOCABULARY,)), TensorSpec("target_logprobs", "FP32", (-1,)))  # type: ignore[assignment]
    optional_outputs = {"target_logprobs": "targets"}  # type: ignore[assignment]
    sequence_input = "position"  # type: ignore[assignment]
    max_top_k: int | None = None
    max_sequence: int | None = None
    instance_meta: Mapping[str, str] = {}

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        raise AssertionError("whole outputs are never computed")

    def warm_up(self, max_rows: int) -> None: ...

    def predict_top_k(self, inputs: Mapping[str, Array], k: int, temperature: float) -> Mapping[str, Any]:
        whole = self._model(inputs)["logprobs"]
        answers: dict[str, Any] = {"logprobs": TopKArrays(*split_top_k(whole, k, temperature))}
        if "targets" in inputs:
            answers["target_logprobs"] = np.take_along_axis(whole, inputs["targets"], -1)
        return answers


class NegativeModel(PrefixModel):
    """Answers minus what the other one does."""

    def __init__(self) -> None:
        super().__init__()
        model = self._model
        self._model = lambda inputs: {name: -array for name, array in model(inputs).items()}  # type: ignore[assignment]


def sequences(count: int, longest: int = 60, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 50_000, random.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


def check_labels(ids: Any, labels: Any, k: int = 4, sign: int = 1) -> None:
    """Check that these are the k largest values at each token of this sequence; of `NegativeModel` with sign -1."""
    whole = sign * prefix_scores_of(ids, VOCABULARY)
    assert labels.ids.shape == (len(ids), k)
    assert labels.values.tolist() == (-np.sort(-whole, axis=1)[:, :k]).tolist()
    assert np.take_along_axis(whole, labels.ids.astype(int), 1).tolist() == labels.values.tolist()


def check_batch(ids: Any, mask: Any, labels: Any, k: int = 4, signs: Any = None) -> None:
    """Check the labels of a padded batch of tensors, row by row: zeros where the mask has none."""
    mask = mask.bool()
    assert labels.ids.shape == labels.values.shape == (*mask.shape, k)
    for part in (labels.ids, labels.values, labels.tail_lse):
        assert not part[~mask].any(), "what is padded has no label"
    for row, kept in enumerate(mask):
        if kept.any():
            own = labels.map(lambda part, row=row, kept=kept: part[row][kept].numpy())
            check_labels(ids[row][kept].numpy(), own, k, 1 if signs is None else signs[row])
