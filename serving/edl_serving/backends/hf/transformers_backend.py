"""What the backends of transformers have in common: a loaded model, and calls of it with padded or packed tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edl.protocol import names
from edl_serving.backends.backend import Array, Backend, TensorSpec
from edl_serving.backends.hf.buckets import Bucket
from edl_serving.backends.hf.length_dependence import find_borders
from edl_serving.request_error import invalid_argument

__all__ = ["LoadedModel", "TokenBackend", "TransformersBackend"]

_WARM_UP_TOKENS_CPU = 1024
"""Of the warm-up where there is no memory of a GPU to be reserved: a large model takes seconds for them."""


@dataclass(frozen=True)
class LoadedModel:
    """A model of transformers, and what the server says about it.

    Attributes:
        model: a `PreTrainedModel`, in evaluation mode on its device.
        version: of the weights.
        meta: metadata for discovery.
        max_tokens: places of a call, padding included.
        longest: tokens of the longest sequence.
        padding: the token id of places that are padding.
    """

    model: Any
    version: str
    meta: Mapping[str, str]
    max_tokens: int
    longest: int
    padding: int

    @property
    def vocabulary(self) -> int:
        """How many token ids the model takes."""
        embeddings = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])


class TransformersBackend(Backend):
    """A model of transformers.

    Args:
        loaded: the model.

    Raises:
        SettingsError: labels of a sequence depend on others.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._device: torch.device = loaded.model.device
        self._vocabulary = loaded.vocabulary
        self._borders = find_borders(loaded.model, loaded.vocabulary, loaded.longest)

    @property
    def version(self) -> str:
        """The version that was given or computed."""
        return self._loaded.version

    @property
    def platform(self) -> str:
        """As `ModelMetadata` calls it."""
        return "transformers"

    @property
    def instance_meta(self) -> Mapping[str, str]:
        """The tokenizer's hash."""
        return self._loaded.meta

    def close(self) -> None:
        """Release the model and cached memory of the GPU."""
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        try:
            with torch.inference_mode():
                yield
        except torch.OutOfMemoryError as exc:
            torch.cuda.empty_cache()
            raise RuntimeError(f"the GPU's memory is too small for a batch: lower --max-tokens ({exc})") from exc

    def _call_padded(self, model: Any, ids: Array, bucket: Bucket, *, masked: bool) -> Any:
        """Call `model` with a bucket.

        Args:
            model: to call.
            ids: of the batch, `[rows]`.
            bucket: what to compute.
            masked: whether the model must be told of padding: tokens see those that follow.
        """
        tokens = torch.from_numpy(np.where(bucket.valid, ids[bucket.rows], self._loaded.padding).astype(np.int64))
        options: dict[str, Any] = {}
        if masked and bucket.padded:
            options["attention_mask"] = torch.from_numpy(bucket.valid.astype(np.int64)).to(self._device)
        if not masked:
            options["use_cache"] = False
        return model(input_ids=tokens.to(self._device), **options)

    def _check_ids(self, name: str, ids: Array, vocabulary: int) -> None:
        wrong = (ids < 0) | (ids >= vocabulary)
        if wrong.any():
            row = int(np.argmax(wrong.reshape(len(ids), -1).any(1)))
            value = int(ids.reshape(-1)[int(np.argmax(wrong))])
            raise invalid_argument(
                f"input {name!r} is {value} in row {row}, and token ids of this model are 0 to {vocabulary - 1}"
            )


class TokenBackend(TransformersBackend):
    """A model whose rows are tokens: the inputs `ids` and `position`."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Token ids and positions."""
        return (TensorSpec(names.IDS, "INT32"), TensorSpec(names.POSITION, "INT32"))

    @property
    def sequence_input(self) -> str:
        """The input `position`."""
        return names.POSITION

    @property
    def max_sequence(self) -> int:
        """What the model's positions, the tokenizer and `--max-tokens` allow."""
        return self._loaded.longest

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        """Refuse ids that the model has no embedding for."""
        self._check_ids(names.IDS, inputs[names.IDS], self._vocabulary)

    def sample(self, rows: int) -> Mapping[str, Array]:
        """Return the longest sequences that fit."""
        places = np.arange(rows, dtype=np.int32)
        return {names.IDS: np.zeros(rows, np.int32), names.POSITION: places % np.int32(self._loaded.longest)}

    def warm_up(self, max_rows: int) -> None:
        """Compute a token, and the longest sequences; a full batch of them on a GPU."""
        most = max_rows if self._device.type == "cuda" else min(max_rows, self._loaded.longest, _WARM_UP_TOKENS_CPU)
        self.writes_inputs = False  # ids are copied to the device
        for rows in sorted({1, most}):
            if self.max_top_k is None:
                self.predict(self.sample(rows))
            else:
                self.predict_top_k(self.sample(rows), self.max_top_k, 1.0)
