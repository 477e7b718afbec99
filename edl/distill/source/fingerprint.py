"""Detects whether an item changed between sending its rows to the teachers and its delivery.

A source runs ahead of the training loop. If it refills a buffer, or puts other arrays into the same list, the training
loop gets another input than the teacher saw. So the contents of an item are checked twice: when it is cut into
requests, and when it is delivered. `ReuseDetector` checks again if the source yields the same memory in between. Inputs
with objects of unknown types can be checked only by converting them to arrays again.

A check costs a small part of a copy. Small arrays are copied. For larger arrays, a `Checksum` holds the sums of 509
columns, which cover the whole array, and words from random positions. Above 64 KiB it may hold only the words, if there
is no time for more (`TimeBudget`).
"""

from __future__ import annotations

import array
import collections
import functools
import math
import mmap
import operator
import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from edl.errors import SourceError
from edl.protocol.tensors import Array, is_tensor

OBJECT_NBYTES = 33
"""What CPython's bytes object takes besides its bytes; without it, many short strings would weigh next to nothing."""


def arrays_nbytes(arrays: Iterable[Array]) -> int:
    """Return the bytes that arrays hold; for arrays of strings, with their strings."""
    return sum(array.nbytes + (_weight_of_objects(array) if array.dtype.kind == "O" else 0) for array in arrays)


def object_nbytes(value: Any) -> int:
    """Return the bytes that an object or its attributes report to hold; images are counted as Pillow's."""
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
    except Exception:  # noqa: BLE001 - of the user's type, or of sparse tensors: what does not say it is not counted
        return None
    return nbytes if isinstance(nbytes, int) else None


def _weight_of_objects(array: Array) -> int:
    return sum(len(element) + OBJECT_NBYTES for element in array.flat)


SMALL_NBYTES = 32 << 10
"""This much is copied in a microsecond or two, which is less than any sum would take."""
_COLUMNS = 509  # prime, so that rows which change places change columns too; enough for SIMD, and fits the L1 cache
_WHOLE_NBYTES = 64 << 10  # summed up in the time that some words at random take, which are not in any cache
_WORDS_SHARE, _LEAST_WORDS, _MOST_WORDS = 512, 64, 384
"""One word in this many is checked, within limits, since each misses all caches. 1,024 of them would cost a tenth of
the rate at which requests of 4.8 MB go through shared memory; 384 still give twelve in each of 32 images."""
_MOST_SIZES = 64  # sizes whose positions are kept, as many as padded texts may have
_GRACE_S = 0.02
"""Time in which the first arrays of an epoch are checked completely: about fifty of 4.8 MB. A source that reuses a
buffer does so from its second item on."""

_WORDS_AT_ONCE = 500
"""Words read at a time, so few that numpy keeps the GIL. Getting it back takes ten times as long as reading them."""
_ARRAYS_PER_DRAW = 16
"""How many arrays are checked at the same positions, because drawing positions takes as long as checking them."""

_random = np.random.default_rng()  # another seed in each process, so that no data can be as the places want it


class TimeBudget:
    """Decides whether there is time to check whole arrays, and which positions to check if not.

    The budget is a share of the time since this was created. `positions` is for a single thread at a time.
    """

    def __init__(self, share: float, *, always: bool = False) -> None:
        self.always = always
        self._share = share
        self._left_s = _GRACE_S
        self._left_at = time.perf_counter()
        self._positions: dict[int, tuple[int, Array]] = {}  # by number of words; for how many arrays more

    @property
    def available(self) -> bool:
        """Whether there is time left. Time that passes while an epoch waits is not saved up."""
        now = time.perf_counter()
        self._left_s = min(_GRACE_S, self._left_s + self._share * (now - self._left_at))
        self._left_at = now
        return self.always or self._left_s > 0.0

    def spend(self, seconds: float) -> None:
        """Count seconds that were spent."""
        self._left_s -= seconds

    def positions(self, words: int) -> Array:
        """Return the positions to check in an array of `words` words: a random one in each of equal pieces."""
        left, positions = self._positions.get(words, (0, None))
        if not left or positions is None:
            left, positions = _ARRAYS_PER_DRAW, _draw_positions(words)
            if len(self._positions) >= _MOST_SIZES:
                self._positions.clear()
        self._positions[words] = left - 1, positions
        return positions


