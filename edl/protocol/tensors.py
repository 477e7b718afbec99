"""KServe v2 tensors as numpy arrays: types, sizes, raw bytes, typed contents, top-k labels, and users' own arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from edl.errors import ProtocolError, SourceError
from edl.protocol import kserve
from edl.protocol.codec import Buffer

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""A numpy array of any shape and dtype."""

BFLOAT16: Final = np.dtype("V2")
"""The dtype of arrays that are sent to a BF16 model: two opaque bytes per number, because numpy has no bfloat16."""

EXACT_FLOAT64: Final = 2.0**53  # below it, every whole number is exact in float64

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BYTES": np.dtype(np.object_),
}
_DATATYPES = {dtype: name for name, dtype in _DTYPES.items()}

_CONTENTS = (
    {"BOOL": "bool_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents"}
    | {"INT64": "int64_contents", "UINT64": "uint64_contents"}
    | dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents")
    | dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents")
)
"""For each datatype, the field of `InferTensorContents` that contains its elements."""

_AT_A_TIME: Final = 1 << 16
"""How many elements of typed contents are converted at a time; other threads can run in between."""

_WIDE = {"i": np.dtype(np.int64), "u": np.dtype(np.uint64)}
"""Types that hold every value of protobuf's integer fields."""


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the numpy dtype in which EDL represents a tensor of KServe's `datatype`; for BF16, this is float32."""
    if datatype == "BF16":
        return np.dtype("<f4")
    try:
        return _DTYPES[datatype]
    except KeyError:
        known = ", ".join([*_DTYPES, "BF16"])
        raise ProtocolError(f"unknown datatype {datatype!r}; known: {known}") from None


def datatype_of(dtype: np.dtype[Any]) -> str:
    """Return KServe's name for a numpy dtype; strings and bytes are `BYTES`."""
    if dtype.kind in "SUO":
        return "BYTES"
    if dtype == BFLOAT16:
        return "BF16"
    try:
        return _DATATYPES[dtype.newbyteorder("<")]
    except KeyError:
        raise ProtocolError(f"numpy dtype {dtype} has no KServe datatype") from None


def expected_nbytes(datatype: str, shape: Sequence[int]) -> int | None:
    """Return the size of a tensor in raw form, in bytes; None for BYTES, whose elements vary in size."""
    if any(size < 0 for size in shape):
        raise ProtocolError(f"shape {list(shape)} has a negative size")
    if datatype == "BYTES":
        return None
    itemsize = 2 if datatype == "BF16" else dtype_of(datatype).itemsize
    return math.prod(shape) * itemsize


def from_raw(datatype: str, shape: Sequence[int], raw: Buffer) -> Array:
    """Return raw bytes as an array, a read-only view if possible; ProtocolError if the bytes are invalid."""
    expected = expected_nbytes(datatype, shape)
    nbytes = memoryview(raw).nbytes
    if expected is not None and nbytes != expected:
        raise ProtocolError(f"{datatype} of shape {list(shape)} takes {expected} bytes, not {nbytes}")
    try:
        if expected is None:
            return _from_length_prefixed(shape, memoryview(raw).cast("B"))
        if datatype == "BF16":
            return from_bfloat16(np.frombuffer(raw, BFLOAT16)).reshape(shape)
        return np.frombuffer(raw, _DTYPES[datatype]).reshape(shape)
    except ValueError as exc:  # 70 dimensions, say, or one of 2**62 beside one of 0
        raise ProtocolError(f"{datatype} of shape {list(shape)} cannot be an array: {exc}") from exc


def _from_length_prefixed(shape: Sequence[int], raw: memoryview) -> Array:
    count = math.prod(shape)
    if count * 4 > len(raw):
        raise ProtocolError(f"BYTES of shape {list(shape)} takes at least {count * 4} bytes, not {len(raw)}")
    out = np.empty(count, np.object_)
    at = 0
    for index in range(count):
        if at + 4 > len(raw):
            raise ProtocolError(f"BYTES element {index} of {count} is cut off")
        length = int.from_bytes(raw[at : at + 4], "little")
        at += 4
        if at + length > len(raw):
            raise ProtocolError(f"BYTES element {index} claims {length} bytes, but only {len(raw) - at} are left")
        out[index] = bytes(raw[at : at + length])
        at += length
    if at != len(raw):
        raise ProtocolError(f"BYTES of shape {list(shape)} has {len(raw) - at} bytes too many")
    return out.reshape(shape)


