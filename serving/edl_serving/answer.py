"""A job's outputs as the bytes of its `ModelInferResponse`."""

from __future__ import annotations

from collections.abc import Mapping

from edl.protocol import codec, kserve, names
from edl.protocol.codec import Buffer
from edl.protocol.tensors import datatype_of, to_raw
from edl_serving.backend import Array
from edl_serving.model import Model
from edl_serving.refusal import invalid, quote
from edl_serving.request import Request, Wanted

__all__ = ["encode_answer"]


def encode_answer(model: Model, request: Request, outputs: Mapping[str, Array]) -> bytes:
    """Apply the request's options, and put each output into the response or into shared memory.

    As with Triton, an output in shared memory has an empty entry in `raw_output_contents`: clients count on the index.

    Args:
        outputs: by the model's names, this request's rows only.

    Raises:
        Refusal: an output does not fit the memory that the request gave for it.
    """
    header = kserve.ModelInferResponse(model_name=model.name, model_version=model.version, id=request.id)
    raw: list[Buffer] = []
    sent: dict[str, Array] = {}
    for wanted in request.outputs:
        if wanted.name not in sent:
            sent.update(request.options.apply(wanted.spec, outputs[wanted.spec.name]))
        array = sent[wanted.name]
        entry = header.outputs.add(name=wanted.name, datatype=datatype_of(array.dtype), shape=array.shape)
        data = to_raw(array)
        if wanted.placement is None:
            raw.append(data)
        else:
            _place(wanted, entry, data)
            raw.append(b"")
    return codec.encode_response(header, raw)


def _place(wanted: Wanted, entry: kserve.ModelInferResponse.InferOutputTensor, data: Buffer) -> None:
    place = wanted.placement
    assert place is not None
    nbytes = len(data)
    if nbytes > place.nbytes:
        raise invalid(
            f"output {quote(wanted.name)} has {nbytes} bytes, and {names.SHM_NBYTES}={place.nbytes} "
            f"in region {quote(place.region.name)}"
        )
    place.region.write(place.offset, data)
    entry.parameters[names.SHM_REGION].string_param = place.region.name
    entry.parameters[names.SHM_NBYTES].int64_param = nbytes
    if place.offset:
        entry.parameters[names.SHM_OFFSET].int64_param = place.offset
