"""The plan of a request: its header, checked against the model before its tensors are read.

A client sends the same header with every batch, so a plan is made once and reused. The plan includes the output
options, `edl_top_k` and `edl_dtype`. These are applied row by row to the last axis, so requests with different options
can share a batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from edl.errors import ProtocolError
from edl.protocol import kserve, names
from edl.protocol.tensors import Array, cast_clamped, dtype_of, expected_nbytes, from_contents, split_top_k
from edl.quoting import quote
from edl_serving.backends.backend import TensorSpec, TopKArrays
from edl_serving.model import ServedModel
from edl_serving.request_error import invalid_argument

_FLOATS = ("FP16", "FP32", "FP64")
_DTYPES = ("FP16", "FP32")
_COLDEST = 1e-3  # with less, float32 logits overflow
_HOTTEST = 1e6  # with more, they vanish


@dataclass(frozen=True)
class OutputOptions:
    """The output options of a request.

    If `top_k` is None, all values of the last axis are sent. `temperature` applies to the sum over the classes left
    out. If `datatype` is None, nothing is cast; otherwise, finite values stay finite.
    """

    top_k: int | None = None
    temperature: float = 1.0
    datatype: str | None = None

    @classmethod
    def parse(cls, parameters: Mapping[str, kserve.InferParameter]) -> OutputOptions:
        """Read a request's parameters; ignore the parameters of other extensions."""
        if not parameters:
            return _AS_THEY_ARE
        k = read_parameter(parameters, names.TOP_K, ("int64_param", "uint64_param"))
        if k is not None and k < 1:
            raise invalid_argument(f"parameter {names.TOP_K}={quote(k)}: must be at least 1")
        temperature = read_parameter(parameters, names.TEMPERATURE, ("double_param", "int64_param", "uint64_param"))
        if temperature is not None and not _COLDEST <= temperature <= _HOTTEST:
            raise invalid_argument(
                f"parameter {names.TEMPERATURE}={quote(temperature)}: must be between {_COLDEST} and {_HOTTEST}"
            )
        datatype = read_parameter(parameters, names.DTYPE, ("string_param",))
        if datatype is not None and datatype not in _DTYPES:
            raise invalid_argument(f"parameter {names.DTYPE}={quote(datatype)}: must be one of {', '.join(_DTYPES)}")
        return cls(k, 1.0 if temperature is None else float(temperature), datatype)

    def wire_names(self, spec: TensorSpec) -> tuple[str, ...]:
        if self.top_k is None:
            return (spec.name,)
        if spec.datatype not in _FLOATS:
            raise invalid_argument(
                f"parameter {names.TOP_K}: output {quote(spec.name)} is {spec.datatype}; ask for floating-point outputs"
            )
        if not spec.shape:
            raise invalid_argument(
                f"parameter {names.TOP_K}: output {quote(spec.name)} has one value per row, no classes"
            )
        self._check_classes(spec.name, spec.shape[-1])
        return names.top_k_names(spec.name)

    def check_outputs(self, specs: list[TensorSpec]) -> None:
        if self.datatype is not None and specs and not any(spec.datatype in _FLOATS for spec in specs):
            spec = specs[0]
            raise invalid_argument(
                f"parameter {names.DTYPE}={self.datatype}: output {quote(spec.name)} is {spec.datatype}, "
                "but only floating-point outputs can change type"
            )

    def apply_to(self, spec: TensorSpec, output: Array) -> dict[str, Array]:
        """Return the arrays `[rows, ...]` to send for an output, keyed by the names of `wire_names`."""
        if self.top_k is None:
            return {spec.name: self.cast(output)}
        self._check_classes(spec.name, output.shape[-1])
        return self._named(spec, split_top_k(output, self.top_k, self.temperature))

    def apply_to_top_k(self, spec: TensorSpec, computed: TopKArrays) -> dict[str, Array]:
        """Do the same as `apply_to` for an output whose largest values the model has already selected."""
        return self._named(spec, cut_top_k(computed, self.top_k or 1, self.temperature))

    def _named(self, spec: TensorSpec, found: tuple[Array, Array, Array]) -> dict[str, Array]:
        ids, values, tail = found
        return dict(zip(names.top_k_names(spec.name), (ids, self.cast(values), tail), strict=True))

    def row_bytes(self, spec: TensorSpec, shape: tuple[int, ...], name: str) -> int:
        itemsize = dtype_of(self.datatype if self.datatype and spec.datatype in _FLOATS else spec.datatype).itemsize
        if name == spec.name or self.top_k is None:
            return itemsize * math.prod(shape)
        ids, values, _ = names.top_k_names(spec.name)
        leading = math.prod(shape[:-1])
        return leading * {ids: 4 * self.top_k, values: itemsize * self.top_k}.get(name, 4)

    def cast(self, output: Array) -> Array:
        if self.datatype is None or output.dtype.kind != "f":
            return output
        return cast_clamped(output, dtype_of(self.datatype))

    def _check_classes(self, name: str, classes: int) -> None:
        if self.top_k is not None and classes != -1 and self.top_k > classes:
            raise invalid_argument(f"parameter {names.TOP_K}={self.top_k}: output {quote(name)} has {classes} classes")


