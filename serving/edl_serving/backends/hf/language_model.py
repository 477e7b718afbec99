"""Language models: the log-probabilities of the next token, or of masked tokens, by their largest values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from edl.errors import SettingsError
from edl.protocol import names
from edl_serving.backends.backend import Array, TensorSpec, TopKArrays
from edl_serving.backends.hf import probes
from edl_serving.backends.hf.buckets import Bucket, make_buckets, make_packs, sequence_starts
from edl_serving.backends.hf.top_k import TopLogits, rows_of_slice, select_top_k
from edl_serving.backends.hf.transformers_backend import LoadedModel, TokenBackend

__all__ = ["LanguageModelBackend"]

_log = logging.getLogger(__name__)

_WHOLE_LOGITS_BYTES = 1 << 30
"""Of logits of one call where the head cannot be computed in slices."""


class LanguageModelBackend(TokenBackend):
    """A causal or masked language model.

    A sequence of T tokens is T rows; row t holds token t and the model's prediction of token t + 1 (of token t itself,
    of a masked language model).

    Args:
        loaded: the model.
        max_top_k: the largest k.
        causal: whether each token sees those before it alone.
        packing: compute sequences one behind the other, instead of padded to the length of similar ones.

    Raises:
        SettingsError: the model is not causal though it should be, or cannot be packed; k is above its vocabulary.
    """

    def __init__(self, loaded: LoadedModel, max_top_k: int, *, causal: bool, packing: bool) -> None:
        super().__init__(loaded)
        self._causal = causal
        self._packing = packing
        length = loaded.longest
        kind = type(loaded.model).__name__
        if causal and not probes.is_causal(self._model, self._vocabulary, length):
            raise SettingsError(f"--hf: {kind} lets tokens see those that follow: serve it with --task masked-lm")
        if packing and not (causal and probes.keeps_packed_apart(self._model, self._vocabulary, length)):
            raise SettingsError(
                f"--packing: {kind} does not keep packed sequences apart by their positions: leave the flag out, and "
                "sequences of similar length are computed together"
            )
        self._plain_head = causal and probes.has_plain_head(self._model, self._vocabulary, length)
        with self._computing():
            ids = probes.sample_ids(self._vocabulary, 1)[None].to(self._device)
            logits = self._model(input_ids=ids).logits
        self._classes = int(logits.shape[-1])
        self._max_tokens = loaded.max_tokens
        if not self._plain_head:
            per_token = self._classes * logits.element_size()
            self._max_tokens = min(loaded.max_tokens, max(1, _WHOLE_LOGITS_BYTES // per_token))
            _log.info("%s changes logits behind its head: %d tokens a call at most", kind, self._max_tokens)
        self._max_top_k = min(max_top_k, self._classes)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Token ids, positions, and ids whose log-probabilities are asked for."""
        return (*super().inputs, TensorSpec(names.TARGETS, "INT32", (-1,)))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Log-probabilities of the vocabulary, and of the targets."""
        return (
            TensorSpec(names.LOGPROBS, "FP32", (self._classes,)),
            TensorSpec(names.TARGET_LOGPROBS, "FP32", (-1,)),
        )

    @property
    def optional_outputs(self) -> Mapping[str, str]:
        """Log-probabilities of targets come with targets."""
        return {names.TARGET_LOGPROBS: names.TARGETS}

    @property
    def max_top_k(self) -> int:
        """What was given, or the vocabulary if that is less."""
        return self._max_top_k

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        """Refuse ids that the model does not know."""
        super().check_inputs(inputs, temperature)
        if names.TARGETS in inputs:
            self._check_ids(names.TARGETS, inputs[names.TARGETS], self._classes)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Refuse to compute whole outputs."""
        raise NotImplementedError("whole log-probabilities are gigabytes: predict_top_k")

    def predict_top_k(
        self, inputs: Mapping[str, Array], k: int, temperature: float
    ) -> Mapping[str, Array | TopKArrays]:
        """Compute the k largest log-probabilities of each row, and those of targets."""
        targets = inputs.get(names.TARGETS)
        rows = len(inputs[names.IDS])
        found = TopKArrays(np.empty((rows, k), np.int32), np.empty((rows, k), np.float32), np.empty(rows, np.float32))
        target_values = np.empty(targets.shape, np.float32) if targets is not None else None
        with self._computing():
            for bucket in self._buckets(inputs[names.POSITION]):
                of_bucket = bucket.flat_rows
                wanted = torch.from_numpy(targets[of_bucket].astype(np.int64)) if targets is not None else None
                parts = [*self._top_logits(inputs, bucket, k, temperature, wanted)]
                for array, tensors in zip(found, zip(*[part[:3] for part in parts], strict=True), strict=True):
                    array[of_bucket] = torch.cat(tensors).cpu().numpy()
                if target_values is not None:
                    target_values[of_bucket] = torch.cat([part.targets for part in parts]).cpu().numpy()  # type: ignore[misc]
        answers: dict[str, Array | TopKArrays] = {names.LOGPROBS: found}
        if target_values is not None:
            answers[names.TARGET_LOGPROBS] = target_values
        return answers

    def _buckets(self, position: Array) -> list[Bucket]:
        starts, rows = sequence_starts(position), len(position)
        if self._packing:
            return make_packs(starts, rows, self._borders)
        return make_buckets(starts, rows, self._max_tokens, borders=self._borders)

    def _top_logits(
        self, inputs: Mapping[str, Array], bucket: Bucket, k: int, temperature: float, targets: torch.Tensor | None
    ) -> Iterator[TopLogits]:
        """Compute the rows of a bucket that are not padding, a slice at a time."""
        model = self._model.base_model if self._plain_head else self._model
        if self._packing:
            ids, position = (
                torch.from_numpy(inputs[name][bucket.rows].astype(np.int64)).to(self._device)
                for name in (names.IDS, names.POSITION)
            )
            answer = model(input_ids=ids, position_ids=position, use_cache=False)
        else:
            answer = self._call_padded(model, inputs[names.IDS], bucket, masked=not self._causal)
        whole = answer[0] if self._plain_head else answer.logits
        kept = whole.flatten(0, 1)
        if bucket.padded:
            kept = kept[torch.from_numpy(bucket.valid.reshape(-1)).to(self._device)]
        del whole, answer
        head: Any = self._model.get_output_embeddings() if self._plain_head else torch.clone
        size = rows_of_slice(self._classes, self._device)
        for start in range(0, len(kept), size):
            wanted = targets[start : start + size].to(self._device) if targets is not None else None
            yield select_top_k(head(kept[start : start + size]), k, temperature, wanted)
