"""Losses over the tokens of sequences: row t holds token t and the prediction of token t + 1.

`token_loss` takes the student's logits. `chunked_token_loss` takes its hidden states and applies the head to some
tokens at a time, so that the logits of all tokens never exist at once. `sampled_kl` and `target_labels` are for tokens
that the student chose: those that it sampled, or those that it finds most likely.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from edl.distill.compress import TopK
from edl.distill.losses.terms import (
    SUM_TOLERANCE,
    as_tensor,
    bucket_log_probabilities,
    check_classes,
    check_distinct,
    check_log_probabilities,
    expected,
    on_cpu,
    widened,
)
from edl.distill.mixture import FLOOR, NO_LABEL, Reduction, check_divergence, check_hard_weight, check_reduction
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_count

TokenCount = int | float | Tensor | None
"""Divisor of a sum over tokens; None for the number of tokens in this call that the mask keeps."""


def token_loss(
    student_logits: Tensor,
    labels: TopK,
    *,
    mask: Tensor | None = None,
    beta: float = 0.0,
    hard_labels: Tensor | None = None,
    hard_weight: float = 0.0,
    temperature: float | None = None,
    token_count: TokenCount = None,
    floor: float = FLOOR,
    padded_vocabulary: bool = False,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute T² times the generalized Jensen-Shannon divergence of teacher and student, token by token.

    P and Q are the distributions of teacher and student at temperature T over the k tokens kept and the tail. With
    M = `beta` P + (1 - `beta`) Q the divergence is

    - KL(P ‖ Q), the forward direction, for `beta` 0;
    - `beta` KL(P ‖ M) + (1 - `beta`) KL(Q ‖ M) between;
    - KL(Q ‖ P'), the reverse direction, for `beta` 1. P' is P with no probability below `floor`, scaled to sum to 1:
      KL(Q ‖ P) is infinite where a teacher says 0.

    Source: Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", 2024,
    section 2, and TRL's `generalized_jsd_loss`, whose `beta` this is. As there, the loss tends to 0 as `beta` tends to
    0 or 1, and is a whole KL at 0 and at 1. TRL does not multiply by T².

    The same divergence over k tokens and the tail is never more than the one over the whole vocabulary, and equal to it
    with every token kept, or where the two distributions differ by a factor within the tail.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., vocabulary].
        labels: Labels of as many rows, as numpy arrays or tensors.
        mask: Token mask, bool or integer [rows, ...], 0 for tokens that do not count. Such tokens add nothing and get a
            gradient of 0, even if their logits or labels are NaN. Values below 0, such as -100 in labels, are refused
            on the CPU. None if all tokens count.
        beta: Direction of the divergence, from 0 (forward KL) to 1 (reverse KL).
        hard_labels: Targets for `hard_weight`, whole numbers [rows, ...]: token t + 1 at row t. Rows with -100 have no
            cross-entropy, but count in the divisor like the others.
        hard_weight: Share of the cross-entropy with `hard_labels`, from 0 to 1; the divergence has the rest. The two
            are mixed token by token, so both are divided by the same count.
        temperature: Temperature T, which must equal that of the labels; None to use theirs.
        token_count: Divisor of the sum over tokens with reduction "mean"; None for the tokens kept here. With
            gradient accumulation, or several processes, give the number of tokens of the whole optimizer step, such
            as `num_items_in_batch` of Hugging Face's Trainer, so that each token weighs the same.
        floor: Smallest teacher probability in the reverse direction, above 0 and below 1.
        padded_vocabulary: Whether student and teacher may have different numbers of classes, as models with the same
            tokenizer but different padding of the vocabulary do. Classes that one lacks count in the other's tail.
        reduction: Reduction: "mean" over tokens, "sum", or "none" for [rows, ...].

    Returns:
        The loss, or losses [rows, ...] with reduction "none"; 0 if the mask keeps no token.

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    check_divergence(labels, beta, temperature, floor)
    check_reduction(reduction)
    kept = kept_rows(mask, student_logits.shape[:-1], student_logits.device)
    if kept is not None:
        # The inputs, not only the losses: a gradient of 0 times NaN would be NaN.
        student_logits = torch.where(kept.unsqueeze(-1), student_logits, 0.0)
        labels = masked_labels(labels, kept)
    targets = hard_targets(hard_labels, hard_weight, student_logits.shape[:-1], kept, student_logits.device)
    log_p, log_q = bucket_log_probabilities(student_logits, labels, padded_vocabulary=padded_vocabulary)
    losses = divergence(log_p, log_q, beta, floor) * labels.temperature**2
    losses = mixed_losses(losses, student_logits, targets, hard_weight)
    return total(losses, kept, token_count, reduction)


def divergence(log_p: Tensor, log_q: Tensor, beta: float, floor: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence [rows, ...] of distributions [rows, ..., buckets]."""
    if beta == 0:
        return expected(log_p, log_p - log_q)
    # Finite, since 0 times infinity is NaN, and so is its gradient. A quarter, so that no difference overflows.
    lowest = torch.finfo(log_q.dtype).min / 4
    log_q = log_q.clamp(min=lowest)
    if beta == 1:
        floored = log_p.clamp(min=math.log(floor))
        return (log_q.exp() * (log_q - floored.log_softmax(dim=-1))).sum(dim=-1)
    log_p = log_p.clamp(min=lowest)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    teacher, student = log_p.exp() * (log_p - log_m), log_q.exp() * (log_q - log_m)
    return (beta * teacher + (1 - beta) * student).sum(dim=-1)


