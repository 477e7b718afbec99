"""A `ModelInferRequest`'s header checked against the model: all that can be known before its tensors are looked at.

A client sends the same header with every batch, so a plan is made once and used again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from edl.errors import ProtocolError
from edl.protocol import kserve, names
from edl.protocol.tensors import expected_nbytes, from_contents
from edl_serving.backends.backend import Array, TensorSpec
from edl_serving.messages.output_options import OutputOptions
from edl_serving.messages.trace_context import checked_traceparent
from edl_serving.model import Model
from edl_serving.request_error import invalid, quote

__all__ = ["Input", "Output", "Place", "Plan", "make_plan"]

_OBJECT_NBYTES = 41
"""Of an element of BYTES: CPython's object of bytes has 33 bytes around them, and the array 8 for where it is."""


@dataclass(frozen=True)
class Place:
    """A piece of a registered region of shared memory."""

    region: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Raw:
    """An entry of `raw_input_contents`."""

    index: int


Source: TypeAlias = "Place | Raw | Array"


@dataclass(frozen=True)
class Input:
    """An input tensor, and where its elements are: an array if they came as typed contents."""

    spec: TensorSpec
    shape: tuple[int, ...]
    source: Source


@dataclass(frozen=True)
class Output:
    """An output to be sent.

    Attributes:
        name: on the wire; with `edl_top_k` one of the three names that replace the output's own.
        spec: the output that it is made of.
        place: where to, None for into the response.
    """

    name: str
    spec: TensorSpec
    place: Place | None


@dataclass(frozen=True)
class Plan:
    """What a request asks for.

    Attributes:
        id: the client's, sent back.
        rows: above 0, the first dimension of every input.
        inputs: in the model's order.
        raw_count: how many `raw_input_contents` there must be.
        shapes: of the inputs without the rows; only requests with the same ones share a batch.
        typed: name of an input whose elements came in the header, None if there is none; such a plan belongs to one
            request alone.
        timeout_s: how long after its arrival anyone waits for the answer; None if the request does not say.
        object_bytes: beside their message, of the Python objects that BYTES are made into.
        traceparent: the span that it is part of (`trace_context`); empty if the request does not say.
        answers: headers of answers to this plan, serialized, by the shapes of the outputs.
    """

    id: str
    rows: int
    inputs: tuple[Input, ...]
    raw_count: int
    shapes: tuple[tuple[int, ...], ...]
    options: OutputOptions
    outputs: tuple[Output, ...]
    typed: str | None
    uses_shared_memory: bool
    timeout_s: float | None = None
    object_bytes: int = 0
    traceparent: str = ""
    answers: dict[object, bytes] = field(default_factory=dict, compare=False)


def make_plan(header: kserve.ModelInferRequest, model: Model, max_rows: int) -> Plan:
    """Check a header.

    Args:
        max_rows: of one request.

    Raises:
        Refusal: INVALID_ARGUMENT, with the offending name and value.
    """
    if names.BUNDLE in header.parameters:
        raise invalid(f"parameter {names.BUNDLE}: only alone, beside messages, on a stream with {names.UNORDERED}")
    model.check(header.model_name, header.model_version)
    inputs = _read_inputs(header, model, max_rows)
    options = OutputOptions.parse(header.parameters)
    outputs = _read_outputs(header, model, options)
    sources = [one.source for one in inputs]
    return Plan(
        id=header.id,
        rows=inputs[0].shape[0],
        inputs=inputs,
        raw_count=sum(isinstance(source, Raw) for source in sources),
        shapes=tuple([one.shape[1:] for one in inputs]),
        options=options,
        outputs=outputs,
        typed=next((one.spec.name for one in inputs if not isinstance(one.source, (Raw, Place))), None),
        uses_shared_memory=any(isinstance(source, Place) for source in sources) or any(one.place for one in outputs),
        timeout_s=_read_timeout(header.parameters),
        object_bytes=sum(_OBJECT_NBYTES * math.prod(one.shape) for one in inputs if one.spec.datatype == "BYTES"),
        traceparent=_read_traceparent(header.parameters),
    )


def _read_timeout(parameters: Mapping[str, kserve.InferParameter]) -> float | None:
    if names.TIMEOUT_MS not in parameters:  # a look-up in a protobuf map would add it
        return None
    field = parameters[names.TIMEOUT_MS].WhichOneof("parameter_choice")
    if field != "int64_param":
        raise invalid(f"parameter {names.TIMEOUT_MS}: must be given as int64_param, not {field}")
    return max(parameters[names.TIMEOUT_MS].int64_param / 1000, 0.0)


def _read_traceparent(parameters: Mapping[str, kserve.InferParameter]) -> str:
    if names.TRACEPARENT not in parameters:
        return ""
    return checked_traceparent(parameters[names.TRACEPARENT].string_param)


