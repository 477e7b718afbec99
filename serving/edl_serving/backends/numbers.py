"""Numbers in the globals of the user's modules, which are part of the model: a scale, thresholds, a list of weights.

They are looked for in those names only, and in lists, tuples, dictionaries, sets and deques there. In attributes of
objects they may be counters and identities, of this process. Text counts nowhere: it is paths and host names, mostly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["numbers_in"]

_NUMBERS = (int, float, complex, bool)  # exactly: a subclass may show itself as it likes


def numbers_in(modules: list[ModuleType]) -> Iterator[bytes]:
    """Each global that is or holds numbers, with its name, for `digest`."""
    for module in modules:
        for name, value in sorted(vars(module).items()):
            text = "" if name.startswith("__") else _text(value, ())
            if text:
                yield f"{name} = {text}".encode()


def _text(value: Any, within: tuple[int, ...]) -> str:
    """The numbers of a value, the same in each process; empty if there are none."""
    kind = type(value)
    if kind in _NUMBERS:
        return repr(value)
    if isinstance(value, (np.number, np.bool_)) and not isinstance(value, np.timedelta64):
        return f"{value.dtype.str} {value.item()!r}"
    if kind not in (list, tuple, dict, set, frozenset, deque) or id(value) in within:
        return ""
    inner = (*within, id(value))
    if kind is dict:
        entries = [f"{_text(key, inner)}:{_text(entry, inner)}" for key, entry in _ordered(value)]
        return f"{{{','.join(entries)}}}" if any(entry != ":" for entry in entries) else ""
    texts = [_text(entry, inner) for entry in value]
    if kind in (set, frozenset):
        texts = sorted(filter(None, texts))
    return f"[{','.join(texts)}]" if any(texts) else ""


def _ordered(entries: dict[Any, Any]) -> list[tuple[Any, Any]]:
    named = all(isinstance(key, str) for key in entries)
    return sorted(entries.items(), key=lambda entry: entry[0]) if named else list(entries.items())
