"""Losses over the tokens of sequences: row t holds token t and the prediction of token t + 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from edl.distill.compress import TopK
from edl.distill.divergences import (
    FLOOR,
    SUM_TOLERANCE,
    Reduction,
    bucket_log_probabilities,
    check_distinct,
    check_divergence,
    check_reduction,
    divergence,
    divisor,
    hard_targets,
    kept_rows,
    mixed_losses,
    teachers_part,
    total,
    widened,
)
from edl.distill.losses.mixture import TORCH
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_count

TokenCount = int | float | Tensor | None
"""Divisor of a sum over tokens; None for the number of tokens that the mask keeps in this call."""

_CHUNK_LOGITS = 2**25
"""Logits per chunk: 128 MiB in float32, of which a few copies exist at once. With only a few hundred tokens per chunk,
or fewer, the head's matrix product no longer fully uses an accelerator."""

_USUAL_VOCABULARY = 2**17  # if neither labels nor head give its size


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

    For 8,192 tokens and a vocabulary of 152,000, the logits take 5 GB in float32, and a loss keeps several copies. This
    function computes each chunk's logits, and computes them again in the backward pass. Masked tokens cost nothing.
    Source of the idea: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024.

    Args:
        hidden: Hidden states before the head, floating-point [rows, ..., features].
        head: Weight of the head, [vocabulary, features], or a function from states to logits, such as `model.lm_head`.
        labels: Labels of as many rows.
        mask: Token mask; see `token_loss`.
        beta: Direction of the divergence; see `token_loss`.
        hard_labels: Targets for `hard_weight`; see `token_loss`.
        hard_weight: Weight of the cross-entropy; see `token_loss`.
        temperature: Temperature of the labels; see `token_loss`.
        token_count: Divisor of the sum over tokens; see `token_loss`.
        floor: Smallest teacher probability; see `token_loss`.
        padded_vocabulary: Whether the vocabularies may differ in size; see `token_loss`.
        chunk_tokens: Number of tokens per chunk; None for the number of tokens that gives about 33 million logits.

    Returns:
        The sum over tokens divided by their count, like `token_loss` with reduction "mean".

    Raises:
        SettingsError: A shape, type or value is invalid.
    """
    check_divergence(labels, beta, temperature, floor)
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.ndim < 2:
        found = f"{hidden.dtype} {list(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
        raise SettingsError(f"hidden states are {found}: expected floating-point [rows, ..., features]")
    if hidden.shape[:-1] != labels.ids.shape[:-1]:
        raise SettingsError(
            f"hidden states are {list(hidden.shape)}, top-k labels {list(labels.ids.shape)}: the rows do not match"
        )
    if chunk_tokens is not None and not is_count(chunk_tokens):
        raise SettingsError(f"chunk_tokens={chunk_tokens!r}: must be a whole number of at least 1, or None")
    rows = hidden.reshape(-1, hidden.shape[-1])
    parts = [
        TORCH.tensor(labels.ids, hidden).reshape(-1, labels.k),
        TORCH.tensor(labels.values, hidden).reshape(-1, labels.k),
        TORCH.tensor(labels.tail_lse, hidden).reshape(-1),
    ]
    kept = kept_rows(mask, hidden)
    targets = hard_targets(hard_labels, hard_weight, hidden, kept)
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
        summed: Tensor = mixed_losses(losses, logits, hard, hard_weight).sum()
        return summed

    size = chunk_tokens or max(1, _CHUNK_LOGITS // _vocabulary(head, labels))
    # `split` gives a chunk even if no token is left, so every parameter of the head has a gradient, as DDP requires.
    chunks = zip(*(torch.split(part, size) for part in (rows, *parts)), strict=True)
    losses = torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks])
    loss: Tensor = losses.sum() / divisor(token_count, rows.shape[0], losses)
    return loss


def _vocabulary(head: Tensor | Callable[[Tensor], Tensor], labels: TopK) -> int:
    if isinstance(head, Tensor):
        return max(head.shape[0], 1)
    found = getattr(head, "out_features", None)
    return found if isinstance(found, int) and found > 0 else labels.classes or _USUAL_VOCABULARY


KLEstimator: TypeAlias = Literal["k1", "k3"]
"""Estimators of a KL divergence from samples, with Schulman's names."""

_MOST_NATS = 20.0
"""Limit for the absolute log-ratio of a sampled token (e^20 is 5e8). float32 overflows at e^88. Well below that, a
single token that one of the models finds almost impossible would dominate the loss."""