@dataclass(frozen=True, eq=False)
class Checksum:
    """A summary of an array's bytes, to detect changes."""

    nbytes: int  # in all
    content: bytes  # all bytes of a small array, the last few of a larger array
    # of the words that were looked at, random, at least one in every of as many equal pieces
    positions: Array | None = None
    words: bytes = b""  # 8 bytes from each of these positions
    columns: bytes = b""  # sums of words, modulo 2**64; empty where only some words were looked at

    @classmethod
    def of(cls, array: Array, time_budget: TimeBudget) -> Checksum:
        """Return the checksum of an array of numbers."""
        data = _memory(array)
        if data.nbytes <= SMALL_NBYTES:
            return cls(data.nbytes, data.tobytes())
        words = _words(data)
        positions = time_budget.positions(len(words))
        whole = data.nbytes <= _WHOLE_NBYTES or time_budget.available
        columns = _columns(words, time_budget) if whole else b""
        return cls(data.nbytes, _rest(data), positions, _words_at(words, positions), columns)

    def matches(self, array: Array, time_budget: TimeBudget) -> bool:
        """Return whether an array has the same bytes, as far as they were looked at."""
        data = _memory(array)
        if data.nbytes != self.nbytes:
            return False
        if self.positions is None:
            return data.tobytes() == self.content
        words = _words(data)
        if _words_at(words, self.positions) != self.words or _rest(data) != self.content:
            return False
        return not self.columns or _columns(words, time_budget) == self.columns


