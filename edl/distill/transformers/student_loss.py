"""What a `DistillTrainer` learns from a batch: its texts, `DistillArguments`, and the loss.

Texts may be padded on either side. They may also be packed end to end without an attention mask, with position ids that
restart at each text, as `DataCollatorWithFlattening` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Optional, get_args

import numpy as np
import torch
from torch import Tensor

from edl.distill.compress import TopK, check_temperature
from edl.distill.divergences import NO_LABEL
from edl.distill.losses import chunked_token_loss, token_loss
from edl.errors import SettingsError
from edl.protocol.tensors import Array, as_array
from edl.settings import is_count, is_share

# Padding-free collators use these for the boundaries of texts, in addition to position ids.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens", "seq_idx", "segment_ids")


@dataclass(frozen=True)
class Texts:
    """The texts of a batch."""

    ids: Array  # [texts, longest], token ids
    mask: Array  # [texts, longest], 1 for tokens
    packed: bool  # whether the batch's rows hold several texts; if so, the texts' tokens, in order, are the batch's


def find_texts(batch: Mapping[str, Any]) -> Texts:
    """Return the texts of a batch; raise `SettingsError` if their starts cannot be determined."""
    ids, mask, positions = (_array(batch, name) for name in ("input_ids", "attention_mask", "position_ids"))
    if ids is None or ids.ndim != 2:
        found = sorted(batch) if ids is None else f"input_ids of shape {list(ids.shape)}"
        raise SettingsError(f"the batch has {found}: teachers of tokens need input_ids [rows, length]")
    if positions is None:
        named = [name for name in _BOUNDARIES if name in batch]
        if named and mask is None:
            raise SettingsError(
                f"the batch has {named[0]} but no position_ids, so rows hold several texts, which would be read as "
                "one: have the collator return position_ids (DataCollatorWithFlattening(return_position_ids=True))"
            )
        return Texts(ids, np.ones(ids.shape, np.int8) if mask is None else mask, False)
    if positions.ndim != 2 or positions.shape[1] != ids.shape[1]:
        raise SettingsError(f"position_ids are {list(positions.shape)}: expected one for each token, [rows, length]")
    positions = np.broadcast_to(positions, ids.shape)
    if mask is not None:
        if mask.shape == ids.shape and any(
            _starts(row[kept != 0])[1:].any() for row, kept in zip(positions, mask, strict=True)
        ):
            raise SettingsError(
                "position_ids restart in a row that has an attention_mask: the student would attend across "
                "texts, but the teachers would not. Leave the attention_mask out, as DataCollatorWithFlattening does"
            )
        return Texts(ids, mask, False)
    starts = np.stack([_starts(row) for row in positions])
    first = positions[starts]
    if first.size and (first != first[0]).any():
        raise SettingsError(
            f"position_ids begin at {sorted(set(first.tolist()))[:4]}: in each text they must rise by 1 from the same "
            "number, to show where texts begin"
        )
    if not starts[:, 1:].any():
        return Texts(ids, np.ones(ids.shape, np.int8), False)
    lengths = np.diff([*np.flatnonzero(starts), starts.size])
    kept = np.arange(lengths.max()) < lengths[:, None]
    texts = np.zeros(kept.shape, ids.dtype)
    texts[kept] = ids.reshape(-1)
    return Texts(texts, kept.astype(np.int8), True)


def check_token_types(batch: Mapping[str, Any], texts: Texts) -> None:
    """Check that a batch has no text pairs, which use a second token type: teachers get only ids."""
    types = _array(batch, "token_type_ids")
    if types is None:
        return
    if not texts.packed and types.shape == texts.mask.shape:
        types = types[texts.mask != 0]
    if types.any():
        raise SettingsError(
            f"token_type_ids contain {int(types.max())}, as for text pairs, but `edl serve --hf` takes only ids, "
            "all of type 0: its labels would be wrong. Serve a function that takes the types and name its inputs, "
            'inputs={"ids": ..., "token_type_ids": "token_type_ids"}; or leave the types out for teacher and student '
            "(return_token_type_ids=False in the tokenizer), if the teacher was trained without them"
        )


def text_bytes(batch: Mapping[str, Any]) -> Array:
    """Return each text's token ids as bytes (little-endian int32), the input of classifiers in `edl serve --hf`."""
    texts = find_texts(batch)
    check_token_types(batch, texts)
    rows = zip(texts.ids, texts.mask, strict=True)
    return np.array([ids[kept != 0].astype("<i4").tobytes() for ids, kept in rows], dtype=object)


