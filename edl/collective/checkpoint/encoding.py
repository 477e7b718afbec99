"""Encoding of plain Python values as bytes: exact, and without anything that could execute when it is decoded.

The bytes are JSON. A value that JSON cannot express becomes a JSON object with one key, its tag: `{"tuple": [1, 2]}`.
Dicts are tagged as well, so their keys may have any type that can be encoded, and a dict can never be mistaken for a
tag. Large parts, which are tensors and numpy arrays, are not in the bytes. The caller stores them separately, and
returns them by number when the value is decoded.

Only exact types are accepted: a subclass of `int` or `dict` would come back as another type, so it is refused.
"""

from __future__ import annotations

import base64
import collections
import importlib
import json
import math
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from edl.errors import ProtocolError, SettingsError

Path = tuple[Any, ...]
"""Where in the whole value a part is: names, keys and indices from the outside in."""

StoreTensor = Callable[[Any, Path], int]
"""Stores a tensor or numpy array separately. Returns the number by which it is loaded when decoding."""

LoadTensor = Callable[[int], Any]
"""Returns the part that was stored under a number: a tensor, or the bytes of a numpy array as uint8."""

MAX_DEPTH: Final = 64
"""Largest number of nested containers: below Python's recursion limit. It also catches a value that contains itself."""
_JSON_INT: Final = 1 << 62
"""Integers from here on are written as text, because JSON readers other than Python's may expect 64 bits or floats."""
_ARRAY = "array"
_TENSOR = "tensor"
_LEAF = "leaf"
_PARAMETER = "parameter"


def encode(value: Any, store_tensor: StoreTensor, path: Path = ()) -> bytes:
    """Encode a value as JSON.

    It may consist of None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, Counter, deque, set,
    frozenset, numpy scalars, numpy arrays (not of objects), `torch.Size`, `torch.dtype`, `torch.device` and torch
    tensors (not in sets or as keys), nested at most `MAX_DEPTH` deep. `store_tensor` is called with every tensor and
    numpy array. `path` is where `value` is, for messages and for `store_tensor`.

    Raises:
        SettingsError: The value contains another type. The message says where.
    """
    return to_json(_encode(value, store_tensor, path))


def to_json(value: Any) -> bytes:
    """Return compact JSON of values that JSON can express."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def from_json(data: bytes) -> Any:
    """Parse JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{len(data)} bytes of state are not JSON: {exc}") from exc


def dotted(path: Path) -> str:
    """Join a path with dots, the way `torch.distributed.checkpoint` names entries of a nested dict."""
    return ".".join(map(str, path))


