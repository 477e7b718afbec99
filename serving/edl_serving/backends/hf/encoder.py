"""Encoders: the hidden states of tokens, and the classes of texts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from edl.protocol import names
from edl_serving.backends.backend import Array, TensorSpec
from edl_serving.backends.hf.buckets import Bucket, make_buckets, sequence_starts
from edl_serving.backends.hf.transformers_backend import LoadedModel, TokenBackend, TransformersBackend
from edl_serving.request_error import invalid_argument

__all__ = ["FeatureBackend", "SequenceClassifierBackend"]

HIDDEN = "hidden"
LOGITS = "logits"


class FeatureBackend(TokenBackend):
    """The last hidden states of a model: a row is a token, with the state at its place.

    Args:
        loaded: the model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        with self._computing():
            states = self._model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=self._device))[0]
        self._width = int(states.shape[-1])

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The hidden states."""
        return (TensorSpec(HIDDEN, "FP32", (self._width,)),)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute the hidden state of each token."""
        ids, position = inputs[names.IDS], inputs[names.POSITION]
        hidden = np.empty((len(ids), self._width), np.float32)
        with self._computing():
            starts = sequence_starts(position)
            for bucket in make_buckets(starts, len(ids), self._loaded.max_tokens, borders=self._borders):
                states = self._call_padded(self._model, ids, bucket, masked=True)[0].float().cpu().numpy()
                hidden[bucket.flat_rows] = states[bucket.valid]
        return {HIDDEN: hidden}


class SequenceClassifierBackend(TransformersBackend):
    """The logits of a text's classes: a row is a text, its token ids as little-endian INT32 in an element of BYTES.

    Args:
        loaded: the model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._classes = int(loaded.model.config.num_labels)
        known = loaded.model.config.pad_token_id
        self._pads = (
            isinstance(known, int) and 0 <= known < self._vocabulary
        )  # else a decoder cannot tell where a text ends

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The token ids of a text."""
        return (TensorSpec(names.IDS, "BYTES"),)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The logits of the classes."""
        return (TensorSpec(LOGITS, "FP32", (self._classes,)),)

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        """Refuse texts that are empty, too long, or not of known ids."""
        for row, text in enumerate(inputs[names.IDS]):
            if not text or len(text) % 4:
                raise invalid_argument(
                    f"input {names.IDS!r} has {len(text)} bytes in row {row}: a row is a text's token ids as "
                    'little-endian int32, ids.astype("<i4").tobytes()'
                )
            if len(text) // 4 > self._loaded.longest:
                raise invalid_argument(
                    f"input {names.IDS!r} has {len(text) // 4} tokens in row {row}, and this model takes "
                    f"{self._loaded.longest}: cut the text"
                )
        flat = np.frombuffer(b"".join(inputs[names.IDS]), "<i4")
        wrong = (flat < 0) | (flat >= self._vocabulary)
        if wrong.any():
            at = int(np.argmax(wrong))
            ends = np.cumsum([len(text) // 4 for text in inputs[names.IDS]])
            raise invalid_argument(
                f"input {names.IDS!r} has token {int(flat[at])} in row {int(np.searchsorted(ends, at, 'right'))}, and "
                f"token ids of this model are 0 to {self._vocabulary - 1}"
            )

    def sample(self, rows: int) -> Mapping[str, Array]:
        """Return texts of a token."""
        texts = np.empty(rows, object)
        texts.fill(
            np.zeros(1, "<i4").tobytes()
        )  # `np.full` goes by way of numpy's strings, which end before zero bytes
        return {names.IDS: texts}

    def warm_up(self, max_rows: int) -> None:
        """Compute a text of a token, and a batch of them."""
        self.writes_inputs = False
        for rows in sorted({1, max_rows}):
            self.predict(self.sample(rows))

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute the logits of each text."""
        texts = inputs[names.IDS]
        ids = np.frombuffer(b"".join(texts), "<i4")
        lengths = np.array([len(text) // 4 for text in texts])
        starts = np.cumsum(lengths) - lengths
        row_of = np.repeat(np.arange(len(texts)), lengths)
        logits = np.empty((len(texts), self._classes), np.float32)
        with self._computing():
            for bucket in self._buckets(starts, len(ids)):
                answer = self._call_padded(self._model, ids, bucket, masked=True).logits
                logits[row_of[bucket.rows[:, 0]]] = answer.float().cpu().numpy()
        return {LOGITS: logits}

    def _buckets(self, starts: Array, tokens: int) -> list[Bucket]:
        return make_buckets(starts, tokens, self._loaded.max_tokens if self._pads else 1, borders=self._borders)