def learned_rows(batch: Mapping[str, Any], *, shifted: bool) -> torch.Tensor:
    """Return which tokens' predictions are learned, bool [rows, length]; all tokens if there are no `labels`."""
    ids, attended = batch["input_ids"], batch.get("attention_mask")
    rows = next_tokens(batch, shifted=shifted) != NO_LABEL
    if attended is not None:
        rows &= attended != 0  # with padding on the left, the last pad would predict the first token
    elif shifted and batch.get("position_ids") is not None:
        positions = batch["position_ids"].expand(ids.shape)
        rows[:, :-1] &= positions[:, 1:] == positions[:, :-1] + 1  # a text's last token does not predict the next text
    return rows


def next_tokens(batch: Mapping[str, Any], *, shifted: bool) -> torch.Tensor:
    """Return the target token of each row, [rows, length], and -100 for rows without one."""
    tokens: torch.Tensor
    if shifted and batch.get("shift_labels") is not None:
        tokens = batch["shift_labels"]
        return tokens
    if batch.get("labels") is not None:
        tokens = batch["labels"]
    else:
        tokens, attended = batch["input_ids"], batch.get("attention_mask")
        tokens = tokens if attended is None else tokens.masked_fill(attended == 0, NO_LABEL)
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=NO_LABEL) if shifted else tokens


def _array(batch: Mapping[str, Any], name: str) -> Array | None:
    value = batch.get(name)
    return None if value is None else as_array(value, name)


def _starts(positions: Array) -> Array:
    """Return which tokens start a text, bool [tokens]: the first, and any with a position that does not rise by 1."""
    starts = np.ones(positions.shape, bool)
    starts[1:] = positions[1:] != positions[:-1] + 1
    return starts


# `HfArgumentParser` needs Optional[...] and Literal[...] spelled like this.
Task = Literal["causal-lm", "masked-lm", "classification"]

_TOP_K = 64  # default for tokens: the maximum of `edl serve --hf` unless --top-k changes it


@dataclass(frozen=True)
class DistillArguments:
    """How a `DistillTrainer` learns from its teachers.

    Attributes:
        task: Meaning of a row: "causal-lm" (row t holds token t and the prediction of token t + 1), "masked-lm" (row t
            predicts token t itself) or "classification" (a row is a sample, with the logits of its classes).
        top_k: Number of largest log-probabilities to request per row. None requests 64 if rows are tokens, and whole
            logits if rows are samples to classify.
        beta: Direction of the divergence, as in `edl.distill.losses.token_loss`: 0 for forward KL, 1 for reverse KL,
            and values in between for generalized Jensen-Shannon divergences.
        temperature: Temperature of the teachers' labels and of the loss. The loss is multiplied by the square of the
            temperature.
        hard_weight: The weight of the cross-entropy with the batch's own labels, from 0 to 1; the loss with the
            teachers' labels gets the rest of the weight.
        chunked_head: Whether to compute logits for one chunk of tokens at a time in training, so that the logits of all
            tokens never exist at once. Models that change logits after their head are refused.
        padded_vocabulary: Whether student and teacher may have vocabularies of different size because of padding.
        eval_teachers: Whether evaluations ask the teachers too, so that `eval_loss` is computed like the training loss.
            If not, `eval_loss` is the cross-entropy, and evaluations need no teacher.
        outputs: Name of the teachers' output. If empty, "logprobs" if rows are tokens, and "logits" for classification.
        tokenizer: Path or hash of the student's tokenizer; teachers with a different tokenizer are not used. None for
            the tokenizer in `processing_class`, if there is one; empty for any tokenizer.
        ahead: Number of batches to read and label ahead while the current step trains.
    """

    task: Task = "causal-lm"
    top_k: Optional[int] = field(default=None, metadata={"help": "log-probabilities to request per row"})  # noqa: UP045
    beta: float = field(default=0.0, metadata={"help": "0: forward KL, 1: reverse KL, between: Jensen-Shannon"})
    temperature: float = field(default=1.0, metadata={"help": "temperature of labels and loss"})
    hard_weight: float = field(default=0.0, metadata={"help": "share of the cross-entropy with the batch's own labels"})
    chunked_head: bool = field(default=False, metadata={"help": "never hold the logits of all tokens at once"})
    padded_vocabulary: bool = field(default=False, metadata={"help": "allow vocabularies padded to different sizes"})
    eval_teachers: bool = field(default=False, metadata={"help": "request teachers' labels in evaluations too"})
    outputs: str = field(default="", metadata={"help": "name of the teachers' output"})
    tokenizer: Optional[str] = field(default=None, metadata={"help": "path or hash of the student's tokenizer"})  # noqa: UP045
    ahead: int = field(default=16, metadata={"help": "batches to label while a step trains"})

    def __post_init__(self) -> None:
        if self.task not in get_args(Task):
            raise SettingsError(f"task={self.task!r}: must be one of {', '.join(get_args(Task))}")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        if not is_share(self.beta):
            raise SettingsError(f"beta={self.beta!r}: must be from 0 (forward KL) to 1 (reverse KL)")
        check_temperature(self.temperature)
        if not is_share(self.hard_weight):
            raise SettingsError(f"hard_weight={self.hard_weight!r}: must be from 0 to 1")
        if self.chunked_head and self.task == "classification":
            raise SettingsError("chunked_head=True is only for language models: omit it")

    @property
    def of_tokens(self) -> bool:
        """Whether a row is a token."""
        return self.task != "classification"

    @property
    def output(self) -> str:
        """Name of the teachers' output."""
        return self.outputs or ("logprobs" if self.of_tokens else "logits")

    @property
    def kept(self) -> int | None:
        """Number of log-probabilities to request per row; None for all."""
        return self.top_k if self.top_k is not None or not self.of_tokens else _TOP_K


