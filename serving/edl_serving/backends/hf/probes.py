"""Tests how the loaded model behaves, because the name of its architecture does not tell.

The transformers library chooses the frequencies of some rotary embeddings by the largest position in the whole call.
The labels of a sequence then depend on the other sequences in its batch ("longrope"), or on earlier calls ("dynamic",
beyond the original length).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from edl.errors import SettingsError

_LENGTH = 8
"""Tokens in a probe. A few tokens are enough, and a long probe of a large model would take seconds on a CPU."""
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")
"""Configuration settings that change logits after the head. A probe with small logits may not show the change."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference that counts as equal, relative to the standard deviation of the logits. It is larger than the
rounding differences when one computation runs in two shapes, and far smaller than the influence of a token."""


def sample_ids(vocabulary: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return token ids, INT64 `[length]`, all different if the vocabulary is large enough."""
    return (5 + 11 * seed + 13 * torch.arange(length)) % vocabulary


def is_causal(model: Any, vocabulary: int, length: int) -> bool:
    """Return whether the logits of a token are independent of the tokens after it."""
    length = min(length, _LENGTH)
    if length < 2 or vocabulary < 2:
        return True
    ids = sample_ids(vocabulary, length)
    other = ids.clone()
    other[-1] = (other[-1] + 1) % vocabulary
    logits = _logits(model, torch.stack([ids, other]))
    return _alike(logits[0, :-1], logits[1, :-1])


def keeps_packed_apart(model: Any, vocabulary: int, length: int) -> bool:
    """Return whether packed sequences stay independent of one another when only `position_ids` separate them."""
    length = min(length, _LENGTH)
    second = sample_ids(vocabulary, length, 1)
    position = torch.arange(length).repeat(2)[None]
    alone = _logits(model, second[None])[0]
    for seed in (0, 2):
        packed = torch.cat([sample_ids(vocabulary, length, seed), second])[None]
        try:
            logits = _logits(model, packed, position_ids=position)
        except TypeError:  # the model accepts no positions
            return False
        if not _alike(logits[0, length:], alone):
            return False
    return True


def keeps_neighbours_apart(model: Any, vocabulary: int, start: int, end: int) -> bool:
    """Return whether a sequence's output stays the same beside neighbours with low, high and again low positions."""
    length = min(end - start, _LENGTH)
    ids = sample_ids(vocabulary, length)
    short = torch.arange(length)
    short[-1] += start
    long = torch.arange(end - length, end)
    before, beside, after = (
        _first_of(model, torch.stack([ids, ids]), torch.stack([short, neighbour])) for neighbour in (short, long, short)
    )
    if before is None or beside is None or after is None:  # the model accepts no positions, or only one sequence
        return True
    return _alike(before, beside) and _alike(before, after)


def _first_of(model: Any, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor | None:
    """Return the model's output for the first of two sequences; None if the output cannot be computed."""
    inputs: dict[str, Any] = {"input_ids": ids.to(model.device), "position_ids": position.to(model.device)}
    for options in ({"use_cache": False}, {}):  # encoders do not accept `use_cache`
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
    """Return whether the logits are exactly the output embedding applied to the base model's hidden states."""
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
    """Return the lengths L for which sequences of up to L tokens must not be computed together with longer ones.

    Raises `SettingsError` if labels would still depend on other sequences in the batch, or on earlier calls.
    """
    config = model.config.get_text_config()
    kind = type(model).__name__
    if getattr(config, "attention_type", None) == "block_sparse":
        raise SettingsError(
            f"--hf: {kind} changes its attention permanently after a short sequence: set attention_type to "
            "original_full in config.json"
        )
    found = set()
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if "dynamic" in rope["rope_type"] and not rope.get("alpha"):  # with alpha (HunYuan) frequencies are fixed
            original = getattr(config, "max_position_embeddings", longest)
            if longest > original:
                raise SettingsError(
                    f"--hf: beyond {original} tokens, the labels that {kind} gives a sequence depend on earlier calls "
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
                f"--hf: the labels that {kind} gives a sequence change with the lengths of other sequences in its batch"
                f" (rope_parameters: {getattr(config, 'rope_parameters', None)})"
            )
    return borders


def _ropes(parameters: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each rotary embedding; some models have one for each type of layer."""
    if not isinstance(parameters, Mapping):
        return
    if isinstance(parameters.get("rope_type"), str):
        yield parameters
        return
    for value in parameters.values():
        yield from _ropes(value)
