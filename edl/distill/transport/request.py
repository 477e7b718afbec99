"""The tensors of one request, and its header as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edl.distill.transport.schema import OutputSpec, kserve_datatype
from edl.distill.transport.shm import Arena, ShmSlot
from edl.errors import SourceError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.tensors import Array

__all__ = ["Payload", "request_header"]


@dataclass
class Payload:
    """The input tensors of a request, ready to send to any teacher of a service.

    Attributes:
        rows: of every tensor.
        inputs: name, datatype, shape with rows.
        raw: the user's own arrays, or views of a slot of shared memory. A message is made of them when it is sent, not
            ahead of time, so that the few messages under way use the same, warm memory over and over.
        slot: shared memory that holds `raw`; None without.
        traceparent: that of `tracing.current_traceparent`.
        longest_sequence: rows of the longest sequence, 0 if rows are no sequences.
    """

    rows: int
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, datatype, shape with rows
    raw: Sequence[codec.Buffer]
    slot: ShmSlot | None = None
    traceparent: str = ""
    longest_sequence: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum([memoryview(part).nbytes for part in self.raw])

    @classmethod
    def of(cls, arrays: Mapping[str, Array], arena: Arena | None, *, copy: bool = False) -> Payload:
        """Take in arrays [rows, ...]. With an arena, they are copied into its shared memory, if it has room.

        Args:
            arrays: by input name.
            arena: shared memory, None without.
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


def request_header(
    output_spec: OutputSpec,
    model: str,
    payload: Payload,
    *,
    compressed: bool,
    region: str | None,
    version: str = "",
    priority: int = 0,
) -> bytes:
    """Return a serialized ModelInferRequest with everything but raw tensors.

    Args:
        output_spec: what is asked for.
        model: its name.
        payload: the tensors.
        compressed: ask the server for `top_k`; else it sends whole outputs.
        region: the name under which the server knows the payload's shared memory, which is named in place of raw
            tensors; None to send raw tensors.
        version: of the model; empty to leave it to the server.
        priority: Triton's parameter; 0 for none.
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
    outputs = output_spec.outputs
    if output_spec.top_k is not None and compressed:
        header.parameters[names.TOP_K].int64_param = output_spec.top_k
        header.parameters[names.TEMPERATURE].double_param = output_spec.temperature
    if output_spec.dtype is not None:
        header.parameters[names.DTYPE].string_param = kserve_datatype(output_spec.dtype)
    if priority:
        header.parameters[names.PRIORITY].int64_param = priority
    for name in outputs:
        header.outputs.add(name=name)
    return bytes(header.SerializeToString())
