"""Tests of what an architecture does, made on the loaded model: its name does not tell."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["has_plain_head", "is_causal", "keeps_packed_apart", "sample_ids"]

_LENGTH = 8
"""Tokens of a probe: a few of each kind of neighbour; long ones would take a large model seconds on a CPU."""
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
"""Settings of configurations that change logits behind the head; small logits of a probe may not show it."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""By the spread of the logits: the rounding of two shapes of the same computation, far below a token's influence."""


def sample_ids(vocabulary: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return token ids that differ from one another where the vocabulary is large enough, INT64 `[length]`."""
    return (5 + 11 * seed + 13 * torch.arange(length)) % vocabulary


def is_causal(model: Any, vocabulary: int, length: int) -> bool:
    """Whether logits of a token do not change with the tokens that follow.

    Args:
        model: with `logits` in its output.
        vocabulary: number of token ids.
        length: the longest sequence that the model takes.
    """
    length = min(length, _LENGTH)
    if length < 2 or vocabulary < 2:
        return True
    ids = sample_ids(vocabulary, length)
    other = ids.clone()
    other[-1] = (other[-1] + 1) % vocabulary
    logits = _logits(model, torch.stack([ids, other]))
    return _alike(logits[0, :-1], logits[1, :-1])


def keeps_packed_apart(model: Any, vocabulary: int, length: int) -> bool:
    """Whether sequences in a row of a batch, told apart by `position_ids` alone, do not see one another.

    Args:
        model: a causal language model.
        vocabulary: number of token ids.
        length: the longest sequence that the model takes.
    """
    length = min(length, _LENGTH)
    second = sample_ids(vocabulary, length, 1)
    position = torch.arange(length).repeat(2)[None]
    alone = _logits(model, second[None])[0]
    for seed in (0, 2):
        packed = torch.cat([sample_ids(vocabulary, length, seed), second])[None]
        try:
            logits = _logits(model, packed, position_ids=position)
        except TypeError:  # it takes no positions
            return False
        if not _alike(logits[0, length:], alone):
            return False
    return True


def has_plain_head(model: Any, vocabulary: int, length: int) -> bool:
    """Whether logits are the output embedding of the base model's hidden states, and nothing else.

    Args:
        model: with `logits` in its output.
        vocabulary: number of token ids.
        length: the longest sequence that the model takes.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) not in (None, 1, 1.0) for name in _LOGIT_CHANGES):
        return False
    head = model.get_output_embeddings()
    base = model.base_model
    if head is None or base is model:
        return False
    ids = sample_ids(vocabulary, min(length, _LENGTH))[None]
    with torch.inference_mode():
        hidden = base(input_ids=ids.to(model.device), use_cache=False)[0]
        if hidden.shape[-1] != getattr(head, "in_features", None):
            return False
        return bool(torch.equal(head(hidden), _logits(model, ids)))


def _logits(model: Any, ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    on_device = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids.to(model.device), use_cache=False, **on_device).logits
    return logits


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    tolerance = _TOLERANCE.get(first.dtype, 1e-3) * float(second.float().std())
    return bool((first.float() - second.float()).abs().max() <= tolerance)
