"""Creates the tensors of a request, in the model's types, and the request's header as bytes.

A value that the model's type cannot hold raises `SourceError`, because the teacher must label exactly the data that the
source yields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edl.distill.transport.schema import NO_BATCH_REMEDY, ModelSpec, OutputSpec, TensorMetadata, kserve_datatype
from edl.distill.transport.shm import Arena, ShmSlot
from edl.errors import SourceError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.tensors import Array


def select_inputs(spec: ModelSpec, fields: Mapping[str, Array]) -> dict[str, Array]:
    """Return the model's inputs in its types.

    Raises `SourceError` if an input is missing, has the wrong shape, or has a value that would change.
    """
    if not spec.inputs:
        return dict(fields)
    missing = [name for name in spec.inputs if name not in fields]
    if missing:
        raise SourceError(
            f"the teachers' model {spec.name!r} wants input {missing[0]!r}; the source provides "
            f"{', '.join(map(repr, fields)) or 'none'}: name it among the inputs (`inputs=`, `ins=` or --inputs)"
        )
    for name, wanted in spec.inputs.items():
        row = fields[name].shape[1:]
        if spec.batch_rows and replace(wanted, shape=(spec.batch_rows, *wanted.shape)).fits(row):
            raise SourceError(
                f"the teachers' model {spec.name!r} has no batch dimension: its input {name!r} {list(row)} is one row "
                f"of the source; {NO_BATCH_REMEDY}"
            )
    return {name: _as_wanted(fields[name], wanted, spec.name) for name, wanted in spec.inputs.items()}


def _as_wanted(array: Array, wanted: TensorMetadata, model: str) -> Array:
    if not wanted.fits(array.shape[1:]):
        raise SourceError(
            f"input {wanted.name!r} has rows of shape {list(array.shape[1:])}; "
            f"model {model!r} wants {list(wanted.shape)} (-1 is any size)"
        )
    to_bfloat16 = wanted.datatype == "BF16"
    dtype, kind = tensors.dtype_of(wanted.datatype), array.dtype.kind  # float32 for BF16
    if not to_bfloat16 and (array.dtype == dtype or (dtype.kind == "O" and kind in "SUO")):
        return array
    # Whole numbers are checked by value, because numpy has no safe cast from signed to unsigned, even for 7.
    whole = kind in "iu" and dtype.kind in "iu"
    what = f"is {array.dtype}"
    if kind in "iuf" if to_bfloat16 else dtype.kind != "O" and (whole or np.can_cast(array.dtype, dtype, "same_kind")):
        with np.errstate(over="ignore"):
            converted = _to_bfloat16(array) if to_bfloat16 else array.astype(dtype)
        lost = _first_lost(array, tensors.from_bfloat16(converted) if to_bfloat16 else converted, wanted.datatype)
        if lost is None:
            return converted
        what = f"holds {lost} as {array.dtype}"
    raise SourceError(
        f"input {wanted.name!r} {what}; model {model!r} wants {wanted.datatype}, "
        "and converting would lose information: convert it in your source"
    )


def _to_bfloat16(array: Array) -> Array:
    """Return numbers [rows, ...] as bfloat16, rounded to nearest, ties to even, as in torch; overflows become inf."""
    single = np.ascontiguousarray(array, "<f4").reshape(array.shape)
    bits = single.view("<u4")
    upper = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    upper[np.isnan(single)] = 0x7FC0  # rounding might carry a NaN's last digits into its sign
    result: Array = upper.view(tensors.BFLOAT16)
    return result


def _first_lost(array: Array, converted: Array, datatype: str) -> str | None:
    """Return the first value that a conversion changed, or None. Floats may lose digits, but not become infinite."""
    # numpy calls 64-bit integers safe in FP64, which has 53 bits for them.
    large = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    safe = datatype != "BF16" and not large and np.can_cast(array.dtype, converted.dtype, "safe")
    if not array.size or safe:
        return None
    if array.dtype.kind == "f":
        # Either extreme is infinite if any value is; NaN hides the others, which requires a closer check.
        if np.isfinite([converted.min(), converted.max()]).all():
            return None
        changed = np.isinf(converted) & ~np.isinf(array)
    elif converted.dtype.kind == "f":
        exact = 2 ** (8 if datatype == "BF16" else np.finfo(converted.dtype).nmant + 1)
        if -exact <= int(array.min()) and int(array.max()) <= exact:
            return None
        wide = converted.astype(np.float64)
        # Beyond that, only every second or fourth number is exact. numpy compares 64-bit integers as float64, which has
        # 53 bits for them; Python compares exactly.
        changed = wide.astype(object) != array.astype(object) if large else wide != array
    else:
        low, high = np.iinfo(converted.dtype).min, np.iinfo(converted.dtype).max
        if low <= int(array.min()) and int(array.max()) <= high:
            return None
        changed = (array < low) | (array > high)
    where = np.flatnonzero(changed)
    return str(array.reshape(-1)[where[0]]) if where.size else None


@dataclass
class Payload:
    """The input tensors of a request, ready to send to any teacher of a service."""

    rows: int  # number of rows to label
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, datatype, shape with rows
    # the user's own arrays, or views of a slot of shared memory. A message is built from them only when it is sent, so
    # that the few messages in flight reuse the same warm memory.
    raw: Sequence[codec.Buffer]
    slot: ShmSlot | None = None  # shared memory that holds `raw`; None without
    traceparent: str = ""  # from `current_traceparent`
    longest_sequence: int = 0  # rows of the longest sequence, 0 if the rows are not sequences
    padding: int = 0  # rows after those to label, copies of the last one, for a model with a fixed batch size

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum([memoryview(part).nbytes for part in self.raw])

    @classmethod
    def of(
        cls, arrays: Mapping[str, Array], arena: Arena | None, *, copy: bool = False, batch_rows: int = 0
    ) -> Payload:
        """Return a payload of arrays [rows, ...], padded to `batch_rows`, in the arena's shared memory if they fit."""
        rows = next(iter(arrays.values())).shape[0]
        padding = max(batch_rows - rows, 0)
        if padding:
            arrays = {
                name: np.concatenate([array, np.repeat(array[-1:], padding, axis=0)]) for name, array in arrays.items()
            }
        inputs = tuple((name, tensors.datatype_of(array.dtype), array.shape) for name, array in arrays.items())
        plain = all(datatype != "BYTES" for _, datatype, _ in inputs)
        slot = arena.take(sum(array.nbytes for array in arrays.values())) if arena is not None and plain else None
        if slot is None:
            raw = [_to_raw(name, array) for name, array in arrays.items()]
            return cls(rows, inputs, [bytes(part) for part in raw] if copy else raw, padding=padding)
        raw, at, memory = [], 0, slot.memory
        for array in arrays.values():
            part = memory[at : at + array.nbytes]
            little = array.dtype.newbyteorder("<")
            np.copyto(part.view(little).reshape(array.shape), array)
            raw.append(part.data)
            at += array.nbytes
        return cls(rows, inputs, raw, slot, padding=padding)