def from_contents(datatype: str, shape: Sequence[int], contents: kserve.InferTensorContents) -> Array:
    """Return a tensor sent as typed `contents`, not raw bytes; ProtocolError if a type, count or range is wrong."""
    field = _CONTENTS.get(datatype)
    if field is None:
        raise ProtocolError(f"{datatype} cannot be sent as typed contents; send raw_input_contents")
    expected_nbytes(datatype, shape)
    values = getattr(contents, field)
    if len(values) != math.prod(shape):
        raise ProtocolError(
            f"{datatype} of shape {list(shape)} takes {math.prod(shape)} elements, but {field} has {len(values)}"
        )
    if datatype == "BYTES":
        out = np.empty(len(values), np.object_)
        out[:] = list(values)
        return out.reshape(shape)
    dtype = _DTYPES[datatype]
    wide: Array = np.empty(len(values), _WIDE.get(dtype.kind, dtype))
    for at in range(0, len(values), _AT_A_TIME):
        wide[at : at + _AT_A_TIME] = np.array(values[at : at + _AT_A_TIME], wide.dtype)
    if dtype.kind in "iu" and wide.size:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        for value in (int(wide.min()), int(wide.max())):  # in numpy 1 it would wrap around
            if not least <= value <= most:
                raise ProtocolError(f"a value in {field} does not fit {datatype}: {value}")
    return wide.astype(dtype, copy=False).reshape(shape)


def array_of(value: Any) -> Array:
    """Return a value as an array, without changing bytes, strings or whole numbers.

    By itself, numpy converts a list of bytes to dtype `S`, which loses NULs at the end. It converts numbers next to
    strings to strings, and whole numbers to floats if no integer type can hold all of them.

    Raises:
        ProtocolError: The conversion would change bytes or whole numbers.
        ValueError: numpy cannot convert the value, for example because its rows have different lengths.
    """
    if isinstance(value, np.ndarray):
        return with_objects(np.asarray(value))
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    array: Array = np.asarray(value, np.object_ if isinstance(first, bytes | str) else None)
    if not isinstance(value, list | tuple):
        return with_objects(array)
    if array.dtype.kind in "SUO":
        _check_fixed_size(value)
        return array if array.dtype.kind == "O" else np.array(value, np.object_)
    if array.dtype.kind == "f":
        _refuse_rounded(value, array)
    return array


def with_objects(array: Array) -> Array:
    """Return the array, with elements of dtype `S` or `U` (a fixed size) converted to Python objects.

    numpy pads shorter elements with NULs, and strips all trailing NULs on reading. This is correct for text. But bytes
    may end in NULs that are data (whole numbers, audio samples), and such NULs cannot be distinguished from padding.

    Raises:
        ProtocolError: An element of dtype `S` ends in NULs.
    """
    if array.dtype.kind == "S" and array.size and array.dtype.itemsize:
        last = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)[:, -1]
        short = np.flatnonzero(last == 0)
        if short.size:
            raise ProtocolError(
                f"element {short[0]} of an array of dtype S{array.dtype.itemsize} ends in NULs, which may be data "
                "or padding: numpy cannot tell. Make it an array of objects, np.array(values, dtype=object), or "
                "array.astype(object) if they are only padding"
            )
    return array.astype(object) if array.dtype.kind in "SU" else array


def _check_fixed_size(value: Any) -> None:
    """Raise ProtocolError if a list contains an array for which `with_objects` raises ProtocolError."""
    if isinstance(value, np.ndarray):
        with_objects(value)
    elif isinstance(value, list | tuple):
        for part in value:
            _check_fixed_size(part)


def _refuse_rounded(value: Any, array: Array) -> None:
    """Raise ProtocolError if the conversion of a list of numbers changed its whole numbers."""
    if array.dtype.itemsize > 8 or not array.size or not np.abs(array).max() >= EXACT_FLOAT64:
        return
    for before, after in zip(np.array(value, np.object_).flat, array.flat, strict=True):
        if isinstance(before, int | np.integer) and int(before) != float(after):  # numpy would compare floats
            raise ProtocolError(
                f"no integer type holds all numbers of the list, so {before} would become "
                f"{float(after)!r}: make the list an array of one type"
            )