def hard_targets(
    hard_labels: Tensor | None, hard_weight: float, rows: torch.Size, kept: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return the hard labels that have a part in the loss, int64 on `device`; None where they have no weight.

    `hard_labels`: whole numbers of the shape of `rows`, -100 for none; or None. `kept`: the mask as `kept_rows`
    returns it: where it leaves a row out, its label may be anything.

    Raises:
        SettingsError: a share that cannot be, labels that are missing, or of another shape or type.
    """
    check_hard_weight(hard_weight, hard_labels)
    if hard_weight == 0:
        return None
    if not isinstance(hard_labels, Tensor) or hard_labels.is_floating_point() or hard_labels.is_complex():
        found = hard_labels.dtype if isinstance(hard_labels, Tensor) else type(hard_labels).__name__
        raise SettingsError(f"hard_labels are {found}: expected a tensor of whole numbers")
    if hard_labels.shape != rows:
        raise SettingsError(
            f"hard_labels are {list(hard_labels.shape)}, the logits have rows {list(rows)}: they do not agree"
        )
    targets = hard_labels.to(device).long()
    return targets if kept is None else targets.masked_fill(~kept, NO_LABEL)


def mixed_losses(losses: Tensor, student_logits: Tensor, targets: Tensor | None, hard_weight: float) -> Tensor:
    """Return losses [rows, ...] in which the cross-entropy with hard labels has a share."""
    if targets is None:
        return losses
    classes = student_logits.shape[-1]
    check_classes(targets, classes, NO_LABEL)
    flat = widened(student_logits).reshape(-1, classes)
    hard = F.cross_entropy(flat, targets.reshape(-1), ignore_index=NO_LABEL, reduction="none").reshape(targets.shape)
    # Not 0 times the divergence, which may be NaN.
    return hard if hard_weight == 1 else (1 - hard_weight) * losses + hard_weight * hard


def kept_rows(mask: Tensor | None, rows: torch.Size, device: torch.device) -> Tensor | None:
    """Return the mask as booleans on `device`, None without.

    `mask`: bool or integer, of the shape of `rows`, or None.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise SettingsError(f"the mask is {found}: expected a tensor of bool or whole numbers, 0 for what is left out")
    if mask.shape != rows:
        raise SettingsError(f"the mask is {list(mask.shape)}, the logits have rows {list(rows)}: they do not agree")
    if on_cpu(mask) and bool((mask < 0).any()):
        raise SettingsError(f"the mask holds {int(mask.min())}: it is 0 for what is left out, of labels labels != -100")
    return mask.to(device) > 0


def masked_labels(labels: TopK, kept: Tensor) -> TopK:
    """Return labels whose left out rows are zeros: padding may hold invalid ids and values."""
    if labels.ids.shape[:-1] != kept.shape:
        raise SettingsError(
            f"logits have rows {list(kept.shape)}, top-k labels are {list(labels.ids.shape)}: the rows do not agree"
        )

    def masked(array: object) -> Tensor:
        tensor = as_tensor(array, kept.device)  # type: ignore[arg-type]  # numpy's, or tensors after `TopK.map`
        return tensor.masked_fill(~kept.reshape(kept.shape + (1,) * (tensor.ndim - kept.ndim)), 0)

    return labels.map(masked)


def total(losses: Tensor, kept: Tensor | None, token_count: TokenCount, reduction: Reduction) -> Tensor:
    """Return losses [rows, ...], their sum, or their sum divided by the count of tokens, at least 1."""
    if kept is not None:
        losses = torch.where(kept, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / _divisor(token_count, losses.numel() if kept is None else kept.sum(), losses)


def _divisor(token_count: TokenCount, here: int | Tensor, losses: Tensor) -> Tensor | float:
    count = here if token_count is None else token_count
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise SettingsError(f"token_count is of shape {list(count.shape)}: expected a single number")
        return count.detach().reshape(()).to(losses.device, losses.dtype).clamp(min=1)
    if not isinstance(count, numbers.Real) or not 0 <= count < math.inf or (count == 0 and int(here)):
        raise SettingsError(f"token_count={count!r}: must be a number of tokens, or None for those that the mask keeps")
    return max(float(count), 1.0)


_CHUNK_LOGITS = 2**25
"""Logits at a time: 128 MiB in float32, of which a handful are alive at once. More takes more memory; with some hundred
tokens or fewer a chunk, the head's matrix product no longer fills an accelerator."""

_USUAL_VOCABULARY = 2**17
"""Size of a vocabulary where neither labels nor head say it; too small a guess makes chunks too large by as much."""


def chunked_token_loss(
    hidden: Tensor,
    head: Tensor | Callable[[Tensor], Tensor],
    labels: TopK,
    *,
    mask: Tensor | None = None,
    beta: float = 0.0,
    hard_labels: Tensor | None = None,
    hard_weight: float = 0.0,
    temperature: float | None = None,
    token_count: TokenCount = None,
    floor: float = FLOOR,
    padded_vocabulary: bool = False,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Compute `token_loss` of `head(hidden)`, with the logits of only one chunk of tokens at a time.

    The logits of 8,192 tokens over 152,000 are 5 GB in float32, and a loss keeps several copies of them. Here each
    chunk's are computed, and computed again for the backward pass. Tokens that the mask leaves out cost nothing, not
    even the head. The idea: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024.

    Args:
        hidden: Hidden states before the head, floating-point [rows, ..., features].
        head: Weight of the head, [vocabulary, features], or a function from states to logits, such as `model.lm_head`.
        labels: Labels of as many rows.
        mask: Token mask; see `token_loss`.
        beta: Direction of the divergence; see `token_loss`.
        hard_labels: Targets for `hard_weight`; see `token_loss`.
        hard_weight: Share of the cross-entropy; see `token_loss`.
        temperature: Temperature of the labels; see `token_loss`.
        token_count: Divisor of the sum over tokens; see `token_loss`.
        floor: Smallest teacher probability; see `token_loss`.
        padded_vocabulary: Whether the vocabularies may differ in size; see `token_loss`.
        chunk_tokens: Number of tokens per chunk; None for as many as have about 33 million logits.

    Returns:
        The sum over tokens divided by their count, as `token_loss` with reduction "mean".

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    check_divergence(labels, beta, temperature, floor)
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.ndim < 2:
        found = f"{hidden.dtype} {list(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
        raise SettingsError(f"hidden states are {found}: expected floating-point [rows, ..., features]")
    if hidden.shape[:-1] != labels.ids.shape[:-1]:
        raise SettingsError(
            f"hidden states are {list(hidden.shape)}, top-k labels {list(labels.ids.shape)}: the rows do not agree"
        )
    if chunk_tokens is not None and not is_count(chunk_tokens):
        raise SettingsError(f"chunk_tokens={chunk_tokens!r}: must be a whole number of at least 1, or None")
    rows = hidden.reshape(-1, hidden.shape[-1])
    parts = [
        as_tensor(labels.ids, hidden.device).reshape(-1, labels.k),
        as_tensor(labels.values, hidden.device).reshape(-1, labels.k),
        as_tensor(labels.tail_lse, hidden.device).reshape(-1),
    ]
    kept = kept_rows(mask, hidden.shape[:-1], hidden.device)
    targets = hard_targets(hard_labels, hard_weight, hidden.shape[:-1], kept, hidden.device)
    if targets is not None:
        parts.append(targets.reshape(-1))
    if kept is not None:
        positions = kept.reshape(-1).nonzero().squeeze(1)
        rows = rows.index_select(0, positions)
        parts = [part.index_select(0, positions) for part in parts]
    logits_of = (lambda states: F.linear(states, head)) if isinstance(head, Tensor) else head

    def chunk_loss(states: Tensor, ids: Tensor, values: Tensor, tail_lse: Tensor, hard: Tensor | None = None) -> Tensor:
        chunk = TopK(ids, values, tail_lse, labels.temperature, labels.classes)  # type: ignore[arg-type]
        logits = logits_of(states)
        log_p, log_q = bucket_log_probabilities(logits, chunk, padded_vocabulary=padded_vocabulary)
        losses = divergence(log_p, log_q, beta, floor) * labels.temperature**2
        return mixed_losses(losses, logits, hard, hard_weight).sum()

    size = chunk_tokens or max(1, _CHUNK_LOGITS // _vocabulary(head, labels))
    # `split` gives a chunk also where no token is left: each parameter of the head has a gradient then, as DDP wants.
    chunks = zip(*(torch.split(part, size) for part in (rows, *parts)), strict=True)
    losses = torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks])
    return losses.sum() / _divisor(token_count, rows.shape[0], losses)


def _vocabulary(head: Tensor | Callable[[Tensor], Tensor], labels: TopK) -> int:
    if isinstance(head, Tensor):
        return max(head.shape[0], 1)
    found = getattr(head, "out_features", None)
    return found if isinstance(found, int) and found > 0 else labels.classes or _USUAL_VOCABULARY


KLEstimator: TypeAlias = Literal["k1", "k3"]
"""How the value of a KL is estimated from samples, by Schulman's names."""

_MOST_NATS = 20.0
"""Largest log-ratio of a sampled token, either way, e^20 being 5e8. float32 overflows at e^88; long before that a
single token, which one of the two finds all but impossible, would be all of the loss."""


def token_log_probabilities(student_logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the student's log-probabilities of `targets`.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., vocabulary].
        targets: Token ids, whole numbers [rows, ...], or [rows, ..., m] for m tokens each. Negative values, such as
            -100 for padding, count as token 0; exclude them with the loss's mask.
        temperature: Temperature at which the student sampled the tokens.

    Returns:
        Of the shape of `targets`, float32 at least.

    Raises:
        SettingsError: The shapes do not agree.
    """
    student = widened(student_logits)
    scaled = student if temperature == 1 else student / temperature
    single = targets.ndim == student.ndim - 1
    ids = (targets.unsqueeze(-1) if single else targets).to(student.device).long().clamp(min=0)
    if ids.shape[:-1] != student.shape[:-1]:
        raise SettingsError(f"targets are {list(targets.shape)}, logits {list(student.shape)}: the rows do not agree")
    found = scaled.gather(-1, ids) - scaled.logsumexp(dim=-1, keepdim=True)
    return found.squeeze(-1) if single else found


def sampled_kl(
    student: Tensor,
    teacher: Tensor | Array,
    *,
    estimator: KLEstimator = "k3",
    mask: Tensor | None = None,
    token_count: TokenCount = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Estimate KL(student ‖ teacher) from tokens that the student sampled, with the gradient of that KL.

    With r = P(token) / Q(token), Q the student, the value is -log r (k1: without bias, and negative for some tokens) or
    (r - 1) - log r (k3: without bias, never negative, of less variance). Source: Schulman, "Approximating KL
    Divergence", 2020.

    The gradient is (log Q - log P) ∇log Q with either, whose expectation over tokens of Q is the gradient of the KL at
    that position. Differentiating the values would give another: that of k1 has expectation 0, that of k3 is the
    gradient of the forward KL(teacher ‖ student). Source: Tang and Munos, "On a few pitfalls in KL divergence gradient
    estimation for RL", 2025. The effect of a token on later tokens is ignored, as in token-level on-policy
    distillation.

    Args:
        student: Log-probabilities of the sampled tokens, floating-point [rows, ...]; see `token_log_probabilities`.
        teacher: The teacher's log-probabilities of the same tokens, at the same temperature. -inf, and anything below
            e^-20 times the student's probability, counts as that much.
        estimator: Estimator of the value: "k1" or "k3".
        mask: Token mask; see `token_loss`.
        token_count: Divisor of the sum over tokens; see `token_loss`.
        reduction: Reduction: "mean" over tokens, "sum", or "none" for [rows, ...].

    Returns:
        The estimate, or estimates [rows, ...] with reduction "none".

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    check_reduction(reduction)
    if estimator not in ("k1", "k3"):
        raise SettingsError(f"estimator={estimator!r}: must be 'k1' or 'k3'")
    log_q = widened(student)
    log_p = as_tensor(teacher, log_q.device).detach().to(log_q.dtype)
    if log_p.shape != log_q.shape:
        raise SettingsError(
            f"log-probabilities of the student are {list(log_q.shape)}, of the teacher {list(log_p.shape)}: "
            "both must be those of the sampled tokens [rows, ...]"
        )
    kept = kept_rows(mask, log_q.shape, log_q.device)
    if kept is not None:
        # The inputs, not only the losses: a gradient of 0 times NaN would be NaN.
        log_q, log_p = torch.where(kept, log_q, 0.0), torch.where(kept, log_p, 0.0)
    check_log_probabilities("log-probabilities of the student", log_q)
    check_log_probabilities("log-probabilities of the teacher", log_p)
    ratio = (log_q.detach() - log_p).clamp(-_MOST_NATS, _MOST_NATS)
    value = ratio if estimator == "k1" else torch.expm1(-ratio) + ratio
    slope = ratio * log_q
    return total(value + (slope - slope.detach()), kept, token_count, reduction)


def target_labels(targets: Tensor | Array, log_probabilities: Tensor | Array, *, classes: int | None = None) -> TopK:
    """Return labels for tokens that the student chose, such as those it finds most likely, for `token_loss`.

    ::

        targets = student_logits.topk(16).indices  # asked of the teachers: `targets` beside `ids`
        labels = target_labels(targets, target_logprobs)
        token_loss(student_logits, labels, mask=mask, beta=1).backward()

    In the reverse direction the student's probabilities are the weights, so its own most likely tokens matter more than
    the teacher's. The tail is 1 minus the sum of the teacher's probabilities. They are float32, so a tail below about
    1e-6 is rounding error; the floor of the reverse direction is not smaller than that. Half precision is refused,
    because a tail below 1e-3 would be rounding error.

    Args:
        targets: Token ids, whole numbers [rows, ..., m], each at most once in a row.
        log_probabilities: The teacher's log-probabilities at temperature 1, of the same shape; float32 or wider.
        classes: Size of the vocabulary; None if unknown. If all its tokens are targets, the tail is empty.

    Returns:
        Labels of tensors with temperature 1, on the device of `targets`.

    Raises:
        SettingsError: The shapes do not match, log-probabilities have half precision, or, on the CPU, a row's reach
            above 0, sum to more than 1 or have a token twice.
    """
    ids = as_tensor(targets, targets.device if isinstance(targets, Tensor) else torch.device("cpu"))
    values = as_tensor(log_probabilities, ids.device).detach()
    if ids.ndim < 2 or ids.shape != values.shape or ids.is_floating_point() or not values.is_floating_point():
        raise SettingsError(
            f"targets are {ids.dtype} {list(ids.shape)}, log-probabilities {values.dtype} {list(values.shape)}: "
            "expected whole numbers and floating-point, both [rows, ..., m]"
        )
    if values.element_size() < 4:
        raise SettingsError(
            f"log-probabilities are {values.dtype}: what their sum leaves of 1, the tail, would be rounding error. "
            "Teachers answer float32; a model of your own takes its log_softmax in float32"
        )
    check_log_probabilities("log-probabilities", values)
    check_distinct(ids)
    mass = widened(values).double().logsumexp(dim=-1)
    if on_cpu(mass) and (most := float(mass.max().exp())) > 1 + SUM_TOLERANCE:
        raise SettingsError(f"log-probabilities of a row sum to a probability of {most:g}, and 1 is the most")
    # At 1 or, by rounding, above it nothing is left.
    left = torch.where(mass < 0, torch.log(-torch.expm1(mass.clamp(max=0))), -torch.inf)
    tail_lse = left.masked_fill(torch.isnan(mass), torch.nan).float()
    return TopK(ids, values, tail_lse, 1.0, classes)  # type: ignore[arg-type]  # tensors, as after `TopK.map`