_HEAD_TOLERANCE = 0.02
"""Largest difference between the head's logits and the model's, relative to the largest logit. If bfloat16 values (8
bits) are summed in a different order, the sums differ by less than 1 %; a soft cap or a scale that matters makes a
larger difference."""


def student_loss(
    arguments: DistillArguments,
    batch: Mapping[str, Any],
    labels: TopK,
    count: Tensor | float,
    logits: Tensor,
    head: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the loss of a batch: the sum over its rows, divided by the number of rows in the whole step.

    `head` computes logits from hidden states, one chunk of rows at a time; in that case, `logits` holds the hidden
    states. If `head` is None, `logits` holds logits.
    """
    weight = arguments.hard_weight
    rows, hard_rows = count if isinstance(count, Tensor) and count.ndim else (count, count)

    def loss(**settings: Any) -> Tensor:
        settings |= {"beta": arguments.beta, "padded_vocabulary": arguments.padded_vocabulary}
        found: Tensor = (
            token_loss(logits, labels, **settings)
            if head is None
            else chunked_token_loss(logits, head, labels, **settings)
        )
        return found

    if arguments.of_tokens:
        shifted = arguments.task == "causal-lm"
        mask, own = learned_rows(batch, shifted=shifted), next_tokens(batch, shifted=shifted)
        return loss(mask=mask, token_count=rows, hard_labels=own, hard_weight=weight)
    if not weight:
        return loss(token_count=rows)
    found = batch.get("labels")
    if not isinstance(found, Tensor) or found.is_floating_point() or found.ndim != 1:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise SettingsError(f"labels are {what}: hard_weight above 0 needs a class number for each sample")
    # Samples without a label do not count here.
    hard = loss(mask=found != NO_LABEL, token_count=hard_rows, hard_labels=found, hard_weight=1.0)
    return hard if weight == 1 else (1 - weight) * loss(token_count=rows) + weight * hard


def all_classes(logits: Tensor, temperature: float) -> TopK:
    """Return whole logits [rows, classes] as `TopK` labels that keep every class."""
    ids = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
    tail = torch.full(logits.shape[:-1], -torch.inf, device=logits.device)
    return TopK(ids, logits, tail, temperature, logits.shape[-1])  # type: ignore[arg-type]  # tensors, as from `map`


def logits_of(outputs: Any) -> Tensor:
    """Return the logits from a model's outputs."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor):
        names = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise SettingsError(f"the student returned {names} when called without labels: its outputs must have logits")
    return logits


def check_head(states: Tensor, logits: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Check that the head alone computes the model's logits from its last states."""
    with torch.no_grad():
        own = logits[:, -1].float()
        difference = (head(states[:, -1]).float() - own).abs().max()
        if difference <= _HEAD_TOLERANCE * own.abs().max():
            return
    raise SettingsError(
        "chunked_head=True: the student's logits are not its head's output for its last states (a soft cap or scale "
        "follows, or the states are not the last ones): omit chunked_head"
    )
