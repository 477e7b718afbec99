"""The plan of a request: its header checked against the model, all that can be known before its tensors are looked at.

A client sends the same header with every batch, so a plan is made once and used again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from edl.errors import ProtocolError
from edl.protocol import kserve, names
from edl.protocol.tensors import dtype_of, expected_nbytes, from_contents
from edl.quoting import quote
from edl_serving.backends.backend import Array, TensorSpec
from edl_serving.model import ServedModel
from edl_serving.output_options import OutputOptions, read_parameter
from edl_serving.request_error import invalid_argument

_OBJECT_NBYTES = 41
"""Of an element of BYTES: CPython's object of bytes has 33 bytes around them, and the array 8 for where it is."""
_FINAL_WANTED = "triton_enable_empty_final_response"  # set by tritonclient's `enable_empty_final_response`
_MOST_COPIED = 256 << 20
"""Bytes of shared memory that a request may have copied: 2,048 tokens with 32,768 targets each. Rows are bounded, and
their width is not."""


@dataclass(frozen=True)
class RegionSlice:
    """A piece of a registered region of shared memory, in bytes."""

    region: str
    offset: int
    nbytes: int


Source: TypeAlias = "RegionSlice | int | Array"
"""Where an input's elements are: in shared memory, in that one of `raw_input_contents`, or (typed contents) here."""


@dataclass(frozen=True)
class RequestInput:
    """An input tensor, its shape with the rows, and where its elements are."""

    spec: TensorSpec
    shape: tuple[int, ...]
    source: Source


@dataclass(frozen=True)
class RequestedOutput:
    """An output to be sent.

    Attributes:
        name: Name on the wire; with `edl_top_k` one of the three names that replace the output's own.
        spec: The output that it is made of.
        place: Where to put it in shared memory; None for into the response.
    """

    name: str
    spec: TensorSpec
    place: RegionSlice | None


@dataclass(frozen=True)
class RequestPlan:
    """What a request asks for.

    Attributes:
        id: The client's id, sent back.
        rows: First dimension of every input, above 0.
        inputs: In the model's order; optional ones only if they were sent.
        raw_count: How many `raw_input_contents` there must be.
        shapes: Names and shapes of the inputs without the rows, and the temperature if the model computes with it.
            Requests that are equal in this share a batch.
        options: What to do with the outputs.
        outputs: Outputs to send, in this order.
        typed: Name of an input whose elements came in the header, None if there is none; such a plan belongs to a
            single request.
        uses_shared_memory: Whether an input or output lies there.
        timeout_s: Seconds after its arrival that the client waits for the response; None if the request does not say.
        object_bytes: Bytes beside the message: Python objects that BYTES become, and copies of shared memory.
        answer_bytes: Bytes of the outputs in the response, and of those held until the last part of a large request
            is computed; without outputs whose size only the model knows.
        traceparent: The span that the request is part of; empty if it does not say.
        is_final: Whether the response says that no other follows, for clients of Triton's decoupled models.
        answers: Serialized headers of responses to this plan, by the shapes of the outputs.
    """

    id: str
    rows: int
    inputs: tuple[RequestInput, ...]
    raw_count: int
    shapes: tuple[Hashable, ...]
    options: OutputOptions
    outputs: tuple[RequestedOutput, ...]
    typed: str | None
    uses_shared_memory: bool
    timeout_s: float | None = None
    object_bytes: int = 0
    answer_bytes: int = 0
    traceparent: str = ""
    is_final: bool = False
    answers: dict[object, bytes] = field(default_factory=dict, compare=False)


