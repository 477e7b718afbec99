"""KServe v2 tensors as numpy arrays: names of types, sizes, raw bytes, typed contents and top-k labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from edl.errors import ProtocolError
from edl.protocol import kserve
from edl.protocol.codec import CONTENTS_FIELDS, Buffer

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""An array of numpy's, of any shape and dtype."""

BFLOAT16: Final = np.dtype("V2")
"""numpy has no bfloat16: arrays on their way to a model that wants BF16 hold two bytes each that it does not read."""

EXACT_FLOAT64: Final = 2.0**53
"""Below it every whole number is a float64 of its own."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(np.object_),
}
_DATATYPES = {dtype: name for name, dtype in _DTYPES.items()}

_AT_A_TIME: Final = 1 << 16
"""Elements of typed contents that are Python objects at a time: between two such parts other threads get their turn."""

_WIDE = {"i": np.dtype(np.int64), "u": np.dtype(np.uint64)}
"""Types that hold whatever protobuf's fields of whole numbers hold."""


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the numpy dtype in which EDL hands over a tensor of KServe's `datatype` (BF16 becomes float32)."""
    if datatype == "BF16":
        return np.dtype("<f4")
    try:
        return _DTYPES[datatype]
    except KeyError:
        known = ", ".join([*_DTYPES, "BF16"])
        raise ProtocolError(f"unknown datatype {datatype!r}; known: {known}") from None


def datatype_of(dtype: np.dtype[Any]) -> str:
    """KServe's name of a numpy dtype; strings and bytes are `BYTES`."""
    if dtype.kind in "SUO":
        return "BYTES"
    if dtype == BFLOAT16:
        return "BF16"
    try:
        return _DATATYPES[dtype.newbyteorder("<")]
    except KeyError:
        raise ProtocolError(f"numpy dtype {dtype} has no KServe datatype") from None


