"""Tests of what an architecture does, made on the loaded model: its name does not tell."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["has_plain_head", "is_causal", "keeps_neighbours_apart", "keeps_packed_apart", "sample_ids"]

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


def keeps_neighbours_apart(model: Any, vocabulary: int, start: int, end: int) -> bool:
    """Whether the model computes the same of a sequence beside a short one and a long one, and once more afterwards.

    The positions say how long they are: a few tokens of each are enough.

    Args:
        model: of any task.
        vocabulary: number of token ids.
        start: the sequence and its neighbours are longer than this.
        end: length of the long one.
    """
    length = min(end - start, _LENGTH)
    ids = sample_ids(vocabulary, length)
    short = torch.arange(length)
    short[-1] += start
    long = torch.arange(end - length, end)
    before, beside, after = (
        _first_of(model, torch.stack([ids, ids]), torch.stack([short, neighbour])) for neighbour in (short, long, short)
    )
    if before is None or beside is None or after is None:  # it takes no positions, or one sequence at a time
        return True
    return _alike(before, beside) and _alike(before, after)


def _first_of(model: Any, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor | None:
    """Return the output of the first sequence of two; None if it cannot be computed."""
    inputs: dict[str, Any] = {"input_ids": ids.to(model.device), "position_ids": position.to(model.device)}
    for options in ({"use_cache": False}, {}):  # encoders take no such argument
        try:
            with torch.inference_mode():
                answer = model(**inputs, **options)
        except (TypeError, ValueError):
            continue
        logits: torch.Tensor | None = getattr(answer, "logits", None)
        output: torch.Tensor = answer[0] if logits is None else logits
        return output[0]
    return None


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