def plan_request(header: kserve.ModelInferRequest, model: ServedModel, max_rows: int) -> RequestPlan:
    """Check a header; raise INVALID_ARGUMENT with the offending name and value."""
    if names.BUNDLE in header.parameters:
        raise invalid_argument(
            f"parameter {names.BUNDLE}: only alone, beside messages, on a stream with {names.UNORDERED}"
        )
    if names.FRAGMENT in header.parameters:
        raise invalid_argument(f"parameter {names.FRAGMENT}: only alone, on a stream with {names.UNORDERED}")
    model.check_request(header.model_name, header.model_version)
    inputs = _read_inputs(header, model, max_rows)
    options = OutputOptions.parse(header.parameters)
    outputs = _read_outputs(header, model, options, [tensor.spec.name for tensor in inputs])
    in_regions = [tensor.source for tensor in inputs if isinstance(tensor.source, RegionSlice)]
    typed = [tensor.spec.name for tensor in inputs if not isinstance(tensor.source, int | RegionSlice)]
    strings = [math.prod(tensor.shape) for tensor in inputs if tensor.spec.datatype == "BYTES"]
    timeout_ms = read_parameter(header.parameters, names.TIMEOUT_MS, ("int64_param",))
    return RequestPlan(
        id=header.id,
        rows=inputs[0].shape[0],
        inputs=inputs,
        raw_count=sum(isinstance(tensor.source, int) for tensor in inputs),
        shapes=_batch_key(model, inputs, options),
        options=options,
        outputs=outputs,
        typed=typed[0] if typed else None,
        uses_shared_memory=bool(in_regions) or any(output.place for output in outputs),
        timeout_s=None if timeout_ms is None else max(timeout_ms / 1000, 0.0),
        object_bytes=_OBJECT_NBYTES * sum(strings) + _copied_bytes(model, in_regions),
        answer_bytes=_answer_bytes(model, inputs, options, outputs),
        traceparent=_read_traceparent(header.parameters),
        is_final=read_parameter(header.parameters, _FINAL_WANTED, ("bool_param",)) or False,
    )


def _copied_bytes(model: ServedModel, slices: list[RegionSlice]) -> int:
    """Return the bytes of inputs in shared memory that are copied, so that what was checked is what is computed."""
    if model.sequence_input is None and not model.checks_inputs:
        return 0
    copied = sum(piece.nbytes for piece in slices)
    if copied > _MOST_COPIED:
        raise invalid_argument(
            f"{copied:,} bytes of inputs lie in shared memory, and this model takes {_MOST_COPIED:,} at most, since it "
            "copies them: send fewer rows, or the inputs in the message"
        )
    return copied


def _answer_bytes(
    model: ServedModel,
    inputs: tuple[RequestInput, ...],
    options: OutputOptions,
    outputs: tuple[RequestedOutput, ...],
) -> int:
    sizes = {tensor.spec.name: math.prod(tensor.shape[1:]) for tensor in inputs}
    in_parts = inputs[0].shape[0] > model.max_batch_rows and model.max_top_k is None
    of_row = 0
    counted: set[str] = set()
    for output in outputs:
        spec = output.spec
        follows = model.optional_outputs.get(spec.name)
        shape = spec.shape if follows is None else (sizes[follows],)  # such an output is as large as its input
        if spec.datatype == "BYTES" or -1 in shape:
            continue
        whole = math.prod(shape) * dtype_of(spec.datatype).itemsize
        if output.place is None:
            of_row += whole if spec.name in model.uncast_outputs else options.row_bytes(spec, shape, output.name)
        if in_parts and spec.name not in counted:
            counted.add(spec.name)
            of_row += whole
    return inputs[0].shape[0] * of_row


def _batch_key(model: ServedModel, inputs: tuple[RequestInput, ...], options: OutputOptions) -> tuple[Hashable, ...]:
    shapes: tuple[Hashable, ...] = tuple([tensor.shape[1:] for tensor in inputs])
    if model.optional_outputs:
        shapes += (tuple([tensor.spec.name for tensor in inputs]),)
    if model.max_top_k is not None:
        shapes += (options.temperature,)
    return shapes


def _read_traceparent(parameters: Mapping[str, kserve.InferParameter]) -> str:
    if names.TRACEPARENT not in parameters:
        return ""
    return valid_traceparent(parameters[names.TRACEPARENT].string_param)