def from_bfloat16(array: Array) -> Array:
    """Return the same numbers as float32."""
    result: Array = (array.view("<u2").astype("<u4") << 16).view("<f4")
    return result


def cast_clamped(array: Array, dtype: np.dtype[Any]) -> Array:
    """Cast floating-point numbers, and clamp finite values to the range of `dtype`.

    Masks such as -1e9 are common, and a logit that becomes infinite would make all probabilities in its row NaN.
    """
    if array.dtype.itemsize <= dtype.itemsize or not array.size:
        return array.astype(dtype, copy=False)
    most = np.finfo(dtype).max
    if not (-most <= array.min() and array.max() <= most):  # also for NaN
        array = np.where(np.isinf(array), array, np.clip(array, -most, most))
    return array.astype(dtype)


def split_top_k(logits: Array, k: int, temperature: float) -> tuple[Array, Array, Array]:
    """Return the k largest logits on the last axis, and what the remaining logits add to the sum of a softmax.

    The result is the class ids (int32 `[..., k]`, by descending logit, then ascending id), their logits (in the dtype
    of `logits`), and log(sum(exp(logit / temperature))) over the remaining classes (float32 `[...]`, -inf if there are
    none).
    """
    ids = np.argpartition(logits, logits.shape[-1] - k, axis=-1)[..., -k:]
    ids.sort(axis=-1)
    values = np.take_along_axis(logits, ids, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    ids = np.take_along_axis(ids, order, -1)
    values = np.take_along_axis(values, order, -1)
    if k == logits.shape[-1]:
        return ids.astype(np.int32), values, np.full(logits.shape[:-1], -np.inf, np.float32)
    tail = logits.astype(np.float64 if logits.dtype.itemsize > 4 else np.float32)
    np.put_along_axis(tail, ids, -np.inf, -1)
    largest = tail.max(-1, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0)  # inf - inf would be NaN
    with np.errstate(over="ignore", divide="ignore"):
        np.subtract(tail, shift, out=tail)
        np.divide(tail, temperature, out=tail)
        total = np.exp(tail, out=tail).sum(-1, keepdims=True)
        lse = np.log(total) + shift / temperature
    return ids.astype(np.int32), values, lse[..., 0].astype(np.float32)


def to_raw(array: Array) -> Buffer:
    """Return an array's elements in raw form (little-endian, C order); a view of the array if it has this form.

    Raises:
        ProtocolError: An element of an array of objects is neither bytes nor text, or `with_objects` raises it.
    """
    if array.dtype.kind in "SUO":
        parts = bytearray()
        for item in with_objects(array).reshape(-1):
            if not isinstance(item, bytes | str):  # bytes(3) are three NULs
                raise ProtocolError(f"a BYTES tensor holds bytes and text, not {type(item).__name__}")
            data = item.encode() if isinstance(item, str) else item
            parts += len(data).to_bytes(4, "little") + data
        return parts
    wire = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return wire.reshape(-1).view(np.uint8).data if wire.size else b""


# Arrays from a user's source

_FIRST_ROWS = 256
"""Initial capacity of a buffer, in rows: a typical request. A user may allow millions of rows, but send far fewer."""


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch or paddle tensor."""
    return hasattr(value, "detach") and hasattr(value, "numpy")


def as_array(value: Any, what: str) -> Array:
    """Convert an array, a tensor of any framework, or a list to a numpy array; `what` names the value in messages.

    An array of numbers is returned unchanged. For a CPU tensor, the result is a view; for other values, the result is a
    copy. Bytes and strings become Python objects.

    Raises:
        SourceError: The value cannot be sent to a teacher.
    """
    try:
        numpy_has_it = isinstance(value, np.ndarray) or not is_tensor(value)
        array = array_of(value) if numpy_has_it else _array_of_tensor(value)
    except (ValueError, TypeError, OverflowError, ProtocolError) as exc:
        raise SourceError(f"{what}: cannot be converted to an array: {exc}") from exc
    if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise SourceError(f"{what}: a masked array cannot be sent; fill the masked values, as with array.filled(0)")
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # from ml_dtypes, as in JAX; `name` takes 5 us
        array = array.astype(np.float32)
    if array.dtype.kind not in "biufO" or array.dtype.itemsize > 8:
        raise SourceError(
            f"{what}: dtype {array.dtype} cannot be sent: make it numbers of up to 64 bits, booleans, bytes or strings"
        )
    if array.dtype.kind in "iuf" and isinstance(value, list | tuple) and _has_boolean(value):
        raise SourceError(f"{what}: a mix of booleans and numbers: make all of them numbers")
    if array.dtype.kind == "O":
        strange = {kind for kind in set(map(type, array.flat)) if not issubclass(kind, bytes | str)}
        if strange:
            at, found = next((at, element) for at, element in enumerate(array.flat) if type(element) in strange)
            raise SourceError(
                f"{what}: an array of Python objects cannot be sent; make it an array of numbers or strings "
                f"(element {at} is {type(found).__name__})"
            )
    return array


def _has_boolean(values: list[Any] | tuple[Any, ...]) -> bool:
    kinds = set(map(type, values))
    lists = [part for part in values if isinstance(part, list | tuple)] if kinds & {list, tuple} else []
    return bool in kinds or any(map(_has_boolean, lists))


def _array_of_tensor(value: Any) -> Array:
    try:
        tensor = value.detach().cpu()
        array: Array = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
    except RuntimeError as exc:  # sparse, nested, without data, ...
        raise TypeError(exc) from exc
    return array


class RowBuffer:
    """Holds copies of up to `most` rows of an input: a source may reuse memory.

    Messages about shapes end with `remedy`.
    """

    def __init__(self, name: str, most: int, remedy: str) -> None:
        self._name = name
        self._most = most
        self._remedy = remedy
        self._count = 0
        self._rows: Array = np.empty(0)

    def extend(self, rows: Array, what: str) -> None:
        """Add rows [rows, ...]; SourceError (with `what`) if their shape differs or no dtype can hold all rows."""
        self._admit(rows, what)
        stop = self._count + len(rows)
        if stop > len(self._rows):
            self._grow(stop)
        self._rows[self._count : stop] = rows
        self._count = stop

    def _admit(self, array: Array, what: str) -> None:
        shape = array.shape[1:]
        if not self._count:
            self._rows = np.empty((min(self._most, _FIRST_ROWS), *shape), array.dtype.newbyteorder("="))
        elif shape != self._rows.shape[1:]:
            raise SourceError(
                f"{what}: input {self._name!r} has shape {list(shape)}, but earlier samples "
                f"have {list(self._rows.shape[1:])}: {self._remedy}"
            )
        elif array.dtype != self._rows.dtype:
            self._widen(array, what)

    def gathered(self) -> Array:
        """Return all rows so far, [rows, ...]."""
        found = self._rows[: self._count]
        return found if 2 * self._count > len(self._rows) else found.copy()  # a few rows must not keep the whole buffer

    def _grow(self, least: int) -> None:
        rows = self._rows
        self._rows = np.empty((max(min(2 * self._count, self._most), least), *rows.shape[1:]), rows.dtype)
        self._rows[: self._count] = rows[: self._count]

    def _widen(self, array: Array, what: str) -> None:
        rows = self._rows[: self._count]
        dtype = np.result_type(rows, array) if (rows.dtype.kind == "O") == (array.dtype.kind == "O") else None
        if dtype is None or any(_changed_in(dtype, part) for part in (rows, array)):
            raise SourceError(
                f"{what}: input {self._name!r} is {array.dtype}, but earlier samples have {rows.dtype}, and no type "
                "holds both without loss: give all samples the same type"
            )
        self._rows = self._rows.astype(dtype)


def _changed_in(dtype: np.dtype[np.generic], array: Array) -> bool:
    """Return whether 64-bit whole numbers might change when converted to floating-point numbers."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or dtype.kind != "f" or not array.size:
        return False
    return max(-int(array.min()), int(array.max())) > EXACT_FLOAT64