def token_log_probabilities(student_logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the student's log-probabilities of `targets`.

    Args:
        student_logits: Logits of the student, floating-point [rows, ..., vocabulary].
        targets: Token ids, whole numbers [rows, ...], or [rows, ..., m] for m tokens per row. Negative values, such as
            -100 for padding, count as token 0; exclude them with the loss's mask.
        temperature: Temperature at which the student sampled the tokens.

    Returns:
        Log-probabilities in the shape of `targets`, at least float32.

    Raises:
        SettingsError: The shapes do not agree.
    """
    student = widened(student_logits)
    scaled = student if temperature == 1 else student / temperature
    single = targets.ndim == student.ndim - 1
    ids = (targets.unsqueeze(-1) if single else targets).to(student.device).long().clamp(min=0)
    if ids.shape[:-1] != student.shape[:-1]:
        raise SettingsError(f"targets are {list(targets.shape)}, logits {list(student.shape)}: the rows do not match")
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

    Let r = P(token) / Q(token), where P is the teacher's probability and Q the student's. The value is -log r (k1:
    unbiased, negative for some tokens) or r - 1 - log r (k3: unbiased, never negative, lower variance). Source:
    Schulman, "Approximating KL Divergence", 2020.

    With either estimator, the gradient is (log Q - log P) ∇log Q, whose expectation over tokens sampled from Q is the
    gradient of the KL at that position. Differentiating the values would give a different gradient: for k1, its
    expectation is 0; for k3, its expectation is the gradient of the forward KL(teacher ‖ student). Source: Tang and
    Munos, "On a few pitfalls in KL divergence gradient estimation for RL", 2025. The effect of a token on later tokens
    is ignored, as in token-level on-policy distillation.

    Args:
        student: Log-probabilities of the sampled tokens, floating-point [rows, ...]; see `token_log_probabilities`.
        teacher: The teacher's log-probabilities of the same tokens, at the same temperature. The ratio of the teacher's
            probability to the student's is limited to the range from e^-20 to e^20, even if a log-probability is -inf.
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
    log_p = teachers_part(teacher, log_q)
    if log_p.shape != log_q.shape:
        raise SettingsError(
            f"the student's log-probabilities are {list(log_q.shape)}, the teacher's {list(log_p.shape)}: "
            "both must be for the sampled tokens [rows, ...]"
        )
    kept = kept_rows(mask, log_q.unsqueeze(-1))
    if kept is not None:
        # Mask the inputs, not only the losses: a gradient of 0 times NaN would be NaN.
        log_q, log_p = torch.where(kept, log_q, 0.0), torch.where(kept, log_p, 0.0)
    _check_log_probabilities("the student's log-probabilities", log_q)
    _check_log_probabilities("the teacher's log-probabilities", log_p)
    ratio = (log_q.detach() - log_p).clamp(-_MOST_NATS, _MOST_NATS)
    value = ratio if estimator == "k1" else torch.expm1(-ratio) + ratio
    slope = ratio * log_q
    loss: Tensor = total(value + (slope - slope.detach()), kept, token_count, reduction)
    return loss


def target_labels(targets: Tensor | Array, log_probabilities: Tensor | Array, *, classes: int | None = None) -> TopK:
    """Return labels for `token_loss` over tokens that the student chose, such as its most likely tokens.

    ::

        targets = student_logits.topk(16).indices  # sent to the teachers as `targets`, in addition to `ids`
        labels = target_labels(targets, target_logprobs)
        token_loss(student_logits, labels, mask=mask, beta=1).backward()

    In the reverse direction the student's probabilities are the weights, so the student's most likely tokens matter
    more than the teacher's. The tail is 1 minus the sum of the teacher's probabilities. In float32, a tail below about
    1e-6 is only rounding error. This does no harm, because the default floor of the reverse direction is 1e-6. In half
    precision, the rounding error would be 1e-3.

    Args:
        targets: Token ids, whole numbers [rows, ..., m]; no row contains the same id twice.
        log_probabilities: The teacher's log-probabilities at temperature 1, in the shape of `targets`; float32 or
            wider.
        classes: Size of the vocabulary; None if unknown. If all its tokens are targets, the tail is empty.

    Returns:
        Labels with temperature 1 whose arrays are tensors on the device of `targets`.

    Raises:
        SettingsError: The shapes do not match, or log-probabilities have half precision. On the CPU, also: a row has a
            log-probability above 0, its probabilities sum to more than 1, or it contains a token twice.
    """
    ids = TORCH.tensor(targets, targets if isinstance(targets, Tensor) else torch.empty(0))
    values = TORCH.tensor(log_probabilities, ids).detach()
    if ids.ndim < 2 or ids.shape != values.shape or ids.is_floating_point() or not values.is_floating_point():
        raise SettingsError(
            f"targets are {ids.dtype} {list(ids.shape)}, log-probabilities {values.dtype} {list(values.shape)}: "
            "expected whole numbers and floating-point, both [rows, ..., m]"
        )
    if values.element_size() < 4:
        raise SettingsError(
            f"log-probabilities are {values.dtype}: the tail, 1 minus their sum, would be rounding error. "
            "Teachers answer float32; compute your own model's log_softmax in float32"
        )
    _check_log_probabilities("log-probabilities", values)
    check_distinct(TORCH, ids)
    mass = widened(values).double().logsumexp(dim=-1)
    if TORCH.can_look(mass) and (most := float(mass.max().exp())) > 1 + SUM_TOLERANCE:
        raise SettingsError(f"the probabilities of a row sum to {most:g}: must be at most 1")
    left = torch.where(mass < 0, torch.log(-torch.expm1(mass.clamp(max=0))), -torch.inf)  # at 1, no tail is left
    tail_lse = left.masked_fill(torch.isnan(mass), torch.nan).float()
    return TopK(ids, values, tail_lse, 1.0, classes)  # type: ignore[arg-type]  # tensors, as after `TopK.map`


def _check_log_probabilities(of: str, values: Tensor) -> None:
    """Raise a `SettingsError` for a log-probability above 0, on the CPU."""
    if TORCH.can_look(values) and (most := float(values.detach().max())) > SUM_TOLERANCE:
        raise SettingsError(f"{of} reach up to {most:g}: the logarithm of a probability is at most 0")
