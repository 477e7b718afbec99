"""Encodes plain Python values as bytes, exactly and without anything that could execute during decoding.

The bytes are JSON. A value that JSON cannot express becomes a JSON object with one key, its tag: `{"tuple": [1, 2]}`.
Dicts are tagged as well, so their keys may have any type, and a dict can never be mistaken for a tag. Tensors and numpy
arrays are not in the bytes: the caller stores them separately, by number. Only exact types are accepted, as a subclass
of `int` or `dict` would be restored as a different type.

The metadata of a saved state consists of a tree of such values and a table of the tensors. Its format is the same in
slots, in storage and in messages to other ranks.

No library encodes these values as needed: msgpack and similar formats would need the same hooks for each type, and
pickle as restricted by `torch.load(weights_only=True)` does not support parts that are stored elsewhere.
"""

from __future__ import annotations

import base64
import collections
import importlib
import json
import math
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from edl.errors import ProtocolError, SettingsError

Path = tuple[Any, ...]  # where in the whole value a part is: names, keys and indices from the outside in

StoreTensor = Callable[[Any, Path], int]  # stores a tensor or numpy array, and returns the number to load it by

LoadTensor = Callable[[int], Any]  # returns that tensor, or the bytes of that numpy array as uint8

MAX_DEPTH: Final = 64  # of containers: below Python's recursion limit, and catches a value that contains itself
_JSON_INT: Final = 1 << 62  # written as text from here on, as other JSON readers may expect 64 bits or floats
_ARRAY = "array"
_TENSOR = "tensor"
_LEAF = "leaf"
_PARAMETER = "parameter"


def encode(value: Any, store_tensor: StoreTensor, path: Path = ()) -> bytes:
    """Encode a value as JSON.

    `store_tensor` is called with every tensor or numpy array and its path, which begins with `path`.

    Raises:
        SettingsError: The value contains something that cannot be encoded; the message says where.
    """
    return to_json(_encode(value, store_tensor, path))


def to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def from_json(data: bytes) -> Any:
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
    """Refuse a tensor in a set or as a key. Look-ups there use the tensor's identity, which is lost in a restore."""
    raise SettingsError(
        f"{dotted(path[:-1])} has a tensor in a set or as a key, where a restored tensor could not be looked up: use "
        "a list, or make the tensor a value"
    )


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
    """Return the string from which numpy can recreate the dtype."""
    import numpy as np

    text: str = value.dtype.str
    if np.dtype(text) != value.dtype:
        raise SettingsError(f"{dotted(path)}: numpy type {value.dtype} cannot be saved: use a plain type")
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
        f"{dotted(path) or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved: use plain "
        "values, tensors, or an object with state_dict() and load_state_dict()"
    )


def decode(form: Any, load_tensor: LoadTensor) -> Any:
    """Decode the parsed JSON of an encoded value.

    Raises:
        ProtocolError: `form` was not made by `encode`.
    """
    if isinstance(form, list):
        return [decode(item, load_tensor) for item in form]
    if not isinstance(form, dict):
        return form
    if len(form) != 1:
        raise ProtocolError(f"a tagged value has the tags {sorted(form)[:5]}: expected one")
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
        raise ValueError(f"torch has no dtype {content!r}")
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


# --- Metadata of a saved state ---


ALIGN: Final = 64  # tensors begin at multiples of a cache line

_FORMAT: Final = 1  # a state with another number is refused, because this version could not read it

Scope = Literal["replicated", "shard", "local"]


@dataclass(frozen=True)
class ShardLayout:
    """How a sharded tensor was distributed over the ranks that saved it."""

    names: tuple[str, ...] | None  # names of the mesh's dimensions, or None
    mesh_shape: tuple[int, ...]  # shape of the mesh
    ranks: tuple[int, ...]  # ranks in the mesh, row-major
    placements: tuple[tuple[int, ...], ...]  # by mesh dimension: () for a replica, (dimension,) or (dimension, factor)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor, or a rank's part of a sharded tensor."""

    key: str  # where it is in the state, with dots: `model.layer.weight`
    dtype: str  # torch's name of the dtype, without `torch.`
    shape: tuple[int, ...]  # shape of this part
    whole: tuple[int, ...]  # shape of the whole tensor; the same as `shape` unless this is a shard
    starts: tuple[int, ...]  # indices in the whole tensor at which this part begins
    scope: Scope  # whether it is the same on all ranks, a part of a whole, or of one rank alone
    offset: int  # offset of its bytes, which are row-major, in the data
    nbytes: int  # number of its bytes
    device: str = "cpu"  # type of the device that it was on
    layout: int = -1  # number of its `ShardLayout` in the metadata, -1 for a tensor that is not sharded

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class StateMetadata:
    """Parsed metadata."""

    kinds: dict[str, str]  # kind of each field: `module`, `optimizer`, `object` or `value`
    tree: dict[str, Any]  # encoded fields that all ranks share, by name
    local: dict[str, Any]  # encoded fields that belong to one rank alone, by name
    entries: tuple[TensorEntry, ...]  # tensors; the encoded fields refer to them by number
    layouts: tuple[ShardLayout, ...] = ()  # layouts of the sharded tensors
    holders: tuple[int, ...] = ()  # global ranks that hold the same shards as the rank that saved this
    per_rank: frozenset[str] = frozenset()  # fields that belong to one rank alone and must not be lost

    @property
    def sharded(self) -> bool:
        return bool(self.per_rank) or any(entry.scope == "shard" for entry in self.entries)