_AS_THEY_ARE = OutputOptions()


def read_parameter(parameters: Mapping[str, kserve.InferParameter], name: str, fields: tuple[str, ...]) -> Any:
    """Return a parameter, which must be set in one of `fields`; None if it was not sent."""
    if name not in parameters:  # a look-up in a protobuf map would add it
        return None
    field = parameters[name].WhichOneof("parameter_choice")
    if field not in fields:
        raise invalid_argument(f"parameter {name}: must be given as {' or '.join(fields)}, not {field}")
    return getattr(parameters[name], field)


def cut_top_k(computed: TopKArrays, k: int, temperature: float) -> TopKArrays:
    """Reduce top-k arrays to a smaller k, and add the dropped values to the tail, which rounds the tail once more."""
    ids, values, tail = computed
    if values.shape[-1] == k:
        return computed
    terms = np.concatenate([values[..., k:].astype(np.float64) / temperature, tail[..., None].astype(np.float64)], -1)
    largest = terms.max(-1, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0)  # inf - inf would be NaN
    with np.errstate(over="ignore", divide="ignore"):
        lse = np.log(np.exp(terms - shift).sum(-1, keepdims=True)) + shift
    return TopKArrays(ids[..., :k], values[..., :k], lse[..., 0].astype(np.float32))


_OBJECT_NBYTES = 41
"""Memory for an element of BYTES in addition to its content: 33 bytes in the CPython object, and 8 in the array."""
_FINAL_WANTED = "triton_enable_empty_final_response"  # set by tritonclient's `enable_empty_final_response`
_MOST_COPIED = 256 << 20
"""Maximum number of bytes of shared memory copied per request: 2,048 tokens with 32,768 targets. Row width is not
limited."""


@dataclass(frozen=True)
class RegionSlice:
    """A slice of a registered region of shared memory; offset and size are in bytes."""

    region: str
    offset: int
    nbytes: int


Source: TypeAlias = "RegionSlice | int | Array"
"""An input's elements: a slice of shared memory, an index into `raw_input_contents`, or the array (typed contents)."""


@dataclass(frozen=True)
class RequestInput:
    """An input tensor, its shape including the rows, and the source of its elements."""

    spec: TensorSpec
    shape: tuple[int, ...]
    source: Source


@dataclass(frozen=True)
class RequestedOutput:
    """An output to send, into shared memory if `place` is set. A top-k output is sent as three tensors."""

    name: str
    spec: TensorSpec
    place: RegionSlice | None