def _draw_positions(words: int) -> Array:
    count = min(max(words // _WORDS_SHARE, _LEAST_WORDS), _MOST_WORDS)
    piece = words // count
    positions: Array = np.arange(0, count * piece, piece) + _random.integers(0, piece, count)
    return positions


def _memory(array: Array) -> Array:
    """Return the array's bytes, without repeats; a view where they lie without gaps in memory, in any order of axes."""
    array = np.asarray(array)  # a matrix stays two-dimensional whatever is done, and a masked array keeps its mask
    if not array.flags.c_contiguous:
        array = array[tuple([slice(1) if stride == 0 else slice(None) for stride in array.strides])]
        array = array[tuple([slice(None, None, -1 if stride < 0 else 1) for stride in array.strides])]
        array = np.ascontiguousarray(array.transpose(np.argsort([-stride for stride in array.strides], kind="stable")))
    return array.reshape(-1).view(np.uint8)


def _words(data: Array) -> Array:
    found: Array = data[: len(data) & ~7].view(np.uint64)
    return found


def _words_at(words: Array, positions: Array) -> bytes:
    pieces = range(0, len(positions), _WORDS_AT_ONCE)
    return b"".join([words[positions[at : at + _WORDS_AT_ONCE]].tobytes() for at in pieces])


def _rest(data: Array) -> bytes:
    """Return the bytes behind the last whole row of columns and the last word."""
    return data[len(data) // (8 * _COLUMNS) * (8 * _COLUMNS) :].tobytes()


def _columns(words: Array, time_budget: TimeBudget) -> bytes:
    begin = time.perf_counter()
    rows = len(words) // _COLUMNS
    sums: Array = np.add.reduce(words[: rows * _COLUMNS].reshape(rows, _COLUMNS), axis=0)
    if words.nbytes > _WHOLE_NBYTES:
        time_budget.spend(time.perf_counter() - begin)
    return sums.tobytes()


# Not `np.void`, a record: it is a view of its array.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), np.number, np.bool_, np.datetime64)
_EXACTLY_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_NUMBERS = frozenset({int, float, bool, type(None)})
_DEPTH = 4  # a batch, its parts, their parts, and the samples or rows in these

KeyPath: TypeAlias = tuple[Any, ...]
MemoryLocation: TypeAlias = tuple[str, int]
"""Where something lies: the address of an array's first element, or the identity of a list or dictionary."""


@dataclass(eq=False, slots=True)
class _Part:
    """A part of an item, and what tells whether it is as it was."""

    path: KeyPath  # keys and positions on the way to it, for messages
    holder: Any
    is_unchanged: Callable[[], bool]
    is_array: bool = False
    costly: bool = False  # whether comparing it takes longer than finding its location

    @property
    def location(self) -> MemoryLocation:
        """Where it lies; parts of items that are both alive lie in the same location if they share it."""
        if self.is_array:
            return "memory", self.holder.__array_interface__["data"][0]
        return "object", id(self.holder)


def _converted_part(
    name: str, found: Any, sent: Array, convert: Callable[[Any], Array], time_budget: TimeBudget
) -> _Part:
    """Return an input that holds objects of unknown types: what was sent for it is kept, or a checksum of that."""
    shape, dtype = sent.shape, sent.dtype
    before = list(sent.flat) if dtype.hasobject else Checksum.of(sent, time_budget)

    def is_unchanged() -> bool:
        try:
            array = convert(found)
        except Exception as exc:  # the user's own code, of a file that is closed by now, say
            raise SourceError(
                f"input {name!r} was sent to the teachers, but it cannot be looked at again, to see that it did not "
                f"change while its soft labels were on their way: {exc!r}; yield numpy.array(value) for example"
            ) from exc
        if (array.shape, array.dtype) != (shape, dtype):
            return False
        return before.matches(array, time_budget) if isinstance(before, Checksum) else list(array.flat) == before

    return _Part((name,), found, is_unchanged, costly=True)


class ItemFingerprint:
    """A summary of an item's contents, to detect changes.

    `inputs` are the teachers' inputs found in it, by name. An array that only this mapping holds is not checked.
    """

    __slots__ = ("_inputs", "_parts", "_time", "_what", "conversions_matter", "rest_nbytes")

    def __init__(self, what: str, item: Any, inputs: Mapping[str, Any], time_budget: TimeBudget) -> None:
        self._what = what
        self._time = time_budget
        self._parts: list[_Part] = []
        self.conversions_matter = False  # whether it holds objects of unknown types, so that `add_sent` must be called
        self.rest_nbytes = 0  # of what the item holds besides the inputs, as far as that is known
        self._inputs = frozenset(map(id, inputs.values()))
        seen: set[int] = set()  # identities of what the item or `inputs` holds, until this is done
        self._add(item, (), seen)
        rest_nbytes = self.rest_nbytes
        for name in inputs:
            found = inputs[name]
            if id(found) not in seen and type(found) not in _EXACTLY_PLAIN:
                # An array that was made on the way, and that only `inputs` and this loop have, cannot change.
                plain = type(found) is np.ndarray and found.base is None
                if not plain or _references(inputs)[name] > _ALONE + 1:
                    self._add(found, (name,), seen)
        self.rest_nbytes = rest_nbytes

    def add_sent(self, inputs: Mapping[str, Any], sent: Mapping[str, Array], convert: Callable[[Any], Array]) -> None:
        """Keep what was sent of inputs that may hold objects of unknown types."""
        for name, found in inputs.items():
            looked_at = isinstance(found, np.ndarray) or (is_tensor(found) and _shared_memory(found) is not None)
            if not looked_at and not isinstance(found, _PLAIN):
                self._parts.append(_converted_part(name, found, sent[name], convert, self._time))

    @property
    def locations(self) -> set[MemoryLocation]:
        """Where the parts lie."""
        return {part.location for part in self._parts}

    def check(self) -> None:
        """Check that the item is as it was."""
        for part in self._parts:
            if not part.is_unchanged():
                raise self._error(part)

    def check_locations(self, places: Callable[[], Container[MemoryLocation]]) -> None:
        """Check, as `check`, the parts that lie in certain locations."""
        for part in self._parts:
            if part.costly:
                if part.location in places() and not part.is_unchanged():
                    raise self._error(part)
            elif not part.is_unchanged() and part.location in places():
                raise self._error(part)

    def _error(self, part: _Part) -> SourceError:
        where = f" ({''.join(f'[{key!r}]' for key in part.path)})" if part.path else ""
        return SourceError(
            f"{self._what} changed while its soft labels were on their way, or while it was in use{where}: yield a new "
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
            self._add_array(np.asarray(value), path, seen)  # of the same memory
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
            self.conversions_matter = True
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
                if len(path) >= _DEPTH:
                    self.conversions_matter = True
                    return
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
        elif array.nbytes <= SMALL_NBYTES:
            content = array.tobytes()
            self._parts.append(_Part(path, array, lambda: bool(array.tobytes() == content), is_array=True))
        else:
            unchanged = functools.partial(Checksum.of(array, self._time).matches, array, self._time)
            self._parts.append(_Part(path, array, unchanged, is_array=True, costly=True))

    def _add_tensor(self, tensor: Any, path: KeyPath, seen: set[int]) -> None:
        memory = _shared_memory(tensor)
        if memory is not None:
            begin = tensor.data_ptr()  # which becomes another one where the source gives it other memory
            self._parts.append(_Part(path, tensor, lambda: tensor.data_ptr() == begin))
            self._add_array(memory, path, seen)
            return
        self.rest_nbytes += object_nbytes(tensor)
        version = _version(tensor)
        if version is not None:
            self._parts.append(_Part(path, tensor, lambda: _version(tensor) == version))
        else:
            self.conversions_matter = True

    def _add_buffer(self, buffer: bytearray | memoryview | array.array[Any] | mmap.mmap, path: KeyPath) -> None:
        self.rest_nbytes += memoryview(buffer).nbytes
        before = Checksum.of(np.asarray(memoryview(buffer)), self._time) if len(buffer) else None

        def is_unchanged() -> bool:  # an array that was kept would not let the source resize its buffer
            return before.matches(np.asarray(memoryview(buffer)), self._time) if before is not None else not len(buffer)

        self._parts.append(_Part(path, buffer, is_unchanged))

    def _add_elements(self, holder: Any, elements: Callable[[], list[Any]], path: KeyPath) -> None:
        before = elements()
        self._parts.append(_Part(path, holder, lambda: _same_objects(before, elements())))

    def _add_attributes(self, value: Any, path: KeyPath, seen: set[int]) -> None:
        """Add the attributes of an object of the user's that are inputs, arrays or tensors."""
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
    """Return a tensor's own memory as an array, None if it cannot be had without a copy."""
    torch, paddle = sys.modules.get("torch"), sys.modules.get("paddle")
    try:
        if torch is not None and isinstance(tensor, torch.Tensor):
            if tensor.device.type == "cpu":
                own = tensor.detach()
                found: Array = (own.view(torch.int16) if own.dtype is torch.bfloat16 else own).numpy()
                return found
        elif paddle is not None and isinstance(tensor, paddle.Tensor) and tensor.place.is_cpu_place():
            return np.from_dlpack(tensor.detach())  # its own `numpy` copies
    except (RuntimeError, TypeError, BufferError):  # sparse, quantized, a view of bfloat16 with gaps, ...
        pass
    return None


def _version(tensor: Any) -> int | None:
    """Return how often a tensor was written to in place, None if it does not say."""
    for name in ("_version", "inplace_version"):
        try:
            found = getattr(tensor, name)
        except (AttributeError, RuntimeError):  # torch's tensors of inference mode do not count
            continue
        if isinstance(found, int):
            return found
    return None


def _references(values: Mapping[str, Any]) -> dict[str, int]:
    return {name: sys.getrefcount(value) for name, value in values.items()}


_ALONE = _references({"": np.empty(0)})[""]
"""How many references there are to what only a mapping holds, in this version of Python."""
