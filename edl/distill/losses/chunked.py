"""Token losses without the logits of all tokens: the student's head is applied to some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from edl.distill.compress import TopK
from edl.distill.losses.buckets import bucket_log_probabilities
from edl.distill.losses.terms import as_tensor
from edl.distill.losses.tokens import (
    FLOOR,
    TokenCount,
    check_divergence,
    divergence,
    hard_targets,
    kept_rows,
    mixed_losses,
    total,
)
from edl.errors import SettingsError
from edl.settings import is_count

__all__ = ["chunked_token_loss"]

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
    """Compute `token_loss` of `head(hidden)`, while the logits of a chunk of tokens alone exist at a time.

    The logits of 8,192 tokens over 152,000 are 5 GB in float32, and a loss keeps several copies of them. Here each
    chunk's are computed, and computed again for the backward pass. Tokens that the mask leaves out cost nothing, not
    even the head. The idea: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024.

    Args:
        hidden: states before the head, floating-point [rows, ..., features].
        head: weight [vocabulary, features], or what makes logits of states, such as `model.lm_head`.
        labels: of as many rows.
        mask: see `token_loss`.
        beta: see `token_loss`.
        hard_labels: see `token_loss`.
        hard_weight: see `token_loss`.
        temperature: see `token_loss`.
        token_count: see `token_loss`.
        floor: see `token_loss`.
        padded_vocabulary: see `token_loss`.
        chunk_tokens: tokens at a time; None for as many as have 33 million logits together.

    Returns:
        The sum over tokens divided by their count, as `token_loss` with reduction "mean".

    Raises:
        SettingsError: shapes, types or values that cannot be.
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
    count = rows.shape[0] if token_count is None else token_count
    return total(losses, None, count, "mean")


def _vocabulary(head: Tensor | Callable[[Tensor], Tensor], labels: TopK) -> int:
    if isinstance(head, Tensor):
        return max(head.shape[0], 1)
    found = getattr(head, "out_features", None)
    return found if isinstance(found, int) and found > 0 else labels.classes or _USUAL_VOCABULARY
