"""Batches as training loops have them, counted and cut by rows: tensors, arrays, lists, and nests of these.

A tuple, a named one or a mapping is a structure of parts; so is a list that holds a tensor, an array or a structure, as
`DataLoader` makes of a tuple. Everything else with a length that can be sliced has rows: tensors, arrays, lists of
strings, top-k soft labels. Parts without a length (a number, None) go to every micro-batch as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from edl.errors import SettingsError

__all__ = ["count_rows", "cut_rows"]

B = TypeVar("B")


def count_rows(batch: object) -> int:
    """How many rows every part of `batch` has.

    Raises:
        SettingsError: the parts differ, or none has rows.
    """
    counts: list[int] = []
    _map(batch, lambda part: counts.append(len(part)))
    if not counts:
        raise SettingsError(f"a batch of type {type(batch).__name__} has no part with rows, such as a tensor")
    if len(set(counts)) > 1:
        raise SettingsError(f"the parts of a batch have {sorted(set(counts))} rows: each needs one for each sample")
    return counts[0]


def cut_rows(batch: B, begin: int, end: int) -> B:
    """The rows from `begin` up to `end` of every part, as views where the parts allow it."""
    cut: B = _map(batch, lambda part: part[begin:end])
    return cut


def _map(part: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(part, Mapping):
        return {key: _map(value, change) for key, value in part.items()}
    if isinstance(part, tuple):
        mapped = [_map(value, change) for value in part]
        return type(part)(*mapped) if hasattr(part, "_fields") else tuple(mapped)
    if isinstance(part, list) and any(_is_part(value) for value in part):
        return [_map(value, change) for value in part]
    has_rows = part.ndim > 0 if isinstance(part, (torch.Tensor, np.ndarray)) else _can_be_cut(part)
    return change(part) if has_rows else part


def _is_part(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, Mapping, tuple, list))


def _can_be_cut(part: object) -> bool:
    return hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, (str, bytes))
