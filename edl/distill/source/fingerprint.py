"""Detects whether an item changed after its rows were sent to the teachers and before it was delivered.

A source runs ahead of the training loop. If the source refills a buffer, or puts other arrays into the same list, the
training loop gets a different input than the teacher saw. So each item's contents are summarized when the item is cut
into requests, and checked when it is delivered. Small arrays are copied. For arrays up to 1 MiB, sums over 509 columns
cover every byte. Larger arrays are divided into 384 equal pieces, and a word is read from a random position in each
piece.
"""

from __future__ import annotations

import array
import collections
import functools
import math
import mmap
import operator
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from edl.errors import SourceError
from edl.protocol.tensors import Array, is_tensor

OBJECT_NBYTES = 33  # overhead of CPython's bytes object; without it, many short strings would weigh almost nothing


def arrays_nbytes(arrays: Iterable[Array]) -> int:
    """Return the size of arrays in bytes, including the strings in string arrays."""
    return sum(array.nbytes + (_weight_of_objects(array) if array.dtype.kind == "O" else 0) for array in arrays)


def object_nbytes(value: Any) -> int:
    """Return the size in bytes that an object or its attributes report; for Pillow images, the size of their pixels."""
    nbytes = _own_nbytes(value)
    if nbytes is None:
        attributes = getattr(value, "__dict__", None)
        nbytes = sum(_own_nbytes(part) or 0 for part in attributes.values()) if isinstance(attributes, dict) else 0
    return nbytes


def _own_nbytes(value: Any) -> int | None:
    if isinstance(value, bytes | str | bytearray):
        return len(value) + OBJECT_NBYTES
    try:
        if str(type(value).__module__).startswith("PIL."):
            return int(math.prod(value.size) * len(value.getbands()))
        nbytes = getattr(value, "nbytes", None)
    except Exception:  # noqa: BLE001 - from a user's type or a sparse tensor: objects without a size are not counted
        return None
    return nbytes if isinstance(nbytes, int) else None


def _weight_of_objects(array: Array) -> int:
    return sum(len(element) + OBJECT_NBYTES for element in array.flat)


_SMALL_NBYTES = 32 << 10  # copied in a microsecond or two, faster than any sum
_COLUMNS = 509  # prime, so that swapped rows change columns too; enough for SIMD, and fits in the L1 cache
_WHOLE_NBYTES = 1 << 20
"""Number of bytes that can be summed in a tenth of a millisecond. One-hot labels of 256 rows and 1,000 classes are
below this size; between batches, only a few of their words differ."""
_WORDS = 384
"""Number of words read from a larger array; each read is a cache miss. numpy keeps the GIL while it reads up to 500
words; reacquiring the GIL would take ten times as long as the reads."""

_random = np.random.default_rng()  # a new seed in each process, so that no data can be crafted for the positions


class Checksum:
    """A summary of the bytes of an array of numbers, to detect changes."""

    def __init__(self, array: Array) -> None:
        data = _memory(array)
        self._nbytes = data.nbytes
        self._positions: Array | None = None  # of the words to read; None to read everything
        if data.nbytes > _WHOLE_NBYTES:
            piece = data.nbytes // 8 // _WORDS
            self._positions = np.arange(_WORDS) * piece + _random.integers(0, piece, _WORDS)
        self._found = self._look(data)

    def matches(self, array: Array) -> bool:
        data = _memory(array)
        return data.nbytes == self._nbytes and self._look(data) == self._found

    def _look(self, data: Array) -> bytes:
        if data.nbytes <= _SMALL_NBYTES:
            return data.tobytes()
        words = data[: len(data) & ~7].view(np.uint64)
        if self._positions is not None:
            return words[self._positions].tobytes()
        rows = len(words) // _COLUMNS
        sums: Array = np.add.reduce(words[: rows * _COLUMNS].reshape(rows, _COLUMNS), axis=0)
        return sums.tobytes() + data[rows * _COLUMNS * 8 :].tobytes()


def _memory(array: Array) -> Array:
    """Return an array's bytes, broadcast bytes only once; a view if its memory is contiguous for some axis order."""
    array = np.asarray(array)  # a matrix would stay two-dimensional, and a masked array would keep its mask
    if not array.flags.c_contiguous:
        array = array[tuple([slice(1) if stride == 0 else slice(None) for stride in array.strides])]
        array = array[tuple([slice(None, None, -1 if stride < 0 else 1) for stride in array.strides])]
        array = np.ascontiguousarray(array.transpose(np.argsort([-stride for stride in array.strides], kind="stable")))
    return array.reshape(-1).view(np.uint8)