def expected_nbytes(datatype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor in raw form; None for BYTES, whose elements have sizes of their own."""
    if any(size < 0 for size in shape):
        raise ProtocolError(f"shape {list(shape)} has a negative size")
    if datatype == "BYTES":
        return None
    itemsize = 2 if datatype == "BF16" else dtype_of(datatype).itemsize
    return math.prod(shape) * itemsize


def from_raw(datatype: str, shape: Sequence[int], raw: Buffer) -> Array:
    """Return a tensor in raw form as an array; a read-only view of `raw` where the type allows it.

    Raises:
        ProtocolError: byte count and shape do not agree, no array has such a shape, or the type is unknown.
    """
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
            raise ProtocolError(f"BYTES element {index} claims {length} bytes, {len(raw) - at} are left")
        out[index] = bytes(raw[at : at + length])
        at += length
    if at != len(raw):
        raise ProtocolError(f"BYTES of shape {list(shape)} has {len(raw) - at} bytes too many")
    return out.reshape(shape)


def from_contents(datatype: str, shape: Sequence[int], contents: kserve.InferTensorContents) -> Array:
    """Return a tensor sent as typed `contents` rather than raw bytes.

    Raises:
        ProtocolError: the element count and the shape do not agree, a value is out of range, or the type
            cannot travel so.
    """
    field = CONTENTS_FIELDS.get(datatype)
    if field is None:
        raise ProtocolError(f"{datatype} cannot be sent as typed contents; send raw_input_contents")
    expected_nbytes(datatype, shape)
    values = getattr(contents, field)
    if len(values) != math.prod(shape):
        raise ProtocolError(
            f"{datatype} of shape {list(shape)} takes {math.prod(shape)} elements, {field} has {len(values)}"
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
        for value in (int(wide.min()), int(wide.max())):  # numpy 1 would have it wrap around
            if not least <= value <= most:
                raise ProtocolError(f"a value in {field} does not fit {datatype}: {value}")
    return wide.astype(dtype, copy=False).reshape(shape)


def array_of(value: Any) -> Array:
    """Return a value as an array, with bytes, strings and whole numbers as they are.

    numpy alone makes `S` of a list of bytes, whose NULs at the end are lost, words of the numbers beside words, and
    floats of whole numbers that no integer type holds together.

    Raises:
        ProtocolError: bytes or whole numbers would be changed on the way.
        ValueError: numpy makes no array of it, as of rows of different lengths.
    """
    if isinstance(value, np.ndarray):
        return with_objects(np.asarray(value))
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, bytes | str):
        return _objects(value)
    array: Array = np.asarray(value)
    if array.dtype.kind in "SU":
        return _objects(value) if isinstance(value, list | tuple) else with_objects(array)
    if array.dtype.kind == "f" and isinstance(value, list | tuple):
        _refuse_rounded(value, array)
    return array


def with_objects(array: Array) -> Array:
    """Return the array; with bytes or strings of a fixed size as Python objects.

    numpy fills what is shorter than the size with NULs, and cuts all NULs off when it is read. For text that is right.
    For bytes, which may well end in NULs (whole numbers, samples of sound), it cannot be told what was filled up.

    Raises:
        ProtocolError: an element of dtype `S` ends in NULs.
    """
    if array.dtype.kind == "S" and array.size and array.dtype.itemsize:
        last = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)[:, -1]
        short = np.flatnonzero(last == 0)
        if short.size:
            raise ProtocolError(
                f"element {short[0]} of an array of dtype S{array.dtype.itemsize} ends in NULs, which may belong to it "
                "or fill it up: numpy does not know. Make it an array of objects, np.array(values, dtype=object), or "
                "array.astype(object) if they only fill it up"
            )
    return array.astype(object) if array.dtype.kind in "SU" else array


def _objects(value: Any) -> Array:
    """Bytes and strings, alone or in lists, as an array of objects."""
    if isinstance(value, bytes | str):
        alone = np.empty((), np.object_)
        alone[()] = value
        return alone
    _check_fixed_size(value)
    array: Array = np.array(value, np.object_)
    return array


def _check_fixed_size(value: Any) -> None:
    """Refuse arrays in lists that `with_objects` refuses."""
    for part in value:
        if isinstance(part, list | tuple):
            _check_fixed_size(part)
        elif isinstance(part, np.ndarray):
            with_objects(part)


def _refuse_rounded(value: Any, array: Array) -> None:
    """Refuse a list of numbers if its whole numbers did not stay what they are."""
    if array.dtype.itemsize > 8 or not array.size or not np.abs(array).max() >= EXACT_FLOAT64:
        return
    for before, after in zip(np.array(value, np.object_).flat, array.flat, strict=True):
        if isinstance(before, int | np.integer) and int(before) != float(after):  # numpy would compare floats
            raise ProtocolError(
                f"a list of numbers that no type of whole numbers holds together, so that {before} would become "
                f"{float(after)!r}: make it an array of one type"
            )


def to_bfloat16(array: Array) -> Array:
    """Numbers [rows, ...] as bfloat16 of dtype `BFLOAT16`; what is too large is infinite.

    Rounded as float32 to the nearest, ties to even, as torch does.
    """
    single = np.ascontiguousarray(array, "<f4").reshape(array.shape)
    bits = single.view("<u4")
    upper = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    upper[np.isnan(single)] = 0x7FC0  # rounding might carry a NaN's last digits into its sign
    result: Array = upper.view(BFLOAT16)
    return result


def from_bfloat16(array: Array) -> Array:
    """Return the same numbers as float32."""
    result: Array = (array.view("<u2").astype("<u4") << 16).view("<f4")
    return result


def cast_clamped(array: Array, dtype: np.dtype[Any]) -> Array:
    """Cast floating-point numbers, and clamp finite values to the range of `dtype`.

    Masks such as -1e9 are common, and a logit that becomes infinite would make all probabilities of its row NaN.
    """
    if array.dtype.itemsize <= dtype.itemsize or not array.size:
        return array.astype(dtype, copy=False)
    most = np.finfo(dtype).max
    if not (-most <= array.min() and array.max() <= most):  # also if there is NaN
        array = np.where(np.isinf(array), array, np.clip(array, -most, most))
    return array.astype(dtype)


def split_top_k(logits: Array, k: int, temperature: float) -> tuple[Array, Array, Array]:
    """Find the k largest logits on the last axis, and what the remaining ones add to a softmax.

    Returns:
        Class ids (int32 `[..., k]`, by falling logit, equal logits by rising id), their logits (in the dtype of
        `logits`), and log(sum(exp(logit / temperature))) over the rest (float32 `[...]`, -inf if there are none).
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
    """Return an array's elements in raw form, little-endian, C order; a view of the array where it is so already.

    Raises:
        ProtocolError: an element of an array of objects is neither bytes nor text, or see `with_objects`.
    """
    if array.dtype.kind in "SUO":
        parts = bytearray()
        for item in with_objects(array).reshape(-1):
            if not isinstance(item, bytes | str):  # bytes(3) are three NULs
                raise ProtocolError(f"a BYTES tensor has bytes and text, not {type(item).__name__}")
            data = item.encode() if isinstance(item, str) else item
            parts += len(data).to_bytes(4, "little") + data
        return parts
    wire = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return wire.reshape(-1).view(np.uint8).data if wire.size else b""
