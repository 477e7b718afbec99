"""`DistillArguments`, the settings of a `DistillTrainer`, and its loss, a sum over the rows of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Optional, get_args

import torch
from torch import Tensor

from edl.distill.compress import TopK
from edl.distill.losses import chunked_token_loss, token_loss
from edl.distill.losses.terms import check_classes
from edl.distill.transformers.texts import IGNORED, learned_rows, next_tokens
from edl.errors import SettingsError
from edl.settings import is_above_zero, is_count, is_share

__all__ = ["DistillArguments", "all_classes", "check_head", "hard_labels", "logits_of", "student_loss"]

# `HfArgumentParser` reads Optional[...] and Literal[...], in these words.
Task = Literal["causal-lm", "masked-lm", "classification"]

_MOST_CLASSES = 2**31  # where the number is not known before the head has made logits
_TOP_K = 64
"""Of tokens: what `edl serve --hf` answers at most unless it is told another number."""


@dataclass(frozen=True)
class DistillArguments:
    """How a `DistillTrainer` learns from its teachers.

    Attributes:
        task: Meaning of a row: "causal-lm" (row t holds token t and the prediction of token t + 1), "masked-lm" (row t
            predicts token t itself) or "classification" (a row is a sample, with the logits of its classes).
        top_k: Number of largest log-probabilities to request for a row. None for 64 with tokens, and for whole logits
            with classes.
        beta: Direction of the divergence, as in `edl.distill.losses.token_loss`: 0 for forward KL, 1 for reverse KL,
            Jensen-Shannon in between.
        temperature: Temperature of the teachers' labels and of the loss, which is multiplied by its square.
        hard_weight: The share of the cross-entropy with the batch's own labels, from 0 to 1; the loss with the
            teachers' labels has the rest.
        chunked_head: Whether to compute the logits of some tokens at a time while training, so that those of all tokens
            never exist at once. Models that change logits after their head are refused.
        padded_vocabulary: Whether student and teacher may have vocabularies of different size because of padding.
        eval_teachers: Whether evaluations ask the teachers too, so that `eval_loss` is the training loss. If not, it is
            the cross-entropy, and no teacher is needed.
        outputs: Name of the teachers' output. Empty: "logprobs" of tokens, "logits" of classes.
        tokenizer: Path or hash of the student's tokenizer; teachers with another one are refused. None for that of
            `processing_class`, if it has one; empty for any.
        ahead: Number of batches that are read and labelled while the current step is trained.
    """

    task: Task = "causal-lm"
    top_k: Optional[int] = field(default=None, metadata={"help": "log-probabilities of a row that are asked for"})  # noqa: UP045
    beta: float = field(default=0.0, metadata={"help": "0 forward KL, 1 reverse KL, Jensen-Shannon between"})
    temperature: float = field(default=1.0, metadata={"help": "of the labels and the loss"})
    hard_weight: float = field(default=0.0, metadata={"help": "share of the cross-entropy with the batch's own labels"})
    chunked_head: bool = field(default=False, metadata={"help": "never hold the logits of all tokens together"})
    padded_vocabulary: bool = field(default=False, metadata={"help": "student and teacher may pad their vocabularies"})
    eval_teachers: bool = field(default=False, metadata={"help": "evaluations ask the teachers as well"})
    outputs: str = field(default="", metadata={"help": "the teachers' output"})
    tokenizer: Optional[str] = field(default=None, metadata={"help": "path or hash of the student's tokenizer"})  # noqa: UP045
    ahead: int = field(default=16, metadata={"help": "batches that are labelled while a step is trained"})

    def __post_init__(self) -> None:
        if self.task not in get_args(Task):
            raise SettingsError(f"task={self.task!r}: must be one of {', '.join(get_args(Task))}")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        if not is_share(self.beta):
            raise SettingsError(f"beta={self.beta!r}: must be from 0 (forward KL) to 1 (reverse KL)")
        if not is_above_zero(self.temperature) or self.temperature == float("inf"):
            raise SettingsError(f"temperature={self.temperature!r}: must be a finite number above 0")
        if not is_share(self.hard_weight):
            raise SettingsError(f"hard_weight={self.hard_weight!r}: must be from 0 to 1")
        if self.chunked_head and self.task == "classification":
            raise SettingsError("chunked_head=True is for the vocabularies of language models: leave it out")

    @property
    def of_tokens(self) -> bool:
        """Whether a row is a token."""
        return self.task != "classification"

    @property
    def output(self) -> str:
        """The teachers' output."""
        return self.outputs or ("logprobs" if self.of_tokens else "logits")

    @property
    def kept(self) -> int | None:
        """How many log-probabilities of a row are asked for, None for all."""
        return self.top_k if self.top_k is not None or not self.of_tokens else _TOP_K


