"""Plain Python values as bytes and back, exactly, and without anything that could execute.

The bytes are JSON. What JSON has no form for is a JSON object with one key, its tag: `{"tuple": [1, 2]}`. Dicts are
tagged as well, so their keys may be of any type that can be encoded, and a dict can never be mistaken for a tag. What
is large, tensors and numpy arrays, does not go into the bytes: the caller takes it aside, and hands it back by number.

Only exact types are taken: a subclass of `int` or `dict` would come back as something else, so it is refused.
"""

from __future__ import annotations

import base64
import collections
import json
import math
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from edl.errors import ProtocolError, SettingsError

__all__ = ["MAX_DEPTH", "StoreTensor", "LoadTensor", "Path", "decode", "dotted", "encode", "from_json", "to_json"]

Path = tuple[Any, ...]
"""Where in the whole a value is: names, keys and indices from the outside in."""

StoreTensor = Callable[[Any, Path], int]
"""Takes a tensor or numpy array aside. Returns the number by which decoding asks for it."""

LoadTensor = Callable[[int], Any]
"""Gives what was taken aside under a number: a tensor, or for a numpy array its bytes as a tensor or array of uint8."""

MAX_DEPTH: Final = 64
"""Containers within containers that a value may have."""
_JSON_INT: Final = 1 << 62
_ARRAY, _TENSOR, _LEAF, _PARAMETER = "array", "tensor", "leaf", "parameter"


def encode(value: Any, aside: StoreTensor, path: Path = ()) -> bytes:
    """`value` as bytes.

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, Counter, deque, set,
            frozenset, numpy scalars, numpy arrays (not of objects), `torch.Size`, `torch.dtype`, `torch.device` and
            torch tensors (not in sets, nor as keys), nested at most 64 deep.
        aside: is given each tensor and numpy array.
        path: where `value` is, for messages and for `aside`.

    Raises:
        SettingsError: something of another type is in there. The message says where.
    """
    return to_json(_encode(value, aside, path))


def decode(form: Any, back: LoadTensor) -> Any:
    """The value that `encode` was given, from what `from_json` makes of its bytes.

    Raises:
        ProtocolError: the form is not of `encode`.
    """
    return _decode(form, back)


def to_json(value: Any) -> bytes:
    """Compact JSON of values that JSON has a form for."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def from_json(data: bytes) -> Any:
    """The value of some JSON.

    Raises:
        ProtocolError: it is no JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{len(data)} bytes of state are not JSON: {exc}") from exc


def dotted(path: Path) -> str:
    """`path` with dots between its parts, as `torch.distributed.checkpoint` names what is in a nested dict."""
    return ".".join(map(str, path))