def _read_inputs(header: kserve.ModelInferRequest, model: Model, max_rows: int) -> tuple[Input, ...]:
    specs = {spec.name: spec for spec in model.inputs}
    sent = [tensor.name for tensor in header.inputs]
    if len(sent) != len(specs) or set(sent) != specs.keys():
        _refuse_names(sent, model)
    found: dict[str, Input] = {}
    raw_count = 0
    for tensor in header.inputs:
        spec = specs[tensor.name]
        shape = tuple(tensor.shape)
        _check_shape(tensor.datatype, shape, spec)
        if shape[0] > max_rows:
            raise invalid(
                f"input {quote(spec.name)} has {shape[0]} rows; this server takes {max_rows} in a request "
                "(edl serve --max-queue)"
            )
        if shape[0] != header.inputs[0].shape[0]:
            rows = header.inputs[0].shape[0]
            raise invalid(f"input {quote(spec.name)} has {shape[0]} rows, but {quote(sent[0])} has {rows}")
        source: Source | None = read_place(spec.name, tensor.parameters) if tensor.parameters else None
        if tensor.HasField("contents"):
            if source is not None:
                raise invalid(f"input {quote(spec.name)} has both contents and a shared memory region")
            try:
                source = from_contents(spec.datatype, shape, tensor.contents)
            except ProtocolError as exc:
                raise invalid(f"input {quote(spec.name)}: {exc}") from exc
        elif source is None:
            source = Raw(raw_count)
            raw_count += 1
        else:
            _check_nbytes(spec, shape, source)
        found[spec.name] = Input(spec, shape, source)
    return tuple([found[spec.name] for spec in model.inputs])


def _refuse_names(sent: list[str], model: Model) -> None:
    """Say what is wrong with the names of the inputs."""
    known = [spec.name for spec in model.inputs]
    has = f"model {model.name!r} has {', '.join(known)}"
    seen: set[str] = set()
    for name in sent:
        if name not in known:
            raise invalid(f"unknown input {quote(name)}: {has}")
        if name in seen:
            raise invalid(f"input {quote(name)} was sent twice")
        seen.add(name)
    raise invalid(f"input {quote(next(name for name in known if name not in seen))} is missing: {has}")


def _check_shape(datatype: str, shape: tuple[int, ...], spec: TensorSpec) -> None:
    if datatype != spec.datatype:
        raise invalid(f"input {quote(spec.name)} is {spec.datatype}, not {quote(datatype)}")
    wanted = (-1, *spec.shape)
    if len(shape) != len(wanted) or not all(
        size > 0 and want in (-1, size) for size, want in zip(shape, wanted, strict=True)
    ):
        raise invalid(
            f"input {quote(spec.name)} has shape {quote(list(shape[:32]))}; "
            f"it must be {list(wanted)}, where -1 is any size above 0"
        )


def _check_nbytes(spec: TensorSpec, shape: tuple[int, ...], source: Source) -> None:
    expected = expected_nbytes(spec.datatype, shape)
    if isinstance(source, Place) and expected not in (None, source.nbytes):
        raise invalid(
            f"input {quote(spec.name)}: {spec.datatype} of shape {list(shape)} takes {expected} bytes, "
            f"not {names.SHM_NBYTES}={source.nbytes}"
        )


def read_place(name: str, parameters: Mapping[str, kserve.InferParameter]) -> Place | None:
    """Where in shared memory a tensor lies, None if its parameters do not speak of it."""
    if names.SHM_REGION not in parameters:
        for other in (names.SHM_OFFSET, names.SHM_NBYTES):
            if other in parameters:
                raise invalid(f"tensor {quote(name)} has a {other} but no {names.SHM_REGION}")
        return None
    nbytes = _number(name, parameters, names.SHM_NBYTES)
    if nbytes is None:
        raise invalid(f"tensor {quote(name)} has a {names.SHM_REGION} but no {names.SHM_NBYTES}")
    return Place(parameters[names.SHM_REGION].string_param, _number(name, parameters, names.SHM_OFFSET) or 0, nbytes)


def _number(name: str, parameters: Mapping[str, kserve.InferParameter], key: str) -> int | None:
    if key not in parameters:
        return None
    field_name = parameters[key].WhichOneof("parameter_choice")
    if field_name not in ("int64_param", "uint64_param"):
        raise invalid(f"tensor {quote(name)}: parameter {key} must be a whole number, not {field_name}")
    value: int = getattr(parameters[key], field_name)
    if value < 0:
        raise invalid(f"tensor {quote(name)}: parameter {key}={value}: must not be below 0")
    return value


def _read_outputs(header: kserve.ModelInferRequest, model: Model, options: OutputOptions) -> tuple[Output, ...]:
    if not header.outputs:
        options.check(list(model.outputs))
        return tuple([Output(name, spec, None) for spec in model.outputs for name in options.names_of(spec)])
    by_name = {spec.name: spec for spec in model.outputs}
    parts = {}
    if options.top_k is not None:  # `logits__topk_ids` may be asked for alone
        parts = {name: spec for spec in model.outputs for name in names.top_k_names(spec.name)}
    wanted: dict[str, Output] = {}
    for output in header.outputs:
        spec = by_name.get(output.name) or parts.get(output.name)
        if spec is None:
            raise invalid(f"unknown output {quote(output.name)}: model {model.name!r} has {', '.join(by_name)}")
        sent_names = options.names_of(spec)
        if output.name not in by_name:
            sent_names = (output.name,)
        if "classification" in output.parameters:
            raise invalid(f"output {quote(output.name)}: parameter classification is not offered; use {names.TOP_K}")
        place = read_place(output.name, output.parameters) if output.parameters else None
        if place is not None and len(sent_names) > 1:
            raise invalid(f"output {quote(output.name)}: name its parts {', '.join(sent_names)} to place them")
        for name in sent_names:
            if name in wanted:
                raise invalid(f"output {quote(name)} was asked for twice")
            wanted[name] = Output(name, spec, place)
    options.check([one.spec for one in wanted.values()])
    return tuple(wanted.values())