def pack_table(
    entries: Sequence[TensorEntry], layouts: Sequence[ShardLayout] = (), holders: Sequence[int] = ()
) -> bytes:
    """Return the table as JSON, without braces: the part of the metadata that is the same from step to step."""
    rows = [
        [e.key, e.dtype, e.shape, e.whole, e.starts, e.scope, e.offset, e.nbytes, e.device, e.layout] for e in entries
    ]
    forms = [[layout.names, layout.mesh_shape, layout.ranks, layout.placements] for layout in layouts]
    return b'"tensors":%b,"layouts":%b,"holders":%b' % (to_json(rows), to_json(forms), to_json(holders))


def pack_meta(
    kinds: dict[str, str], tree: dict[str, bytes], local: dict[str, bytes], table: bytes, per_rank: Iterable[str] = ()
) -> bytes:
    parts = (to_json(kinds), _join(tree), _join(local), to_json(sorted(per_rank)), table)
    return b'{"format":%d,"kinds":%b,"tree":%b,"local":%b,"per_rank":%b,%b}' % (_FORMAT, *parts)


def _join(fields: dict[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(b"%b:%b" % (to_json(name), form) for name, form in fields.items())


def parse_meta(data: bytes) -> StateMetadata:
    return read_meta(from_json(data))


def read_meta(form: Any) -> StateMetadata:
    if not isinstance(form, dict) or form.get("format") != _FORMAT:
        raise ProtocolError(f"a state's metadata is not in format {_FORMAT}: another version of EDL saved it")
    try:
        entries = tuple(map(_entry, form["tensors"]))
        layouts = tuple(map(_layout, form["layouts"]))
        holders = tuple(map(int, form["holders"]))
        per_rank = frozenset(map(str, form["per_rank"]))
        meta = StateMetadata(
            dict(form["kinds"]), dict(form["tree"]), dict(form["local"]), entries, layouts, holders, per_rank
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise ProtocolError(f"a state's metadata cannot be read: {exc!r}") from exc
    for entry in entries:
        if not _holds_together(entry) or entry.layout >= len(layouts):
            raise ProtocolError(f"a state's metadata has an impossible tensor: {entry}")
    return meta


def _entry(row: Sequence[Any]) -> TensorEntry:
    key, dtype, shape, whole, starts, scope, offset, nbytes, device, layout = row
    place = (tuple(shape), tuple(whole), tuple(starts))
    return TensorEntry(str(key), str(dtype), *place, scope, int(offset), int(nbytes), str(device), int(layout))


def _layout(row: Sequence[Any]) -> ShardLayout:
    names, mesh_shape, ranks, placements = row
    words = tuple(tuple(map(int, placement)) for placement in placements)
    return ShardLayout(None if names is None else tuple(names), tuple(mesh_shape), tuple(map(int, ranks)), words)


def _holds_together(entry: TensorEntry) -> bool:
    sizes = (*entry.shape, *entry.whole, *entry.starts, entry.offset, entry.nbytes)
    return (
        len(entry.shape) == len(entry.whole) == len(entry.starts)
        and all(isinstance(size, int) and size >= 0 for size in sizes)
        and all(begin + size <= all_ for begin, size, all_ in zip(entry.starts, entry.shape, entry.whole, strict=True))
        and entry.scope in ("replicated", "shard", "local")
        and (entry.nbytes == 0 if entry.numel == 0 else entry.nbytes % entry.numel == 0)
    )


def box_overlap(
    starts: Sequence[int], shape: Sequence[int], other_starts: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of two boxes as slices of the first box and of the second; None if there is none."""
    mine, theirs = [], []
    for start, size, other_start, other_size in zip(starts, shape, other_starts, other_shape, strict=True):
        begin, end = max(start, other_start), min(start + size, other_start + other_size)
        if begin >= end:
            return None
        mine.append(slice(begin - start, end - start))
        theirs.append(slice(begin - other_start, end - other_start))
    return tuple(mine), tuple(theirs)
