"""Tests of what an architecture does, made on the loaded model: its name does not tell.

transformers chooses the frequencies of some rotary embeddings by the largest position of the whole call, so that labels
of a sequence depend on those that share its batch ("longrope"), or on earlier calls ("dynamic" beyond its length).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from edl.errors import SettingsError

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
    """Whether logits of a token do not change with the tokens that follow."""
    length = min(length, _LENGTH)
    if length < 2 or vocabulary < 2:
        return True
    ids = sample_ids(vocabulary, length)
    other = ids.clone()
    other[-1] = (other[-1] + 1) % vocabulary
    logits = _logits(model, torch.stack([ids, other]))
    return _alike(logits[0, :-1], logits[1, :-1])


def keeps_packed_apart(model: Any, vocabulary: int, length: int) -> bool:
    """Whether sequences in a row of a batch, told apart by `position_ids` alone, do not see one another."""
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
    """Whether logits are the output embedding of the base model's hidden states, and nothing else."""
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


def find_borders(model: Any, vocabulary: int, longest: int) -> tuple[int, ...]:
    """Return lengths that tell apart what may be computed together: sequences up to one of them, and longer ones."""
    config = model.config.get_text_config()
    kind = type(model).__name__
    if getattr(config, "attention_type", None) == "block_sparse":
        raise SettingsError(
            f"--hf: {kind} changes its attention for good when a short sequence comes: set attention_type to "
            "original_full in config.json"
        )
    found = set()
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if "dynamic" in rope["rope_type"] and not rope.get("alpha"):  # with alpha they are fixed, and HunYuan's
            original = getattr(config, "max_position_embeddings", longest)
            if longest > original:
                raise SettingsError(
                    f"--hf: the labels that {kind} gives a sequence depend on earlier calls beyond {original} tokens "
                    f"(rope_type dynamic): serve it with --max-tokens {original}"
                )
        if rope["rope_type"] == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            found.add(rope.get("original_max_position_embeddings") or original or config.max_position_embeddings)
    borders = tuple(sorted(border for border in found if border < longest))
    ends = (0, *borders, longest)
    for start, end in itertools.pairwise(ends):
        if not keeps_neighbours_apart(model, vocabulary, start, end):
            raise SettingsError(
                f"--hf: the labels that {kind} gives a sequence change with the length of others in its batch"
                f" (rope_parameters: {getattr(config, 'rope_parameters', None)})"
            )
    return borders


def _ropes(parameters: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each rotary embedding; some models have them by the type of a layer."""
    if not isinstance(parameters, Mapping):
        return
    if isinstance(parameters.get("rope_type"), str):
        yield parameters
        return
    for value in parameters.values():
        yield from _ropes(value)
