"""The backends for models from the transformers library: language models, encoders, and text classifiers.

The sequences of a batch are first grouped into buckets that are computed together, either padded to a common length or
packed end to end. Language models return the k largest log-probabilities for the next token (or for masked tokens).
These are selected on the device, because the log-probabilities of the whole vocabulary would take gigabytes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from edl.errors import SettingsError
from edl.protocol import names
from edl.protocol.tensors import Array
from edl_serving.backends.backend import Backend, TensorSpec, TopKArrays
from edl_serving.backends.hf import probes
from edl_serving.request_error import invalid_argument

_log = logging.getLogger(__name__)

_MAX_PADDING = 0.25
"""Largest ratio of padding to tokens in a bucket. With a much lower limit, each length would need its own call."""
_FREE_PADDING = 64
"""This much padding, in tokens, is cheaper than another call of the model."""


@dataclass(frozen=True)
class Bucket:
    """Sequences that are computed together.

    Attributes:
        rows: The batch's row for each position, `[sequences, length]`; an arbitrary row if the position is padding.
        valid: Whether each position is a token rather than padding, `[sequences, length]`.
    """

    rows: Array
    valid: Array

    @property
    def padded(self) -> bool:
        return not bool(self.valid.all())


def make_buckets(
    starts: Array, rows: int, max_tokens: int, *, padding: bool = True, borders: Sequence[int] = ()
) -> list[Bucket]:
    """Group sequences of similar length into buckets; without `padding`, all sequences in a bucket have equal lengths.

    A bucket has at most `max_tokens` positions, padding included; a longer sequence is a bucket by itself. For each
    length in `borders`, no bucket holds both sequences up to that length and longer sequences.
    """
    lengths = np.diff(starts, append=rows)
    sides = np.searchsorted(borders, lengths)
    order = np.argsort(-lengths, kind="stable")
    buckets: list[Bucket] = []
    at = 0
    while at < len(order):
        longest = int(lengths[order[at]])
        end, tokens = at + 1, longest
        while end < len(order) and sides[order[end]] == sides[order[at]] and (end + 1 - at) * longest <= max_tokens:
            tokens += int(lengths[order[end]])
            added = (end + 1 - at) * longest - tokens
            if added > (max(_FREE_PADDING, _MAX_PADDING * tokens) if padding else 0):
                break
            end += 1
        chosen = np.sort(order[at:end])
        places = np.arange(longest)
        valid = places < lengths[chosen, None]
        buckets.append(Bucket(np.minimum(starts[chosen, None] + places, rows - 1), valid))
        at = end
    return buckets


def make_packs(starts: Array, rows: int, borders: Sequence[int] = ()) -> list[Bucket]:
    """Pack sequences end to end, in order: one single-row bucket for each range of lengths between `borders`."""
    lengths = np.diff(starts, append=rows)
    sides = np.repeat(np.searchsorted(borders, lengths), lengths)
    packs = [np.flatnonzero(sides == side)[None] for side in range(len(borders) + 1)]
    return [Bucket(pack, np.ones(pack.shape, bool)) for pack in packs if pack.size]


_GPU_SLICE_BYTES = 256 << 20
"""Maximum number of bytes of float32 log-probabilities held at a time: 440 rows with a vocabulary of 152k tokens.
Computing them takes about twice as many bytes of additional working memory. With 64 MiB, an H200 spent a sixth of the
time for a batch of 8,192 tokens on starting kernels."""
_CPU_SLICE_BYTES = 8 << 20
"""The limit on a CPU. More would not fit into a core's caches: with a vocabulary of 8k tokens, a CPU computed 8,100
rows per second with this limit, and 4,800 with 64 MiB."""


class TopLogits(NamedTuple):
    """The largest log-probabilities of each row, as in `TopKArrays`, and the targets' log-probabilities `[rows, m]`."""

    ids: torch.Tensor
    values: torch.Tensor
    tail: torch.Tensor
    targets: torch.Tensor | None