def _encode(value: Any, aside: StoreTensor, path: Path) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_JSON_INT < value < _JSON_INT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if len(path) > MAX_DEPTH:
        raise SettingsError(f"{dotted(path[:3])}…: nested more than {MAX_DEPTH} deep, or contains itself")
    if kind is list:
        return _encode_all(value, aside, path)
    if kind is tuple:
        return {"tuple": _encode_all(value, aside, path)}
    if kind is dict:
        return {"dict": _encode_items(value, aside, path)}
    for tag, container in _DICTS.items():
        if kind is container:
            return {tag: _encode_items(value, aside, path)}
    for tag, container in _SETS.items():
        if kind is container:
            return {tag: _encode_all(value, _no_tensor, path)}
    if kind is collections.deque:
        return {"deque": [value.maxlen, _encode_all(value, aside, path)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    return _encode_numpy(value, aside, path) or _encode_torch(value, aside, path) or _refuse(value, path)


def _encode_all(values: Iterable[Any], aside: StoreTensor, path: Path) -> list[Any]:
    return [_encode(one, aside, (*path, index)) for index, one in enumerate(values)]


def _encode_items(value: dict[Any, Any], aside: StoreTensor, path: Path) -> list[Any]:
    return [[_encode(key, _no_tensor, (*path, key)), _encode(one, aside, (*path, key))] for key, one in value.items()]


def _no_tensor(value: Any, path: Path) -> int:
    """Refuse a tensor in a set or as a key: it is found there by its identity, which a restored one does not have."""
    raise SettingsError(f"{dotted(path[:-1])} has a tensor in a set or as a key, where no restored one is found again")


def _encode_numpy(value: Any, aside: StoreTensor, path: Path) -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return {"scalar": [_dtype_of(value, path), value.tobytes().hex()]}
    if type(value) is numpy.ndarray and not value.dtype.hasobject:
        return {_ARRAY: [_dtype_of(value, path), list(value.shape), aside(value, path)]}
    return None


def _dtype_of(value: Any, path: Path) -> str:
    """The numpy type, in words that make it again."""
    import numpy as np

    text: str = value.dtype.str
    if np.dtype(text) != value.dtype:
        raise SettingsError(f"{dotted(path)}: numpy type {value.dtype} cannot be saved; use a plain one")
    return text


def _encode_torch(value: Any, aside: StoreTensor, path: Path) -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.nn.Parameter):
        return {_PARAMETER: [aside(value, path), value.requires_grad]}
    if isinstance(value, torch.Tensor):
        return {_LEAF if value.requires_grad and value.is_leaf else _TENSOR: aside(value, path)}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return None


def _refuse(value: Any, path: Path) -> Any:
    kind = type(value)
    raise SettingsError(
        f"{dotted(path) or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved: give plain "
        "values, tensors, or an object with state_dict() and load_state_dict()"
    )


def _decode(form: Any, back: LoadTensor) -> Any:
    if isinstance(form, list):
        return [_decode(one, back) for one in form]
    if not isinstance(form, dict):
        return form
    if len(form) != 1:
        raise ProtocolError(f"a tagged value has the tags {sorted(form)[:5]}: one is wanted")
    ((tag, content),) = form.items()
    try:
        return _DECODERS[tag](content, back)
    except (KeyError, TypeError, ValueError, AttributeError, struct.error) as exc:
        raise ProtocolError(f"a value tagged {tag!r} cannot be read: {exc!r}") from exc


def _decode_items(items: Any, back: LoadTensor) -> dict[Any, Any]:
    return {_decode(key, back): _decode(one, back) for key, one in items}


def _decode_scalar(content: Any, back: LoadTensor) -> Any:
    import numpy as np

    dtype, data = content
    return np.ndarray((), _plain_dtype(dtype), bytes.fromhex(data))[()]


def _decode_array(content: Any, back: LoadTensor) -> Any:
    import numpy as np

    dtype, shape, number = content
    return np.ndarray(tuple(shape), _plain_dtype(dtype), np.asarray(back(number)))


def _plain_dtype(text: str) -> Any:
    import numpy as np

    dtype = np.dtype(text)
    if dtype.hasobject:
        raise ValueError(f"numpy type {text!r} holds objects")
    return dtype


def _decode_dtype(content: Any, back: LoadTensor) -> Any:
    import torch

    dtype = getattr(torch, content)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {content!r}")
    return dtype


def _decode_size(content: Any, back: LoadTensor) -> Any:
    import torch

    return torch.Size(content)


def _decode_device(content: Any, back: LoadTensor) -> Any:
    import torch

    return torch.device(content)


def _decode_parameter(content: Any, back: LoadTensor) -> Any:
    import torch

    number, requires_grad = content
    tensor = back(number)
    return tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, requires_grad)


_DICTS: Final = {"ordered": collections.OrderedDict, "counter": collections.Counter}
_SETS: Final = {"set": set, "frozenset": frozenset}
_DECODERS: Final[dict[str, Callable[[Any, LoadTensor], Any]]] = {
    "int": lambda content, back: int(content, 16),
    "float": lambda content, back: struct.unpack(">d", bytes.fromhex(content))[0],
    "complex": lambda content, back: complex(*struct.unpack(">dd", bytes.fromhex(content))),
    "bytes": lambda content, back: base64.b64decode(content, validate=True),
    "tuple": lambda content, back: tuple(_decode(one, back) for one in content),
    "dict": _decode_items,
    "ordered": lambda content, back: collections.OrderedDict(_decode_items(content, back)),
    "counter": lambda content, back: collections.Counter(_decode_items(content, back)),
    "set": lambda content, back: {_decode(one, back) for one in content},
    "frozenset": lambda content, back: frozenset(_decode(one, back) for one in content),
    "deque": lambda content, back: collections.deque((_decode(one, back) for one in content[1]), content[0]),
    "scalar": _decode_scalar,
    "size": _decode_size,
    "dtype": _decode_dtype,
    "device": _decode_device,
    _ARRAY: _decode_array,
    _TENSOR: lambda content, back: back(content),
    _LEAF: lambda content, back: back(content).requires_grad_(),
    _PARAMETER: _decode_parameter,
}