def _read_inputs(header: kserve.ModelInferRequest, model: ServedModel, max_rows: int) -> tuple[RequestInput, ...]:
    specs = {spec.name: spec for spec in model.inputs}
    sent = [tensor.name for tensor in header.inputs]
    known = {spec.name for spec in model.inputs_of(sent)}
    if len(sent) != len(known) or set(sent) != known:
        _refuse_names(sent, model)
    found: dict[str, RequestInput] = {}
    raw_count = 0
    for tensor in header.inputs:
        spec = specs[tensor.name]
        shape = tuple(tensor.shape)
        _check_shape(tensor.datatype, shape, spec)
        if shape[0] > max_rows:
            raise invalid_argument(
                f"input {quote(spec.name)} has {shape[0]} rows; this server takes {max_rows} in a request "
                "(edl serve --max-queue)"
            )
        if shape[0] != header.inputs[0].shape[0]:
            rows = header.inputs[0].shape[0]
            raise invalid_argument(f"input {quote(spec.name)} has {shape[0]} rows, but {quote(sent[0])} has {rows}")
        source: Source | None = read_region_slice(spec.name, tensor.parameters) if tensor.parameters else None
        if tensor.HasField("contents"):
            if source is not None:
                raise invalid_argument(f"input {quote(spec.name)} has both contents and a shared memory region")
            try:
                source = from_contents(spec.datatype, shape, tensor.contents)
            except ProtocolError as exc:
                raise invalid_argument(f"input {quote(spec.name)}: {exc}") from exc
        elif source is None:
            source = raw_count
            raw_count += 1
        elif isinstance(source, RegionSlice) and expected_nbytes(spec.datatype, shape) not in (None, source.nbytes):
            raise invalid_argument(
                f"input {quote(spec.name)}: {spec.datatype} of shape {list(shape)} takes "
                f"{expected_nbytes(spec.datatype, shape)} bytes, not {names.SHM_NBYTES}={source.nbytes}"
            )
        found[spec.name] = RequestInput(spec, shape, source)
    return tuple([found[spec.name] for spec in model.inputs if spec.name in found])


def _refuse_names(sent: list[str], model: ServedModel) -> None:
    """Raise the error that says what is wrong with the names of the inputs."""
    known = [spec.name for spec in model.inputs]
    has = f"model {model.name!r} has {', '.join(known)}"
    seen: set[str] = set()
    for name in sent:
        if name not in known:
            raise invalid_argument(f"unknown input {quote(name)}: {has}")
        if name in seen:
            raise invalid_argument(f"input {quote(name)} was sent twice")
        seen.add(name)
    missing = next(spec.name for spec in model.inputs_of(()) if spec.name not in seen)
    raise invalid_argument(f"input {quote(missing)} is missing: {has}")


def _check_shape(datatype: str, shape: tuple[int, ...], spec: TensorSpec) -> None:
    if datatype != spec.datatype:
        raise invalid_argument(f"input {quote(spec.name)} is {spec.datatype}, not {quote(datatype)}")
    wanted = (-1, *spec.shape)
    if len(shape) != len(wanted) or not all(
        size > 0 and want in (-1, size) for size, want in zip(shape, wanted, strict=True)
    ):
        raise invalid_argument(
            f"input {quote(spec.name)} has shape {quote(list(shape[:32]))}; "
            f"it must be {list(wanted)}, where -1 is any size above 0"
        )


def read_region_slice(name: str, parameters: Mapping[str, kserve.InferParameter]) -> RegionSlice | None:
    """Read where in shared memory a tensor lies; None if its parameters name none."""
    if names.SHM_REGION not in parameters:
        for other in (names.SHM_OFFSET, names.SHM_NBYTES):
            if other in parameters:
                raise invalid_argument(f"tensor {quote(name)} has a {other} but no {names.SHM_REGION}")
        return None
    nbytes = _number(name, parameters, names.SHM_NBYTES)
    if nbytes is None:
        raise invalid_argument(f"tensor {quote(name)} has a {names.SHM_REGION} but no {names.SHM_NBYTES}")
    return RegionSlice(
        parameters[names.SHM_REGION].string_param, _number(name, parameters, names.SHM_OFFSET) or 0, nbytes
    )