def rows_of_slice(vocabulary: int, device: torch.device) -> int:
    nbytes = _CPU_SLICE_BYTES if device.type == "cpu" else _GPU_SLICE_BYTES
    return max(1, nbytes // (4 * vocabulary))


def select_top_k(logits: torch.Tensor, k: int, temperature: float, targets: torch.Tensor | None) -> TopLogits:
    """Find the k largest logits of each row, `[rows, vocabulary]`; of equal logits, those with the lowest ids."""
    vocabulary = logits.shape[-1]
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    target_values = logprobs.gather(1, targets) if targets is not None else None
    # `topk` may pick any of equal logits, which are common with bfloat16: take more, and choose among them.
    spare = 8 if logits.dtype == torch.float32 else k + 32
    ids = logits.topk(min(k + spare, vocabulary), dim=-1, sorted=False).indices.sort(-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    unsure = (values[:, -1] == values[:, k - 1]).nonzero().flatten() if len(ids[0]) < vocabulary else ()
    ids = ids.gather(1, order[:, :k])
    if len(unsure):
        ids[unsure] = logits[unsure].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    values = logprobs.gather(1, ids)
    logprobs.scatter_(1, ids, -torch.inf)
    tail = (logprobs.div_(temperature) if temperature != 1 else logprobs).logsumexp(-1)
    return TopLogits(ids.int(), values, tail, target_values)


_WARM_UP_TOKENS_CPU = 1024
"""Tokens in a warm-up on a CPU, where no GPU memory is reserved. With more tokens, a large model would take many
seconds."""


@dataclass(frozen=True)
class LoadedModel:
    """A model from the transformers library, its version, and its metadata for discovery.

    `max_tokens` limits the positions in one call, padding included; `longest` is the length of the longest sequence
    that is accepted.
    """

    model: Any
    version: str
    meta: Mapping[str, str]
    max_tokens: int
    longest: int


class TransformersBackend(Backend):
    """A model from the transformers library."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    platform = "transformers"

    def __init__(self, loaded: LoadedModel) -> None:
        self.version = loaded.version
        self.instance_meta = loaded.meta
        self._loaded = loaded
        self._model = loaded.model
        self._device: torch.device = loaded.model.device
        self._vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self._borders = probes.find_borders(self._model, self._vocabulary, loaded.longest)
        known = getattr(self._model.config, "pad_token_id", None)
        # Some models detect padding by its id. An id without an embedding was added to the tokenizer only.
        self._padding = known if isinstance(known, int) and 0 <= known < self._vocabulary else None

    def close(self) -> None:
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
        tokens = torch.from_numpy(np.where(bucket.valid, ids[bucket.rows], self._padding or 0).astype(np.int64))
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
                f"input {name!r} is {value} in row {row}, but token ids of this model are 0 to {vocabulary - 1}"
            )


class TokenBackend(TransformersBackend):
    """A model whose rows are tokens, with the inputs `ids` and `position`."""

    inputs: tuple[TensorSpec, ...] = (TensorSpec(names.IDS, "INT32"), TensorSpec(names.POSITION, "INT32"))
    sequence_input: str | None = names.POSITION

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.max_sequence = loaded.longest

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        self._check_ids(names.IDS, inputs[names.IDS], self._vocabulary)

    def sample(self, rows: int) -> Mapping[str, Array]:
        places = np.arange(rows, dtype=np.int32)
        return {names.IDS: np.zeros(rows, np.int32), names.POSITION: places % np.int32(self._loaded.longest)}

    def warm_up(self, max_rows: int) -> None:
        """Compute one token, then the longest sequences. On a GPU, they fill a batch, to reserve the memory."""
        on_gpu = self._device.type == "cuda"
        super().warm_up(max_rows if on_gpu else min(max_rows, self._loaded.longest, _WARM_UP_TOKENS_CPU))


_WHOLE_LOGITS_BYTES = 1 << 30
"""Largest number of bytes of logits in one call of a model whose head cannot be computed in slices."""


class LanguageModelBackend(TokenBackend):
    """A causal or masked language model.

    A sequence of T tokens is T rows. Row t holds token t and the model's prediction for token t + 1 (in a masked
    language model, for token t itself). With `packing`, sequences are computed end to end instead of padded.
    """

    inputs: tuple[TensorSpec, ...] = (*TokenBackend.inputs, TensorSpec(names.TARGETS, "INT32", (-1,)))
    optional_outputs: Mapping[str, str] = {names.TARGET_LOGPROBS: names.TARGETS}

    def __init__(self, loaded: LoadedModel, max_top_k: int, *, causal: bool, packing: bool) -> None:
        super().__init__(loaded)
        self._causal = causal
        self._packing = packing
        length = loaded.longest
        kind = type(loaded.model).__name__
        if causal and not probes.is_causal(self._model, self._vocabulary, length):
            raise SettingsError(f"--hf: {kind} lets tokens attend to later ones: serve it with --task masked-lm")
        if packing and not (causal and probes.keeps_packed_apart(self._model, self._vocabulary, length)):
            raise SettingsError(
                f"--packing: {kind} does not keep packed sequences apart by their positions: without the flag, "
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
            _log.info("%s changes logits after its head: at most %d tokens per call", kind, self._max_tokens)
        self.max_top_k = min(max_top_k, self._classes)
        self.outputs = (
            TensorSpec(names.LOGPROBS, "FP32", (self._classes,)),
            TensorSpec(names.TARGET_LOGPROBS, "FP32", (-1,)),
        )

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        super().check_inputs(inputs, temperature)
        if names.TARGETS in inputs:
            self._check_ids(names.TARGETS, inputs[names.TARGETS], self._classes)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        raise NotImplementedError("the log-probabilities of the whole vocabulary take gigabytes: use predict_top_k")

    def predict_top_k(
        self, inputs: Mapping[str, Array], k: int, temperature: float
    ) -> Mapping[str, Array | TopKArrays]:
        targets = inputs.get(names.TARGETS)
        rows = len(inputs[names.IDS])
        found = TopKArrays(np.empty((rows, k), np.int32), np.empty((rows, k), np.float32), np.empty(rows, np.float32))
        target_values = np.empty(targets.shape, np.float32) if targets is not None else None
        with self._computing():
            for bucket in self._buckets(inputs[names.POSITION]):
                of_bucket = bucket.rows[bucket.valid]
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
        starts, rows = np.flatnonzero(position == 0), len(position)
        if self._packing:
            return make_packs(starts, rows, self._borders)
        return make_buckets(starts, rows, self._max_tokens, borders=self._borders)

    def _top_logits(
        self, inputs: Mapping[str, Array], bucket: Bucket, k: int, temperature: float, targets: torch.Tensor | None
    ) -> Iterator[TopLogits]:
        """Compute the log-probabilities of a bucket's tokens, a slice of rows at a time."""
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


HIDDEN = "hidden"
LOGITS = "logits"


class FeatureBackend(TokenBackend):
    """A model that returns its last hidden states; a row is a token and its hidden state."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        with self._computing():
            states = self._model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=self._device))[0]
        self._width = int(states.shape[-1])
        self.outputs = (TensorSpec(HIDDEN, "FP32", (self._width,)),)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        ids, position = inputs[names.IDS], inputs[names.POSITION]
        hidden = np.empty((len(ids), self._width), np.float32)
        with self._computing():
            starts = np.flatnonzero(position == 0)
            for bucket in make_buckets(starts, len(ids), self._loaded.max_tokens, borders=self._borders):
                states = self._call_padded(self._model, ids, bucket, masked=True)[0].float().cpu().numpy()
                hidden[bucket.rows[bucket.valid]] = states[bucket.valid]
        return {HIDDEN: hidden}


class SequenceClassifierBackend(TransformersBackend):
    """A text classifier; a row is a text, with its token ids as little-endian INT32 in one element of BYTES."""

    inputs: tuple[TensorSpec, ...] = (TensorSpec(names.IDS, "BYTES"),)

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._classes = int(loaded.model.config.num_labels)
        self.outputs = (TensorSpec(LOGITS, "FP32", (self._classes,)),)

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:
        for row, text in enumerate(inputs[names.IDS]):
            if not text or len(text) % 4:
                raise invalid_argument(
                    f"input {names.IDS!r} has {len(text)} bytes in row {row}: a row is a text's token ids as "
                    'little-endian int32, ids.astype("<i4").tobytes()'
                )
            if len(text) // 4 > self._loaded.longest:
                raise invalid_argument(
                    f"input {names.IDS!r} has {len(text) // 4} tokens in row {row}, but this model takes "
                    f"at most {self._loaded.longest}: cut the text"
                )
        flat = np.frombuffer(b"".join(inputs[names.IDS]), "<i4")
        wrong = (flat < 0) | (flat >= self._vocabulary)
        if wrong.any():
            at = int(np.argmax(wrong))
            ends = np.cumsum([len(text) // 4 for text in inputs[names.IDS]])
            raise invalid_argument(
                f"input {names.IDS!r} has token {int(flat[at])} in row {int(np.searchsorted(ends, at, 'right'))}, but "
                f"token ids of this model are 0 to {self._vocabulary - 1}"
            )

    def sample(self, rows: int) -> Mapping[str, Array]:
        texts = np.empty(rows, object)  # `np.full` would make numpy's strings of it, which drop trailing zero bytes
        texts.fill(np.zeros(1, "<i4").tobytes())
        return {names.IDS: texts}

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        texts = inputs[names.IDS]
        ids = np.frombuffer(b"".join(texts), "<i4")
        lengths = np.array([len(text) // 4 for text in texts])
        starts = np.cumsum(lengths) - lengths
        row_of = np.repeat(np.arange(len(texts)), lengths)
        logits = np.empty((len(texts), self._classes), np.float32)
        with self._computing():
            # Without a padding id, a decoder cannot tell where a text ends, so texts are computed one by one.
            most = self._loaded.max_tokens if self._padding is not None else 1
            for bucket in make_buckets(starts, len(ids), most, borders=self._borders):
                answer = self._call_padded(self._model, ids, bucket, masked=True).logits
                logits[row_of[bucket.rows[:, 0]]] = answer.float().cpu().numpy()
        return {LOGITS: logits}
