"""Decodes a `ModelInferRequest` from bytes into arrays, and encodes its outputs into the bytes of the response.

Every invalid request is refused here or in `request_plan`, before it is queued, and the message names the offending
field and value. A size stated by a client never determines how much memory is allocated, because arrays are views of
bytes that have arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from edl.errors import ProtocolError
from edl.protocol import codec, kserve, names
from edl.protocol.codec import Buffer
from edl.protocol.tensors import Array, datatype_of, from_raw, to_raw
from edl.quoting import quote
from edl_serving.backends.backend import TensorSpec, TopKArrays
from edl_serving.model import ServedModel
from edl_serving.request_error import invalid_argument
from edl_serving.request_plan import RegionSlice, RequestPlan, plan_request
from edl_serving.shared_memory import ClientRegions, SharedMemoryRegion

_SLOW_TO_READ = 64 << 10  # bytes of typed contents, BYTES or rows to check that are worth a thread
_MAX_HEADER = 4 << 20
"""Largest header in bytes: gRPC's default limit for messages. Protobuf and Python need up to 30 times the memory."""
_MAX_CACHED_HEADER = 2048  # bytes: a dozen tensors with options; the cache then takes at most 2 MB
_MAX_CACHED_PLANS = 1024  # the default number of clients, each with a header of its own


@dataclass(frozen=True)
class DecodedRequest:
    """A request that can be computed, and, by output name, the shared memory regions for the outputs.

    `arrays` holds the inputs `[rows, *shape]` in the model's order; they are views of the message or of shared memory.
    """

    plan: RequestPlan
    arrays: tuple[Array, ...]
    regions: dict[str, SharedMemoryRegion]


class RequestDecoder:
    """Decodes requests for a model. Use it on the event loop."""

    def __init__(self, model: ServedModel, max_rows: int) -> None:
        self._model = model
        self._checks_rows = model.sequence_input is not None or model.checks_inputs
        self._max_rows = max_rows
        self._has_bytes = any(spec.datatype == "BYTES" for spec in model.inputs)
        self._plans: dict[bytes, RequestPlan] = {}

    async def decode(self, header: bytes, raw: Sequence[memoryview], regions: ClientRegions | None) -> DecodedRequest:
        """Check a request and bind its tensors; `regions` is None for a client that may not use shared memory."""
        plan = self._plans.get(header) if len(header) <= _MAX_CACHED_HEADER else None
        if plan is None:
            slow = len(header) > _SLOW_TO_READ
            plan = await asyncio.to_thread(self._plan, header) if slow else self._plan(header)
        if self._has_bytes and sum(view.nbytes for view in raw) > _SLOW_TO_READ:
            request = await asyncio.to_thread(bind_tensors, plan, raw, regions)
        else:
            request = bind_tensors(plan, raw, regions)
        if not self._checks_rows:
            return request
        if sum(array.nbytes for array in request.arrays) > _SLOW_TO_READ:
            return await asyncio.to_thread(self._check_rows, request)
        return self._check_rows(request)

    def _check_rows(self, request: DecodedRequest) -> DecodedRequest:
        """Return the request; raise if its rows are not whole sequences or the model refuses its values."""
        plan = request.plan
        if plan.uses_shared_memory:  # copy, because the client could change it after the check
            request = replace(request, arrays=tuple([array.copy() for array in request.arrays]))
        inputs = {tensor.spec.name: array for tensor, array in zip(plan.inputs, request.arrays, strict=True)}
        if self._model.sequence_input is not None:
            check_sequences(self._model.sequence_input, inputs[self._model.sequence_input], self._model.max_sequence)
        self._model.check_inputs(inputs, plan.options.temperature)
        return request

    def _plan(self, header: bytes) -> RequestPlan:
        try:
            if len(header) > _MAX_HEADER:
                raise invalid_argument(
                    f"{len(header):,} bytes of names, shapes, parameters and typed contents are over {_MAX_HEADER:,}: "
                    "tensors belong in raw_input_contents"
                )
            plan = plan_request(codec.REQUEST.parse(header), self._model, self._max_rows)
        except ProtocolError as exc:
            raise invalid_argument(str(exc)) from exc
        if plan.typed is None and len(header) <= _MAX_CACHED_HEADER:
            if len(self._plans) >= _MAX_CACHED_PLANS:
                self._plans.clear()
            self._plans[header] = plan
        return plan


def bind_tensors(plan: RequestPlan, raw: Sequence[memoryview], regions: ClientRegions | None) -> DecodedRequest:
    if raw and plan.typed is not None:
        raise invalid_argument(f"input {quote(plan.typed)} has contents, but raw_input_contents were also sent")
    if len(raw) != plan.raw_count:
        _refuse_count(plan, len(raw))
    if plan.uses_shared_memory and regions is None:
        raise invalid_argument("this server accepts no shared memory from this client")
    arrays = []
    for tensor in plan.inputs:
        try:
            source = tensor.source
            if isinstance(source, int):
                arrays.append(from_raw(tensor.spec.datatype, tensor.shape, raw[source]))
            elif isinstance(source, RegionSlice) and regions is not None:
                piece = regions[source.region].view(source.offset, source.nbytes)
                arrays.append(from_raw(tensor.spec.datatype, tensor.shape, piece))
            elif not isinstance(source, RegionSlice):
                arrays.append(source)
        except ProtocolError as exc:
            raise invalid_argument(f"input {quote(tensor.spec.name)}: {exc}") from exc
    targets: dict[str, SharedMemoryRegion] = {}
    for output in plan.outputs:
        if output.place is not None and regions is not None:
            region = targets[output.place.region] = regions[output.place.region]
            region.check_range(output.place.offset, output.place.nbytes)
    return DecodedRequest(plan, tuple(arrays), targets)