@dataclass(frozen=True)
class RequestPlan:
    """The parsed and checked header of a request.

    Attributes:
        rows: First dimension of every input, above 0.
        inputs: Inputs in the model's order; optional ones only if they were sent.
        raw_count: Number of `raw_input_contents` that the message must have.
        shapes: Names and shapes of the inputs without the rows, and the temperature if the model computes with it.
            Requests with equal `shapes` can share a batch.
        typed: Name of an input whose elements came in the header; None if there is no such input. A plan with such an
            input is used for only one request.
        timeout_s: Seconds that the client waits for the response after the request's arrival; None if the request does
            not specify them.
        object_bytes: Bytes that the request takes in addition to its message, for Python objects made from BYTES and
            copies of shared memory.
        answer_bytes: Bytes of the outputs in the response, and of outputs held until the last part of a large request
            is computed. Outputs whose size only the model knows do not count.
        traceparent: The trace span that the request belongs to; empty if the request names no span.
        is_final: Whether the response says that no further response follows, for clients of Triton's decoupled models.
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
    """Check a header and make its plan; INVALID_ARGUMENT names the offending field and value."""
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
        traceparent=valid_traceparent(read_parameter(header.parameters, names.TRACEPARENT, ("string_param",))),
        is_final=read_parameter(header.parameters, _FINAL_WANTED, ("bool_param",)) or False,
    )


def _copied_bytes(model: ServedModel, slices: list[RegionSlice]) -> int:
    """Return how many bytes of shared memory to copy, so that clients cannot change inputs after the check."""
    if model.sequence_input is None and not model.checks_inputs:
        return 0
    copied = sum(piece.nbytes for piece in slices)
    if copied > _MOST_COPIED:
        raise invalid_argument(
            f"{copied:,} bytes of inputs are in shared memory, but this model takes at most {_MOST_COPIED:,}, since it "
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
        shape = spec.shape if follows is None else (sizes[follows],)  # an optional output is as large as its input
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
                f"input {quote(spec.name)} has {shape[0]} rows; this server takes at most {max_rows} "
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
    """Read a tensor's slice of shared memory from its parameters; None if the parameters name no region."""
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
    value: int | None = read_parameter(parameters, key, ("int64_param", "uint64_param"))
    if value is not None and value < 0:
        raise invalid_argument(f"tensor {quote(name)}: parameter {key}={value}: must not be below 0")
    return value


def _wire_names(spec: TensorSpec, model: ServedModel, options: OutputOptions) -> tuple[str, ...]:
    """Return the names under which an output is sent; refuse options that the model does not support."""
    if model.max_top_k is None:
        return options.wire_names(spec)
    if spec.name not in model.top_k_outputs:
        return (spec.name,)
    if options.top_k is None:
        raise invalid_argument(
            f"output {quote(spec.name)} has {spec.shape[-1]} values per row and is never sent whole: request "
            f"the largest with parameter {names.TOP_K}, at most {model.max_top_k}"
        )
    if options.top_k > model.max_top_k:
        raise invalid_argument(
            f"parameter {names.TOP_K}={options.top_k}: this server computes at most {model.max_top_k} "
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
            raise invalid_argument(
                f"output {quote(output.name)}: name its parts {', '.join(sent_names)} to place them in shared memory"
            )
        for name in sent_names:
            if name in wanted:
                raise invalid_argument(f"output {quote(name)} was asked for twice")
            wanted[name] = RequestedOutput(name, spec, place)
    options.check_outputs([output.spec for output in wanted.values()])
    return tuple(wanted.values())


_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
_MOST_ID = 128  # characters; a UUID has 36


def valid_traceparent(text: str | bytes | None) -> str:
    """Return `text` if it is a valid `traceparent`, else an empty string, as W3C's Trace Context demands."""
    return text if isinstance(text, str) and _TRACEPARENT.fullmatch(text) else ""


def request_id_of(metadata: Mapping[str, str | bytes]) -> str:
    """Return the id of a unary call, shortened; empty if the call has none."""
    found = metadata.get(names.REQUEST_ID)
    return found[:_MOST_ID] if isinstance(found, str) else ""
