"""What is asked of teachers, and the bytes of one request: values shared by the engine and its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from edl.distill.compress import TopK
from edl.distill.transport.shm import Arena, Slot
from edl.errors import SettingsError, SourceError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.tensors import Array
from edl.settings import is_above_zero, is_count

__all__ = ["Ask", "ModelSpec", "Outputs", "Payload", "Reply", "TensorSpec"]

Outputs = dict[str, Array | TopK]


class Reply(NamedTuple):
    """A teacher's answer, and the version of the model that it is of; empty if the server does not say."""

    outputs: Outputs
    version: str


def check_version(version: object) -> None:
    """Refuse what names no version: 2 is not "2" in a cache, nor on the wire.

    Raises:
        SettingsError: it is no string.
    """
    if not isinstance(version, str):
        raise SettingsError(f"version={version!r}: must be a string, such as {str(version)!r}; empty for any")


@dataclass(frozen=True)
class Ask:
    """What a student wants of a teacher for each request.

    Attributes:
        outputs: names of the model's outputs.
        model: the model's name in KServe v2 requests; empty for the only model of the server.
        top_k: deliver the k largest logits of each row as `TopK`, None for whole outputs.
        temperature: at which the tail's mass is summed up with `top_k`.
        dtype: "float16" or "float32" for floating-point outputs, None as the model gives them.
        version: labels of this version of the model only; empty for the one that a server answers with by itself.
    """

    outputs: tuple[str, ...]
    model: str = ""
    top_k: int | None = None
    temperature: float = 1.0
    dtype: Literal["float16", "float32"] | None = None
    version: str = ""

    def __post_init__(self) -> None:
        check_version(self.version)
        if not self.outputs or not all(isinstance(name, str) and name for name in self.outputs):
            raise SettingsError(f"outputs {self.outputs!r}: name at least one output of the teacher")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        if not is_above_zero(self.temperature) or self.temperature == float("inf"):
            raise SettingsError(f"temperature={self.temperature!r}: must be a finite number above 0")
        object.__setattr__(self, "temperature", float(self.temperature))
        if self.dtype not in (None, "float16", "float32"):
            raise SettingsError(f"dtype={self.dtype!r}: must be 'float16', 'float32' or None")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model. `shape` is without the rows; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether one row of `shape` is as the model says."""
        return len(shape) == len(self.shape) and all(
            want in (-1, have) for want, have in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class ModelSpec:
    """A teacher's model, as its metadata says.

    Attributes:
        name: of the model.
        version: the one that is asked for, or whose answers are expected: the newest, until an answer says another.
            Empty if the server does not say.
        inputs, outputs: by name. Empty if the server does not say.
        max_rows: the most in one request, 0 if the server does not say.
        max_nbytes: of the tensors of one request, 0 if there is no limit.
        versions: all that the server has; where one is asked for, this one, or none if the server lists none.
    """

    name: str
    version: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    max_rows: int = 0
    max_nbytes: int = 0
    versions: tuple[str, ...] = ()


@dataclass
class Payload:
    """The input tensors of one request, ready to send to any teacher of a service.

    `raw` are the user's own arrays, or views of a slot of shared memory. A message is made of them when it is sent,
    not ahead of time, so that the few messages under way use the same, warm memory over and over.
    `traceparent` is that of `tracing.current_traceparent`.
    """

    rows: int
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, datatype, shape with rows
    raw: Sequence[codec.Buffer]
    slot: Slot | None = None
    traceparent: str = ""

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum([memoryview(part).nbytes for part in self.raw])

    @classmethod
    def of(cls, arrays: Mapping[str, Array], arena: Arena | None, *, copy: bool = False) -> Payload:
        """Take arrays [rows, ...] in. With an arena, they are copied into its shared memory, if it has room.

        Args:
            copy: copy them in any case, so that what is sent later on is what they hold now.
        """
        rows = next(iter(arrays.values())).shape[0]
        inputs = tuple((name, tensors.datatype_of(array.dtype), array.shape) for name, array in arrays.items())
        plain = all(datatype != "BYTES" for _, datatype, _ in inputs)
        slot = arena.take(sum(array.nbytes for array in arrays.values())) if arena is not None and plain else None
        if slot is None:
            raw = [_to_raw(name, array) for name, array in arrays.items()]
            return cls(rows, inputs, [bytes(part) for part in raw] if copy else raw)
        raw, at, memory = [], 0, slot.memory
        for array in arrays.values():
            part = memory[at : at + array.nbytes]
            little = array.dtype.newbyteorder("<")
            np.copyto(part.view(little).reshape(array.shape), array)
            raw.append(part.data)
            at += array.nbytes
        return cls(rows, inputs, raw, slot)


def _to_raw(name: str, array: Array) -> codec.Buffer:
    try:
        return tensors.to_raw(array)
    except UnicodeEncodeError as exc:
        raise SourceError(
            f"input {name!r} has a string that is no text, {exc.object[:64]!r}: {exc.reason} at position {exc.start}. "
            "Clean it in your source, or send bytes"
        ) from exc


def datatype_asked(dtype: Literal["float16", "float32"]) -> str:
    """KServe's name of a dtype that is asked for."""
    return "FP16" if dtype == "float16" else "FP32"