def _refuse_count(plan: RequestPlan, count: int) -> None:
    for tensor in plan.inputs:
        if isinstance(tensor.source, int) and tensor.source >= count:
            raise invalid_argument(
                f"input {quote(tensor.spec.name)} has no contents ({count} raw_input_contents were sent)"
            )
    raise invalid_argument(
        f"{count} raw_input_contents were sent for {plan.raw_count} inputs that are not in shared memory"
    )


def check_sequences(name: str, position: Array, max_sequence: int) -> None:
    if position[0] != 0:
        raise invalid_argument(
            f"input {quote(name)} is {int(position[0])} in row 0: a request holds whole sequences, which begin at 0"
        )
    wrong = np.flatnonzero((position[1:] != position[:-1] + 1) & (position[1:] != 0))
    if len(wrong):
        row = int(wrong[0]) + 1
        raise invalid_argument(
            f"input {quote(name)} is {int(position[row])} in row {row}, after {int(position[row - 1])}: it must rise "
            "by 1 from row to row, and be 0 where a sequence begins"
        )
    longest = int(position.max()) + 1
    if longest > max_sequence:
        row = int(position.argmax()) - longest + 1
        raise invalid_argument(
            f"input {quote(name)}: the sequence that begins in row {row} has {longest} rows, but at most "
            f"{max_sequence} are accepted (edl serve --max-tokens, --max-batch, or the model's limit): cut or omit it"
        )


Join: TypeAlias = Callable[[bytes, Sequence[Buffer]], bytes]

_FINAL = "triton_final_response"  # https://github.com/triton-inference-server/server/blob/main/docs/decoupled_models.md
_MAX_HEADERS = 8  # headers cached for one plan, so that outputs of changing shapes do not fill the memory


def encode_response(model: ServedModel, request: DecodedRequest, outputs: Mapping[str, Array], join: Join) -> bytes:
    """Apply the request's options, and put its outputs into the response or into shared memory.

    `outputs` has only the rows of this request; the parts of top-k outputs have the names that `names.top_k_names`
    returns. As with Triton, an output in shared memory has an empty entry in `raw_output_contents`, because clients
    rely on the index. `join` builds the response from its header and tensors. It copies the tensors, because the model
    may overwrite them afterwards.
    """
    plan = request.plan
    sent: dict[str, Array] = {}
    for output in plan.outputs:
        if output.name not in sent:
            sent.update(_apply_options(model, plan, output.spec, outputs))
    arrays = [sent[output.name] for output in plan.outputs]
    raw: list[Buffer] = [to_raw(array) for array in arrays]
    for index, output in enumerate(plan.outputs):
        if output.place is not None:
            raw[index] = _put(request, output.name, output.place, raw[index])
    return join(_header(model, plan, arrays), raw)


def _apply_options(
    model: ServedModel, plan: RequestPlan, spec: TensorSpec, outputs: Mapping[str, Array]
) -> Mapping[str, Array]:
    if model.max_top_k is None:
        return plan.options.apply_to(spec, outputs[spec.name])
    if spec.name in model.top_k_outputs:
        computed = TopKArrays(*[outputs[name] for name in names.top_k_names(spec.name)])
        return plan.options.apply_to_top_k(spec, computed)
    output = outputs[spec.name]
    return {spec.name: output if spec.name in model.uncast_outputs else plan.options.cast(output)}


def _put(request: DecodedRequest, name: str, place: RegionSlice, data: Buffer) -> bytes:
    if len(data) > place.nbytes:
        raise invalid_argument(
            f"output {quote(name)} has {len(data)} bytes, but {names.SHM_NBYTES}={place.nbytes} "
            f"in region {quote(place.region)}"
        )
    request.regions[place.region].write_bytes(place.offset, data)
    return b""


def _header(model: ServedModel, plan: RequestPlan, arrays: list[Array]) -> bytes:
    key = tuple([(array.shape, array.dtype) for array in arrays])
    header = plan.answers.get(key)
    if header is not None:
        return header
    message = kserve.ModelInferResponse(model_name=model.name, model_version=model.version, id=plan.id)
    for output, array in zip(plan.outputs, arrays, strict=True):
        entry = message.outputs.add(name=output.name, datatype=datatype_of(array.dtype), shape=array.shape)
        if output.place is not None:
            entry.parameters[names.SHM_REGION].string_param = output.place.region
            entry.parameters[names.SHM_NBYTES].int64_param = len(to_raw(array))
            if output.place.offset:
                entry.parameters[names.SHM_OFFSET].int64_param = output.place.offset
    if plan.is_final:
        message.parameters[_FINAL].bool_param = True
    header = message.SerializeToString()
    if "BYTES" not in [output.spec.datatype for output in plan.outputs]:  # the size of BYTES is not in the shape
        if len(plan.answers) >= _MAX_HEADERS:
            plan.answers.clear()
        plan.answers[key] = header
    return header