def _to_raw(name: str, array: Array) -> codec.Buffer:
    try:
        return tensors.to_raw(array)
    except UnicodeEncodeError as exc:
        raise SourceError(
            f"input {name!r} has a string that is not valid text, {exc.object[:64]!r}: {exc.reason} at position "
            f"{exc.start}. Clean it in your source, or send bytes"
        ) from exc


def request_header(
    output_spec: OutputSpec, spec: ModelSpec, payload: Payload, *, region: str | None, timeout_s: float
) -> bytes:
    """Return a serialized ModelInferRequest without its id and raw tensors.

    `region` is the name under which the server knows the payload's shared memory; None to send raw tensors.
    """
    header = kserve.ModelInferRequest(model_name=spec.name, model_version=spec.named_version)
    at = payload.slot.offset if payload.slot is not None else 0
    for (name, datatype, shape), raw in zip(payload.inputs, payload.raw, strict=True):
        tensor = header.inputs.add(name=name, datatype=datatype, shape=shape)
        if region is not None and payload.slot is not None:
            nbytes = memoryview(raw).nbytes
            tensor.parameters[names.SHM_REGION].string_param = region
            tensor.parameters[names.SHM_OFFSET].int64_param = at
            tensor.parameters[names.SHM_NBYTES].int64_param = nbytes
            at += nbytes
    if output_spec.top_k is not None and names.TOP_K in spec.extensions:
        header.parameters[names.TOP_K].int64_param = output_spec.top_k
        header.parameters[names.TEMPERATURE].double_param = output_spec.temperature
    if output_spec.dtype is not None:
        header.parameters[names.DTYPE].string_param = kserve_datatype(output_spec.dtype)
    if spec.priority:
        header.parameters[names.PRIORITY].int64_param = spec.priority
    for name in output_spec.outputs:
        header.outputs.add(name=name)
    if spec.is_edl:
        header.parameters[names.TIMEOUT_MS].int64_param = round(timeout_s * 1000)
        if payload.traceparent:
            header.parameters[names.TRACEPARENT].string_param = payload.traceparent
    return bytes(header.SerializeToString())
