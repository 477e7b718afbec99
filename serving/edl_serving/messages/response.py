"""Encoding of a job's outputs as a `ModelInferResponse`."""

from __future__ import annotations

from collections.abc import Mapping

from edl.protocol import codec, kserve, names
from edl.protocol.codec import Buffer
from edl.protocol.tensors import datatype_of, to_raw
from edl_serving.backends.backend import Array, TensorSpec, TopKArrays
from edl_serving.messages.request import DecodedRequest
from edl_serving.messages.request_plan import RegionSlice, RequestPlan
from edl_serving.model import ServedModel
from edl_serving.request_error import invalid_argument, quote

__all__ = ["encode_response"]

_MAX_HEADERS = 8  # of one plan; outputs whose shapes keep changing should not fill the memory


def encode_response(
    model: ServedModel, request: DecodedRequest, outputs: Mapping[str, Array], id_bytes: bytes | None = None
) -> bytes:
    """Apply the request's options, and put its outputs into the response or into shared memory.

    As with Triton, an output in shared memory has an empty entry in `raw_output_contents`: clients count on the index.

    Args:
        model: that is served.
        request: that is answered.
        outputs: by the model's names, this request's rows only; the parts of top-k outputs by `names.top_k_names`.
        id_bytes: if the response is on a stream, the id that it carries there (`codec.id_field`).

    Returns:
        The bytes of a `ModelInferResponse` or, with `id_bytes`, of a `ModelStreamInferResponse`.

    Raises:
        RequestError: an output does not fit the memory that the request gave for it.
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
    header = _header(model, plan, arrays, raw)
    if id_bytes is None:
        return codec.join_response(header, raw)
    return codec.join_streamed_response(header, raw, id_bytes)


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
            f"output {quote(name)} has {len(data)} bytes, and {names.SHM_NBYTES}={place.nbytes} "
            f"in region {quote(place.region)}"
        )
    request.regions[place.region].write_bytes(place.offset, data)
    return b""


def _header(model: ServedModel, plan: RequestPlan, arrays: list[Array], raw: list[Buffer]) -> bytes:
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
    header = message.SerializeToString()
    if "BYTES" not in [output.spec.datatype for output in plan.outputs]:  # their sizes are not in their shapes
        if len(plan.answers) >= _MAX_HEADERS:
            plan.answers.clear()
        plan.answers[key] = header
    return header