def _number(name: str, parameters: Mapping[str, kserve.InferParameter], key: str) -> int | None:
    if key not in parameters:
        return None
    field_name = parameters[key].WhichOneof("parameter_choice")
    if field_name not in ("int64_param", "uint64_param"):
        raise invalid_argument(f"tensor {quote(name)}: parameter {key} must be a whole number, not {field_name}")
    value: int = getattr(parameters[key], field_name)
    if value < 0:
        raise invalid_argument(f"tensor {quote(name)}: parameter {key}={value}: must not be below 0")
    return value


def _wire_names(spec: TensorSpec, model: ServedModel, options: OutputOptions) -> tuple[str, ...]:
    """Return the names under which an output is sent; refuse options that the model cannot fulfil."""
    if model.max_top_k is None:
        return options.wire_names(spec)
    if spec.name not in model.top_k_outputs:
        return (spec.name,)
    if options.top_k is None:
        raise invalid_argument(
            f"output {quote(spec.name)} has {spec.shape[-1]} values a row and is never sent whole: ask for the largest "
            f"with parameter {names.TOP_K}, at most {model.max_top_k}"
        )
    if options.top_k > model.max_top_k:
        raise invalid_argument(
            f"parameter {names.TOP_K}={options.top_k}: this server computes {model.max_top_k} at most "
            "(edl serve --top-k)"
        )
    return options.wire_names(spec)


def _read_outputs(
    header: kserve.ModelInferRequest, model: ServedModel, options: OutputOptions, sent: list[str]
) -> tuple[RequestedOutput, ...]:
    offered = model.outputs_of(sent)
    if not header.outputs:
        options.check_outputs(list(offered))
        return tuple(
            [RequestedOutput(name, spec, None) for spec in offered for name in _wire_names(spec, model, options)]
        )
    by_name = {spec.name: spec for spec in offered}
    parts = {}
    if options.top_k is not None:  # `logits__topk_ids` may be asked for alone
        with_parts = (spec for spec in offered if model.max_top_k is None or spec.name in model.top_k_outputs)
        parts = {name: spec for spec in with_parts for name in names.top_k_names(spec.name)}
    wanted: dict[str, RequestedOutput] = {}
    for output in header.outputs:
        spec = by_name.get(output.name) or parts.get(output.name)
        if spec is None:
            needed = model.optional_outputs.get(output.name)
            if needed is not None:
                raise invalid_argument(f"output {quote(output.name)} comes with input {needed!r}, which was not sent")
            raise invalid_argument(
                f"unknown output {quote(output.name)}: model {model.name!r} has {', '.join(by_name)}"
            )
        sent_names = _wire_names(spec, model, options)
        if output.name not in by_name:
            sent_names = (output.name,)
        if "classification" in output.parameters:
            raise invalid_argument(
                f"output {quote(output.name)}: parameter classification is not offered; use {names.TOP_K}"
            )
        place = read_region_slice(output.name, output.parameters) if output.parameters else None
        if place is not None and len(sent_names) > 1:
            raise invalid_argument(f"output {quote(output.name)}: name its parts {', '.join(sent_names)} to place them")
        for name in sent_names:
            if name in wanted:
                raise invalid_argument(f"output {quote(name)} was asked for twice")
            wanted[name] = RequestedOutput(name, spec, place)
    options.check_outputs([output.spec for output in wanted.values()])
    return tuple(wanted.values())


_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
_MOST_ID = 128  # characters; a UUID has 36


def valid_traceparent(text: str | bytes | None) -> str:
    """Return `text` if it is a valid `traceparent`, else an empty text, as W3C's Trace Context demands."""
    return text if isinstance(text, str) and _TRACEPARENT.fullmatch(text) else ""


def request_id_of(metadata: Mapping[str, str | bytes]) -> str:
    """Return the id of a unary call, cut, or an empty text."""
    found = metadata.get(names.REQUEST_ID)
    return found[:_MOST_ID] if isinstance(found, str) else ""
