"""The loss of a student, of its outputs and the teachers' labels: sums over the rows of a whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from edl.distill.compress import TopK
from edl.distill.losses import chunked_token_loss, token_loss
from edl.distill.transformers.arguments import DistillArguments
from edl.distill.transformers.texts import IGNORED, learned_rows, next_tokens
from edl.errors import SettingsError

__all__ = ["all_classes", "check_head", "hard_labels", "logits_of", "student_loss"]

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

    Args:
        arguments: which loss.
        batch: with the labels of its own, if `hard_weight` needs them.
        labels: the teachers', a row for each of the student's.
        count: rows of the whole step that are learned; or two: these, and those of them with a label of the batch's.
        logits: the student's, [rows, ..., classes]; with `head` its states before that.
        head: makes logits of states, for some rows at a time; None where `logits` are the logits.

    Raises:
        SettingsError: labels and logits that do not go together.
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

    Args:
        arguments: what a row is.
        batch: with its labels, -100 for rows that have none.
        class_count: the student's, None where that is not known yet.
        mask: the rows that are learned, None for all: labels of others may be anything.

    Raises:
        SettingsError: they are no numbers of classes.
    """
    if arguments.of_tokens:
        classes = next_tokens(batch, shifted=arguments.task == "causal-lm")
    else:
        found = batch.get("labels")
        if not isinstance(found, Tensor) or found.is_floating_point() or found.ndim != 1:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise SettingsError(f"labels are {what}: hard_weight needs a class's number for each sample, or 0")
        classes = found
    wrong = (classes < 0) & (classes != IGNORED)
    if class_count is not None:
        wrong |= classes >= class_count
    if mask is not None:
        wrong &= mask
    if wrong.any():
        last = "the last class" if class_count is None else class_count - 1
        raise SettingsError(
            f"labels hold {int(classes[wrong][0])}: must be from 0 to {last}, or {IGNORED} for what has no label"
        )
    ids = classes.clamp(min=0).unsqueeze(-1)
    sure = torch.zeros(ids.shape, device=ids.device)
    return TopK(ids, sure, torch.full_like(sure[..., 0], -torch.inf))  # type: ignore[arg-type]  # tensors, as after map


def all_classes(logits: Tensor, temperature: float) -> TopK:
    """Return whole logits [rows, classes] as labels that keep every class."""
    ids = torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
    tail = torch.full(logits.shape[:-1], -torch.inf, device=logits.device)
    return TopK(ids, logits, tail, temperature, logits.shape[-1])  # type: ignore[arg-type]  # tensors, as after map


def logits_of(outputs: Any) -> Tensor:
    """Return the logits among a model's outputs.

    Raises:
        SettingsError: there are none.
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor):
        names = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise SettingsError(f"the student returned {names} without labels: its outputs must have logits")
    return logits


def check_head(states: Tensor, logits: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Check that a head alone makes the model's logits of its last states.

    Args:
        states: [rows, length, features], before the head.
        logits: [rows, some, classes], the model's own of the last tokens.
        head: the head.

    Raises:
        SettingsError: it does not.
    """
    with torch.no_grad():
        own = logits[:, -1].float()
        difference = (head(states[:, -1]).float() - own).abs().max()
        if difference <= _HEAD_TOLERANCE * own.abs().max():
            return
    raise SettingsError(
        "chunked_head=True: the student's logits are not its head's of its last states (a soft cap or a scale comes "
        "after it, or states are not the last ones): leave chunked_head out"
    )