def request_header(
    ask: Ask, model: str, payload: Payload, *, compressed: bool, region: str | None, version: str = ""
) -> bytes:
    """A serialized ModelInferRequest with everything but raw tensors.

    Args:
        version: of the model; empty to leave it to the server.
        compressed: ask the server for `top_k`; else it sends whole outputs.
        region: the name under which the server knows the payload's shared memory, which is named in place of raw
            tensors; None to send those.
    """
    header = kserve.ModelInferRequest(model_name=model, model_version=version)
    at = payload.slot.offset if payload.slot is not None else 0
    for (name, datatype, shape), raw in zip(payload.inputs, payload.raw, strict=True):
        tensor = header.inputs.add(name=name, datatype=datatype, shape=shape)
        if region is not None and payload.slot is not None:
            nbytes = memoryview(raw).nbytes
            tensor.parameters[names.SHM_REGION].string_param = region
            tensor.parameters[names.SHM_OFFSET].int64_param = at
            tensor.parameters[names.SHM_NBYTES].int64_param = nbytes
            at += nbytes
    outputs = ask.outputs
    if ask.top_k is not None and compressed:
        header.parameters[names.TOP_K].int64_param = ask.top_k
        header.parameters[names.TEMPERATURE].double_param = ask.temperature
    if ask.dtype is not None:
        header.parameters[names.DTYPE].string_param = datatype_asked(ask.dtype)
    for name in outputs:
        header.outputs.add(name=name)
    return bytes(header.SerializeToString())


def select_inputs(spec: ModelSpec, fields: Mapping[str, Array]) -> dict[str, Array]:
    """Those fields that the model wants, in the types that it wants.

    Raises:
        SourceError: a field has another shape, or a type or value that the model's type does not have.
    """
    if not spec.inputs:
        return dict(fields)
    missing = [name for name in spec.inputs if name not in fields]
    if missing:
        raise SourceError(
            f"the teachers' model {spec.name!r} wants input {missing[0]!r}; the source provides "
            f"{', '.join(map(repr, fields)) or 'none'}: name it in `ins`"
        )
    return {name: _as_wanted(fields[name], wanted, spec.name) for name, wanted in spec.inputs.items()}


def _as_wanted(array: Array, wanted: TensorSpec, model: str) -> Array:
    if not wanted.fits(array.shape[1:]):
        raise SourceError(
            f"input {wanted.name!r} has rows of shape {list(array.shape[1:])}; "
            f"model {model!r} wants {list(wanted.shape)} (-1 is any size)"
        )
    if wanted.datatype == "BF16":
        return _as_bfloat16(array, wanted, model)
    dtype = tensors.dtype_of(wanted.datatype)
    if array.dtype == dtype or (dtype.kind == "O" and array.dtype.kind in "SUO"):
        return array
    # Whole numbers go by their values: numpy has no cast from signed to unsigned, of which 7 would need no warning.
    whole = array.dtype.kind in "iu" and dtype.kind in "iu"
    if dtype.kind == "O" or not (whole or np.can_cast(array.dtype, dtype, "same_kind")):
        return _refuse(array, wanted, model)
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    lost = _first_lost(array, converted)
    return _refuse(array, wanted, model, lost) if lost is not None else converted


def _as_bfloat16(array: Array, wanted: TensorSpec, model: str) -> Array:
    if array.dtype.kind not in "iuf":
        return _refuse(array, wanted, model)
    with np.errstate(over="ignore"):
        converted = tensors.to_bfloat16(array)
    back = tensors.from_bfloat16(converted)
    changed = np.isinf(back) & ~np.isinf(array) if array.dtype.kind == "f" else _other_than(back, array)
    where = np.flatnonzero(changed)
    return _refuse(array, wanted, model, str(array.reshape(-1)[where[0]])) if where.size else converted


def _first_lost(array: Array, converted: Array) -> str | None:
    """The first value that a conversion made another one of, None if there is none.

    Of floating-point numbers the digits that the smaller type does not have may go, to the last of those that are too
    small for it; but none may become infinite.
    """
    # numpy calls 64-bit integers safe in FP64, which has 53 bits for them.
    large = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    if not array.size or (not large and np.can_cast(array.dtype, converted.dtype, "safe")):
        return None
    if array.dtype.kind == "f":
        # Either extreme is infinite if any value is; NaN in them hides the others, and calls for the closer look.
        if np.isfinite([converted.min(), converted.max()]).all():
            return None
        changed = np.isinf(converted) & ~np.isinf(array)
    else:
        low, high = _exact_range(converted.dtype)
        if low <= int(array.min()) and int(array.max()) <= high:
            return None
        # Beyond the range of floating-point numbers, too, every second or fourth one is exact.
        floating = converted.dtype.kind == "f"
        changed = _other_than(converted, array) if floating else (array < low) | (array > high)
    where = np.flatnonzero(changed)
    return str(array.reshape(-1)[where[0]]) if where.size else None


def _other_than(converted: Array, whole: Array) -> Array:
    """Where floating-point numbers made of whole numbers are not these."""
    wide = converted.astype(np.float64)
    others: Array = wide != whole
    if whole.dtype.itemsize < 8:
        return others
    # numpy compares 64-bit integers as if they were float64, which has 53 bits for them.
    within = (wide >= -(2.0**63)) & (wide < float(np.iinfo(whole.dtype).max))  # as float64 that is 2**63 or 2**64
    others |= ~within | (np.where(within, wide, 0).astype(whole.dtype) != whole)
    return others


def _exact_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """From where to where every whole number is itself in this type."""
    if dtype.kind == "f":
        most = 2 ** (np.finfo(dtype).nmant + 1)
        return -most, most
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _refuse(array: Array, wanted: TensorSpec, model: str, value: str = "") -> Array:
    what = f"holds {value} as {array.dtype}" if value else f"is {array.dtype}"
    raise SourceError(
        f"input {wanted.name!r} {what}; model {model!r} wants {wanted.datatype}, "
        "and converting would lose information: convert it in your source"
    )