# Not `np.void`, a record: it is a view of its array.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), np.number, np.bool_, np.datetime64)
_EXACTLY_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_NUMBERS = frozenset({int, float, bool, type(None)})

KeyPath: TypeAlias = tuple[Any, ...]
MemoryLocation: TypeAlias = tuple[str, int]  # address of an array's first element, or id of a list or dictionary


@dataclass(eq=False, slots=True)
class _Part:
    path: KeyPath  # keys and positions that lead to it, for messages
    holder: Any
    is_unchanged: Callable[[], bool]
    is_array: bool = False
    costly: bool = False  # whether comparing it takes longer than finding its location

    @property
    def location(self) -> MemoryLocation:
        """Where the part is: two parts of live items that share memory have the same location."""
        if self.is_array:
            return "memory", self.holder.__array_interface__["data"][0]
        return "object", id(self.holder)


class ItemFingerprint:
    """A summary of an item's contents, to detect changes. `inputs`: the item's inputs for the teachers, by name."""

    __slots__ = ("_inputs", "_parts", "_what", "rest_nbytes")

    def __init__(self, what: str, item: Any, inputs: Mapping[str, Any]) -> None:
        self._what = what
        self._parts: list[_Part] = []
        self.rest_nbytes = 0  # of the item's other contents, as far as known
        self._inputs = frozenset(map(id, inputs.values()))
        seen: set[int] = set()  # identities of objects in the item or `inputs`, during construction
        self._add(item, (), seen)
        rest_nbytes = self.rest_nbytes
        for name, found in inputs.items():  # possibly created by a user's function, in memory that it keeps
            self._add(found, (name,), seen)
        self.rest_nbytes = rest_nbytes

    @property
    def locations(self) -> set[MemoryLocation]:
        return {part.location for part in self._parts}

    def check(self) -> None:
        for part in self._parts:
            if not part.is_unchanged():
                raise self._error(part)

    def check_locations(self, places: Callable[[], Container[MemoryLocation]]) -> None:
        for part in self._parts:
            if part.costly:
                if part.location in places() and not part.is_unchanged():
                    raise self._error(part)
            elif not part.is_unchanged() and part.location in places():
                raise self._error(part)

    def _error(self, part: _Part) -> SourceError:
        where = f" ({''.join(f'[{key!r}]' for key in part.path)})" if part.path else ""
        return SourceError(
            f"{self._what} changed while its soft labels were pending, or while it was in use{where}: yield a new "
            "array each time (for example array.copy()), and new lists and dictionaries, since the source runs ahead "
            "of the training loop"
        )

    def _add(self, value: Any, path: KeyPath, seen: set[int]) -> None:
        kind = type(value)
        if kind in _EXACTLY_PLAIN or id(value) in seen:
            return
        seen.add(id(value))
        nbytes = self.rest_nbytes
        self._look(value, kind, path, seen)
        if id(value) in self._inputs:
            self.rest_nbytes = nbytes

    def _look(self, value: Any, kind: type[Any], path: KeyPath, seen: set[int]) -> None:
        if kind is tuple:
            self._add_each(enumerate(value), path, seen)
        elif isinstance(value, np.ndarray):
            self._add_array(value, path, seen)
        elif isinstance(value, np.void):
            self._add_array(np.asarray(value), path, seen)  # shares the memory
        elif isinstance(value, _PLAIN):
            return
        elif isinstance(value, list):
            self._add_elements(value, lambda: list.__getitem__(value, slice(None)), path)
            self._add_each(enumerate(list.__iter__(value)), path, seen)
        elif isinstance(value, dict):
            self._add_elements(value, lambda: [*dict.keys(value), *dict.values(value)], path)
            self._add_each(dict.items(value), path, seen)
        elif isinstance(value, tuple):  # with names
            self._add_each(enumerate(tuple.__iter__(value)), path, seen)
        elif isinstance(value, collections.UserDict | collections.UserList):
            self._add_elements(value, lambda: [value.data], path)
            self._add(value.data, path, seen)
        elif isinstance(value, collections.deque | set | frozenset):
            self._add_elements(value, lambda: [*value], path)
            self._add_each(enumerate(value), path, seen)
        elif isinstance(value, bytearray | memoryview | array.array | mmap.mmap):
            self._add_buffer(value, path)
        elif is_tensor(value):
            self._add_tensor(value, path, seen)
        else:
            self._add_attributes(value, path, seen)

    def _add_each(self, parts: Iterable[tuple[Any, Any]], path: KeyPath, seen: set[int]) -> None:
        for key, part in parts:
            kind = type(part)
            if kind in _NUMBERS:
                continue
            if kind is bytes or kind is str:
                if id(part) not in self._inputs:
                    self.rest_nbytes += len(part) + OBJECT_NBYTES
            else:
                self._add(part, (*path, key), seen)

    def _add_array(self, array: Array, path: KeyPath, seen: set[int]) -> None:
        if array.dtype.hasobject and array.dtype.names is not None:
            for name in array.dtype.names:
                self._add_array(array[name], (*path, name), seen)
            return
        self.rest_nbytes += array.nbytes
        if array.dtype.hasobject:
            self._add_elements(array, lambda: list(array.flat), path)
            self._add_each(enumerate(array.flat), path, seen)
        elif array.nbytes <= _SMALL_NBYTES:
            content = array.tobytes()
            self._parts.append(_Part(path, array, lambda: bool(array.tobytes() == content), is_array=True))
        else:
            unchanged = functools.partial(Checksum(array).matches, array)
            self._parts.append(_Part(path, array, unchanged, is_array=True, costly=True))

    def _add_tensor(self, tensor: Any, path: KeyPath, seen: set[int]) -> None:
        memory = _shared_memory(tensor)
        if memory is not None:
            begin = tensor.data_ptr()  # changes if the source gives the tensor different memory
            self._parts.append(_Part(path, tensor, lambda: tensor.data_ptr() == begin))
            self._add_array(memory, path, seen)
            return
        self.rest_nbytes += object_nbytes(tensor)
        version = _version(tensor)
        if version is not None:
            self._parts.append(_Part(path, tensor, lambda: _version(tensor) == version))

    def _add_buffer(self, buffer: bytearray | memoryview | array.array[Any] | mmap.mmap, path: KeyPath) -> None:
        self.rest_nbytes += memoryview(buffer).nbytes
        before = Checksum(np.asarray(memoryview(buffer))) if len(buffer) else None

        def is_unchanged() -> bool:  # a kept array would prevent the source from resizing its buffer
            return before.matches(np.asarray(memoryview(buffer))) if before is not None else not len(buffer)

        self._parts.append(_Part(path, buffer, is_unchanged))

    def _add_elements(self, holder: Any, elements: Callable[[], list[Any]], path: KeyPath) -> None:
        before = elements()
        self._parts.append(_Part(path, holder, lambda: _same_objects(before, elements())))

    def _add_attributes(self, value: Any, path: KeyPath, seen: set[int]) -> None:
        self.rest_nbytes = rest_nbytes = self.rest_nbytes + object_nbytes(value)
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in [*getattr(value, "__dict__", ()), *slots]:
            part = getattr(value, name, None)
            if id(part) in self._inputs or isinstance(part, np.ndarray) or is_tensor(part):
                self._parts.append(_Part((*path, name), value, functools.partial(_holds, value, name, part)))
                self._add(part, (*path, name), seen)
        self.rest_nbytes = rest_nbytes


