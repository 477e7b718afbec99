"""A `ModelInferRequest` read and checked against the model.

Everything that a client can get wrong is refused here, before the request waits in a queue, with the offending name and
value. Nothing is allocated from a claim: arrays are views of bytes that did arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edl.errors import ProtocolError
from edl.protocol import kserve, names
from edl.protocol.tensors import dtype_of, expected_nbytes, from_contents, from_raw
from edl_serving.backend import Array, TensorSpec
from edl_serving.model import Model
from edl_serving.options import OutputOptions
from edl_serving.refusal import invalid, quote
from edl_serving.shm import Region, Regions

__all__ = ["Placement", "Request", "Wanted", "read_request"]


@dataclass(frozen=True)
class Placement:
    """A piece of shared memory that a tensor is to be read from or written to."""

    region: Region
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Wanted:
    """An output to be sent.

    Attributes:
        name: on the wire; with `edl_top_k` one of the three names that replace the output's own.
        spec: the output that it is made of.
        placement: where to, None for into the response.
    """

    name: str
    spec: TensorSpec
    placement: Placement | None


@dataclass(frozen=True)
class Request:
    """A request that can be computed.

    Attributes:
        id: the client's, sent back.
        rows: above 0.
        arrays: the inputs in the model's order, `[rows, *shape]` each; views of the message or of shared memory.
        shapes: of the arrays without the rows; only requests with the same ones share a batch.
    """

    id: str
    rows: int
    arrays: tuple[Array, ...]
    shapes: tuple[tuple[int, ...], ...]
    options: OutputOptions
    outputs: tuple[Wanted, ...]


def read_request(
    header: kserve.ModelInferRequest, raw: Sequence[memoryview], model: Model, max_rows: int, regions: Regions | None
) -> Request:
    """Check a request and find its tensors.

    Args:
        regions: shared memory that it may use; None if this client may not.

    Raises:
        Refusal: INVALID_ARGUMENT, with the offending name and value.
    """
    model.check(header.model_name, header.model_version)
    arrays = _read_inputs(header, raw, model, max_rows, regions)
    options = OutputOptions.parse(header.parameters)
    return Request(
        id=header.id,
        rows=arrays[0].shape[0],
        arrays=arrays,
        shapes=tuple([array.shape[1:] for array in arrays]),
        options=options,
        outputs=_read_outputs(header, model, options, regions),
    )


def _read_inputs(
    header: kserve.ModelInferRequest, raw: Sequence[memoryview], model: Model, max_rows: int, regions: Regions | None
) -> tuple[Array, ...]:
    if len(header.inputs) != len(model.inputs):
        _refuse_names(header, model)
    found: dict[str, Array] = {}
    specs = {spec.name: spec for spec in model.inputs}
    rows = None
    used = 0
    for tensor in header.inputs:
        spec = specs.get(tensor.name)
        if spec is None or tensor.name in found:
            _refuse_names(header, model)
            raise AssertionError(tensor.name)
        shape = tuple(tensor.shape)
        _check_shape(tensor.datatype, shape, spec)
        if rows is None:
            rows = shape[0]
            if rows > max_rows:
                raise invalid(f"input {quote(spec.name)} has {rows} rows; this server takes {max_rows} in a request")
        elif rows != shape[0]:
            first = header.inputs[0].name
            raise invalid(f"input {quote(spec.name)} has {shape[0]} rows, but {quote(first)} has {rows}")
        try:
            if tensor.parameters and (placement := _place(spec.name, tensor.parameters, regions)) is not None:
                if tensor.HasField("contents"):
                    raise invalid(f"input {quote(spec.name)} has both contents and a shared memory region")
                array = _from_region(spec, shape, placement)
            elif tensor.HasField("contents"):
                if raw:
                    raise invalid(f"input {quote(spec.name)} has contents, and there are raw_input_contents as well")
                array = from_contents(spec.datatype, shape, tensor.contents)
            elif used < len(raw):
                array = from_raw(spec.datatype, shape, raw[used])
                used += 1
            else:
                raise invalid(f"input {quote(spec.name)} has no contents ({len(raw)} raw_input_contents were sent)")
        except ProtocolError as exc:
            raise invalid(f"input {quote(spec.name)}: {exc}") from exc
        found[spec.name] = array
    if used != len(raw):
        raise invalid(f"{len(raw)} raw_input_contents were sent for {used} inputs")
    return tuple([found[spec.name] for spec in model.inputs])


def _refuse_names(header: kserve.ModelInferRequest, model: Model) -> None:
    """Say what is wrong with the names of the inputs."""
    known = [spec.name for spec in model.inputs]
    seen: set[str] = set()
    for tensor in header.inputs:
        if tensor.name not in known:
            raise invalid(f"unknown input {quote(tensor.name)}: model {model.name!r} has {', '.join(known)}")
        if tensor.name in seen:
            raise invalid(f"input {quote(tensor.name)} was sent twice")
        seen.add(tensor.name)
    missing = [name for name in known if name not in seen]
    raise invalid(f"input {quote(missing[0])} is missing: model {model.name!r} has {', '.join(known)}")


def _check_shape(datatype: str, shape: tuple[int, ...], spec: TensorSpec) -> None:
    if datatype != spec.datatype:
        raise invalid(f"input {quote(spec.name)} is {spec.datatype}, not {quote(datatype)}")
    if len(shape) == len(spec.shape) + 1 and shape[1:] == spec.shape and shape[0] > 0:
        return
    fits = len(shape) == len(spec.shape) + 1 and all(
        size > 0 and wanted in (-1, size) for size, wanted in zip(shape, (-1, *spec.shape), strict=True)
    )
    if not fits:
        raise invalid(
            f"input {quote(spec.name)} has shape {quote(list(shape[:32]))}; "
            f"it must be {[-1, *spec.shape]}, where -1 is any size above 0"
        )


def _place(name: str, parameters: Mapping[str, kserve.InferParameter], regions: Regions | None) -> Placement | None:
    """Where in shared memory a tensor lies, None if its parameters do not speak of it."""
    if names.SHM_REGION not in parameters:
        for other in (names.SHM_OFFSET, names.SHM_NBYTES):
            if other in parameters:
                raise invalid(f"tensor {quote(name)} has a {other} but no {names.SHM_REGION}")
        return None
    if regions is None:
        raise invalid(f"tensor {quote(name)}: this server takes no shared memory from this client")
    nbytes = _number(name, parameters, names.SHM_NBYTES)
    if nbytes is None:
        raise invalid(f"tensor {quote(name)} has a {names.SHM_REGION} but no {names.SHM_NBYTES}")
    offset = _number(name, parameters, names.SHM_OFFSET) or 0
    region = regions[parameters[names.SHM_REGION].string_param]
    region.check(offset, nbytes)
    return Placement(region, offset, nbytes)


def _number(name: str, parameters: Mapping[str, kserve.InferParameter], key: str) -> int | None:
    if key not in parameters:
        return None
    field = parameters[key].WhichOneof("parameter_choice")
    if field not in ("int64_param", "uint64_param"):
        raise invalid(f"tensor {quote(name)}: parameter {key} must be a whole number, not {field}")
    value: int = getattr(parameters[key], field)
    if value < 0:
        raise invalid(f"tensor {quote(name)}: parameter {key}={value}: must not be below 0")
    return value


def _from_region(spec: TensorSpec, shape: tuple[int, ...], placement: Placement) -> Array:
    expected = expected_nbytes(spec.datatype, shape)
    if expected not in (None, placement.nbytes):
        raise invalid(
            f"input {quote(spec.name)}: {spec.datatype} of shape {list(shape)} takes {expected} bytes, "
            f"not {names.SHM_NBYTES}={placement.nbytes}"
        )
    view = placement.region.view(placement.offset, placement.nbytes)
    if spec.datatype in ("BYTES", "BF16") or placement.offset % dtype_of(spec.datatype).itemsize == 0:
        return from_raw(spec.datatype, shape, view)
    return np.frombuffer(bytes(view), dtype_of(spec.datatype)).reshape(shape)  # unaligned arrays are slow everywhere


def _read_outputs(
    header: kserve.ModelInferRequest, model: Model, options: OutputOptions, regions: Regions | None
) -> tuple[Wanted, ...]:
    if not header.outputs:
        options.check(list(model.outputs))
        return tuple([Wanted(name, spec, None) for spec in model.outputs for name in options.names_of(spec)])
    by_name = {spec.name: spec for spec in model.outputs}
    parts = {}
    if options.top_k is not None:  # `logits__topk_ids` may be asked for alone
        parts = {name: spec for spec in model.outputs for name in names.top_k_names(spec.name)}
    wanted: dict[str, Wanted] = {}
    for output in header.outputs:
        spec = by_name.get(output.name) or parts.get(output.name)
        if spec is None:
            known = ", ".join(by_name)
            raise invalid(f"unknown output {quote(output.name)}: model {model.name!r} has {known}")
        expanded = options.names_of(spec) if output.name in by_name else (output.name,)
        options.names_of(spec)  # refuses what `edl_top_k` cannot be taken of
        if "classification" in output.parameters:
            raise invalid(f"output {quote(output.name)}: parameter classification is not offered; use {names.TOP_K}")
        placement = _place(output.name, output.parameters, regions) if output.parameters else None
        if placement is not None and len(expanded) > 1:
            raise invalid(f"output {quote(output.name)}: name its parts {', '.join(expanded)} to place them in memory")
        for name in expanded:
            if name in wanted:
                raise invalid(f"output {quote(name)} was asked for twice")
            wanted[name] = Wanted(name, spec, placement)
    options.check([one.spec for one in wanted.values()])
    return tuple(wanted.values())