_HEAD_TOLERANCE = 0.02
"""By how much logits of the head alone may differ from the model's, of their largest: bfloat16 keeps 8 bits, so that
sums of another order differ by less than 1 %; a soft cap or a scale that matters changes more."""


def student_loss(
    arguments: DistillArguments,
    batch: Mapping[str, Any],
    labels: TopK,
    count: Tensor | float,
    logits: Tensor,
    head: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the loss of a batch: the sum over its rows, divided by the rows of the whole step.

    `batch`: with the labels of its own, if `hard_weight` needs them. `head`: makes logits of states, for some rows
    at a time; None where `logits` are the logits.
    """
    mask = learned_rows(batch, shifted=arguments.task == "causal-lm") if arguments.of_tokens else None

    def divergence(of: TopK, **settings: Any) -> Tensor:
        return token_loss(logits, of, **settings) if head is None else chunked_token_loss(logits, head, of, **settings)

    def soft() -> Tensor:
        padded = arguments.padded_vocabulary
        return divergence(labels, mask=mask, beta=arguments.beta, token_count=rows, padded_vocabulary=padded)

    rows, hard_rows = count if isinstance(count, Tensor) and count.ndim else (count, count)
    if not arguments.hard_weight:
        return soft()
    own = hard_labels(arguments, batch, logits.shape[-1] if head is None else None, mask)
    kept = mask if arguments.of_tokens else batch["labels"] != IGNORED
    hard = divergence(own, mask=kept, beta=0.0, token_count=hard_rows)
    if arguments.hard_weight == 1:
        return hard
    return (1 - arguments.hard_weight) * soft() + arguments.hard_weight * hard


def hard_labels(
    arguments: DistillArguments, batch: Mapping[str, Any], class_count: int | None = None, mask: Tensor | None = None
) -> TopK:
    """Return the batch's own labels as distributions that are sure of a class: the KL to them is the cross-entropy.

    `class_count`: the student's, None where that is not known yet. `mask`: the rows that are learned, None for all:
    labels of others may be anything.
    """
    if arguments.of_tokens:
        classes = next_tokens(batch, shifted=arguments.task == "causal-lm")
    else:
        found = batch.get("labels")
        if not isinstance(found, Tensor) or found.is_floating_point() or found.ndim != 1:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise SettingsError(f"labels are {what}: hard_weight needs a class's number for each sample, or 0")
        classes = found
    learned = classes if mask is None else classes.masked_fill(~mask, IGNORED)
    check_classes(learned, _MOST_CLASSES if class_count is None else class_count, IGNORED)
    ids = classes.clamp(min=0).unsqueeze(-1)
    sure = torch.zeros(ids.shape, device=ids.device)
    return TopK(ids, sure, torch.full_like(sure[..., 0], -torch.inf))  # type: ignore[arg-type]  # tensors, as after map


def all_classes(logits: Tensor, temperature: float) -> TopK:
    """Return whole logits [rows, classes] as labels that keep every class."""
    ids = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
    tail = torch.full(logits.shape[:-1], -torch.inf, device=logits.device)
    return TopK(ids, logits, tail, temperature, logits.shape[-1])  # type: ignore[arg-type]  # tensors, as after map


def logits_of(outputs: Any) -> Tensor:
    """Return the logits among a model's outputs."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor):
        names = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise SettingsError(f"the student returned {names} without labels: its outputs must have logits")
    return logits


def check_head(states: Tensor, logits: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Check that a head alone makes the model's logits of its last states."""
    with torch.no_grad():
        own = logits[:, -1].float()
        difference = (head(states[:, -1]).float() - own).abs().max()
        if difference <= _HEAD_TOLERANCE * own.abs().max():
            return
    raise SettingsError(
        "chunked_head=True: the student's logits are not its head's of its last states (a soft cap or a scale comes "
        "after it, or states are not the last ones): leave chunked_head out"
    )
