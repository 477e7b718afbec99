"""What of a model changes with the length of a call: its sequences must not be computed with just any others.

transformers chooses the frequencies of some rotary embeddings by the largest position of the whole call, so that labels
of a sequence depend on those that share its batch ("longrope"), or on earlier calls ("dynamic" beyond its length).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from edl.errors import SettingsError
from edl_serving.backends.hf import probes

__all__ = ["find_borders"]


def find_borders(model: Any, vocabulary: int, longest: int) -> tuple[int, ...]:
    """Return lengths that tell apart what may be computed together: sequences up to one of them, and longer ones.

    Args:
        model: of transformers, loaded.
        vocabulary: number of token ids.
        longest: tokens of the longest sequence.

    Raises:
        SettingsError: labels depend on others in the batch, or on earlier calls, all the same.
    """
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
            _check_dynamic(kind, getattr(config, "max_position_embeddings", longest), longest)
        if rope["rope_type"] == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            found.add(rope.get("original_max_position_embeddings") or original or config.max_position_embeddings)
    borders = tuple(sorted(border for border in found if border < longest))
    ends = (0, *borders, longest)
    for start, end in itertools.pairwise(ends):
        if not probes.keeps_neighbours_apart(model, vocabulary, start, end):
            raise SettingsError(
                f"--hf: the labels that {kind} gives a sequence change with the length of others in its batch"
                f" (rope_parameters: {getattr(config, 'rope_parameters', None)})"
            )
    return borders


def _check_dynamic(kind: str, original: int, longest: int) -> None:
    if longest > original:
        raise SettingsError(
            f"--hf: the labels that {kind} gives a sequence depend on earlier calls beyond {original} tokens "
            f"(rope_type dynamic): serve it with --max-tokens {original}"
        )


def _ropes(parameters: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each rotary embedding; some models have them by the type of a layer."""
    if not isinstance(parameters, Mapping):
        return
    if isinstance(parameters.get("rope_type"), str):
        yield parameters
        return
    for value in parameters.values():
        yield from _ropes(value)