def _holds(value: Any, name: str, part: Any) -> bool:
    return getattr(value, name, None) is part


def _same_objects(before: list[Any], after: list[Any]) -> bool:
    if len(before) != len(after):
        return False
    if all(map(operator.is_, before, after)):
        return True
    return all(
        old is new or (isinstance(old, _PLAIN) and type(old) is type(new) and (old == new or old != old))
        for old, new in zip(before, after, strict=True)
    )


def _shared_memory(tensor: Any) -> Array | None:
    """Return a tensor's own memory as an array; None if this would require a copy."""
    torch, paddle = sys.modules.get("torch"), sys.modules.get("paddle")
    try:
        if torch is not None and isinstance(tensor, torch.Tensor):
            if tensor.device.type == "cpu":
                own = tensor.detach()
                found: Array = (own.view(torch.int16) if own.dtype is torch.bfloat16 else own).numpy()
                return found
        elif paddle is not None and isinstance(tensor, paddle.Tensor) and tensor.place.is_cpu_place():
            return np.from_dlpack(tensor.detach())  # its `numpy` method copies
    except (RuntimeError, TypeError, BufferError):  # sparse, quantized, a view of bfloat16 with gaps, ...
        pass
    return None


def _version(tensor: Any) -> int | None:
    """Return how often a tensor was written to in place, None if unknown."""
    for name in ("_version", "inplace_version"):
        try:
            found = getattr(tensor, name)
        except (AttributeError, RuntimeError):  # torch's inference tensors do not count writes
            continue
        if isinstance(found, int):
            return found
    return None
