"""Numbers in the globals of the user's modules, which are part of the model: a scale, thresholds, a list of weights.

They are looked for in those names only, and in Python's containers there: lists, tuples, dictionaries, sets, deques,
kinds made of them, arrays of objects, and arguments of a `functools.partial`. In attributes of objects they may be
counters and identities, of this process. Text counts nowhere: it is paths and host names, mostly.
"""

from __future__ import annotations

import functools
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

__all__ = ["globals_of", "numbers_in"]

_NUMBERS = (int, float, complex, bool, Decimal, Fraction, range)  # exactly: a subclass may show itself as it likes
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# What Python itself keeps in a module, of the place or of the process.
_PYTHONS = {
    *vars(ModuleType("")),
    *("__annotations__", "__builtins__", "__cached__", "__file__", "__path__", "__warningregistry__"),
}


def globals_of(module: ModuleType) -> dict[str, Any]:
    """The names of a module and their values, without those that Python sets."""
    return {name: value for name, value in vars(module).items() if name not in _PYTHONS}


def numbers_in(modules: list[ModuleType]) -> Iterator[bytes]:
    """Each global that is or holds numbers, with its name, for `digest`."""
    for module in modules:
        for name, value in sorted(globals_of(module).items()):
            text = _text(value, ())
            if text:
                yield f"{name} = {text}".encode()


def _text(value: Any, within: tuple[int, ...]) -> str:
    """The numbers of a value, the same in each process; empty if there are none."""
    kind = type(value)
    if kind in _NUMBERS:
        return repr(value)
    if isinstance(value, (np.number, np.bool_)) and not isinstance(value, np.timedelta64):
        return f"{value.dtype.str} {value.item()!r}"
    if id(value) in within:
        return ""
    inner = (*within, id(value))
    held = _held(value)
    if held is not None:
        return _text(held, inner)
    if not isinstance(value, _CONTAINERS) or hasattr(kind, "n_sequence_fields"):  # as sys.version_info: of the host
        return ""
    if isinstance(value, dict):
        entries = [f"{_text(key, inner)}:{_text(entry, inner)}" for key, entry in _ordered(value)]
        return f"{{{','.join(entries)}}}" if any(entry != ":" for entry in entries) else ""
    base: Any = next(container for container in _CONTAINERS if isinstance(value, container))
    texts = [_text(entry, inner) for entry in base.__iter__(value)]
    if isinstance(value, (set, frozenset)):
        texts = sorted(filter(None, texts))
    return f"[{','.join(texts)}]" if any(texts) else ""


def _held(value: Any) -> Any:
    """The containers that one of another kind is made of; None of anything else."""
    kind = type(value)
    if kind is ChainMap:
        return value.maps
    if kind in (UserDict, UserList):
        return value.data
    if kind is MappingProxyType:
        return value.copy()
    if kind is functools.partial:
        return [value.func, value.args, value.keywords]
    if kind is slice:
        return [value.start, value.stop, value.step]
    if kind is np.ndarray and value.dtype == object:
        return value.reshape(-1).tolist()
    return None


def _ordered(entries: dict[Any, Any]) -> list[tuple[Any, Any]]:
    items = list(dict.items(entries))  # a subclass might load something
    named = all(isinstance(key, str) for key, _ in items)
    return sorted(items, key=lambda entry: entry[0]) if named else items