def _encode(value: Any, store_tensor: StoreTensor, path: Path) -> Any:
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
        return _encode_all(value, store_tensor, path)
    if kind is tuple:
        return {"tuple": _encode_all(value, store_tensor, path)}
    if kind is dict:
        return {"dict": _encode_items(value, store_tensor, path)}
    for tag, container in _DICTS.items():
        if kind is container:
            return {tag: _encode_items(value, store_tensor, path)}
    for tag, container in _SETS.items():
        if kind is container:
            return {tag: _encode_all(value, _no_tensor, path)}
    if kind is collections.deque:
        return {"deque": [value.maxlen, _encode_all(value, store_tensor, path)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    return _encode_numpy(value, store_tensor, path) or _encode_torch(value, store_tensor, path) or _refuse(value, path)


def _encode_all(values: Iterable[Any], store_tensor: StoreTensor, path: Path) -> list[Any]:
    return [_encode(item, store_tensor, (*path, index)) for index, item in enumerate(values)]


def _encode_items(value: dict[Any, Any], store_tensor: StoreTensor, path: Path) -> list[Any]:
    return [
        [_encode(key, _no_tensor, (*path, key)), _encode(item, store_tensor, (*path, key))]
        for key, item in value.items()
    ]


def _no_tensor(value: Any, path: Path) -> int:
    """Refuse a tensor in a set or as a key, where look-ups use its identity, which a restored tensor does not have."""
    raise SettingsError(f"{dotted(path[:-1])} has a tensor in a set or as a key, where no restored one is found again")


def _encode_numpy(value: Any, store_tensor: StoreTensor, path: Path) -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return {"scalar": [_dtype_of(value, path), value.tobytes().hex()]}
    if type(value) is numpy.ndarray and not value.dtype.hasobject:
        return {_ARRAY: [_dtype_of(value, path), list(value.shape), store_tensor(value, path)]}
    return None


def _dtype_of(value: Any, path: Path) -> str:
    """Return the text from which numpy can recreate the dtype."""
    import numpy as np

    text: str = value.dtype.str
    if np.dtype(text) != value.dtype:
        raise SettingsError(f"{dotted(path)}: numpy type {value.dtype} cannot be saved; use a plain one")
    return text


def _encode_torch(value: Any, store_tensor: StoreTensor, path: Path) -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.nn.Parameter):
        return {_PARAMETER: [store_tensor(value, path), value.requires_grad]}
    if isinstance(value, torch.Tensor):
        return {_LEAF if value.requires_grad and value.is_leaf else _TENSOR: store_tensor(value, path)}
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


def decode(form: Any, load_tensor: LoadTensor) -> Any:
    """Decode the parsed JSON of an encoded value.

    Raises:
        ProtocolError: The form was not made by `encode`.
    """
    if isinstance(form, list):
        return [decode(item, load_tensor) for item in form]
    if not isinstance(form, dict):
        return form
    if len(form) != 1:
        raise ProtocolError(f"a tagged value has the tags {sorted(form)[:5]}: one is wanted")
    ((tag, content),) = form.items()
    try:
        return _DECODERS[tag](content, load_tensor)
    except (KeyError, TypeError, ValueError, AttributeError, struct.error) as exc:
        raise ProtocolError(f"a value tagged {tag!r} cannot be read: {exc!r}") from exc


def _decoder(load_tensor: LoadTensor) -> Callable[[Any], Any]:
    return lambda form: decode(form, load_tensor)


def _decode_items(items: Any, load_tensor: LoadTensor) -> dict[Any, Any]:
    return {decode(key, load_tensor): decode(item, load_tensor) for key, item in items}


def _decode_scalar(content: Any, load_tensor: LoadTensor) -> Any:
    import numpy as np

    dtype, data = content
    return np.ndarray((), _plain_dtype(dtype), bytes.fromhex(data))[()]


def _decode_array(content: Any, load_tensor: LoadTensor) -> Any:
    import numpy as np

    dtype, shape, number = content
    return np.ndarray(tuple(shape), _plain_dtype(dtype), np.asarray(load_tensor(number)))


def _plain_dtype(text: str) -> Any:
    import numpy as np

    dtype = np.dtype(text)
    if dtype.hasobject:
        raise ValueError(f"numpy type {text!r} holds objects")
    return dtype


def _decode_dtype(content: Any, load_tensor: LoadTensor) -> Any:
    import torch

    dtype = getattr(torch, content)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {content!r}")
    return dtype


def _decode_parameter(content: Any, load_tensor: LoadTensor) -> Any:
    import torch

    number, requires_grad = content
    tensor = load_tensor(number)
    return tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, requires_grad)


_DICTS: Final = {"ordered": collections.OrderedDict, "counter": collections.Counter}
_SETS: Final = {"set": set, "frozenset": frozenset}
_DECODERS: Final[dict[str, Callable[[Any, LoadTensor], Any]]] = {
    "int": lambda content, load_tensor: int(content, 16),
    "float": lambda content, load_tensor: struct.unpack(">d", bytes.fromhex(content))[0],
    "complex": lambda content, load_tensor: complex(*struct.unpack(">dd", bytes.fromhex(content))),
    "bytes": lambda content, load_tensor: base64.b64decode(content, validate=True),
    "tuple": lambda content, load_tensor: tuple(map(_decoder(load_tensor), content)),
    "dict": _decode_items,
    "ordered": lambda content, load_tensor: collections.OrderedDict(_decode_items(content, load_tensor)),
    "counter": lambda content, load_tensor: collections.Counter(_decode_items(content, load_tensor)),
    "set": lambda content, load_tensor: set(map(_decoder(load_tensor), content)),
    "frozenset": lambda content, load_tensor: frozenset(map(_decoder(load_tensor), content)),
    "deque": lambda content, load_tensor: collections.deque(map(_decoder(load_tensor), content[1]), content[0]),
    "scalar": _decode_scalar,
    "size": lambda content, load_tensor: importlib.import_module("torch").Size(content),
    "dtype": _decode_dtype,
    "device": lambda content, load_tensor: importlib.import_module("torch").device(content),
    _ARRAY: _decode_array,
    _TENSOR: lambda content, load_tensor: load_tensor(content),
    _LEAF: lambda content, load_tensor: load_tensor(content).requires_grad_(),
    _PARAMETER: _decode_parameter,
}
