"""Outputs of no rows: what is delivered for a batch whose texts are all empty."""

from __future__ import annotations

import numpy as np

from edl.distill.compress import TopK
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec, TensorMetadata
from edl.errors import ProtocolError, SourceError
from edl.protocol import tensors
from edl.protocol.tensors import Array

__all__ = ["empty_like", "empty_outputs"]


def empty_like(outputs: Outputs) -> Outputs:
    """Return outputs of no rows with the types and shapes of others, whose memory they do not hold."""
    return {
        name: output.map(_empty) if isinstance(output, TopK) else _empty(np.asarray(output))
        for name, output in outputs.items()
    }


def empty_outputs(spec: ModelSpec, output_spec: OutputSpec) -> Outputs:
    """Return outputs of no rows, by what the model says of them.

    Args:
        spec: the model.
        output_spec: what is asked for.

    Raises:
        SourceError: it leaves the size of a row open.
    """
    return {name: _specified(name, spec.outputs.get(name), output_spec) for name in output_spec.outputs}


def _specified(name: str, known: TensorMetadata | None, output_spec: OutputSpec) -> Array | TopK:
    try:
        dtype = tensors.dtype_of(known.datatype) if known is not None else None
    except ProtocolError:
        dtype = None
    shape = known.shape if known is not None else ()
    k = output_spec.top_k
    open_sizes = shape[:-1] if k is not None else shape
    if known is None or dtype is None or -1 in open_sizes:
        raise SourceError(
            f"the first batch has no token at all, and the teachers' model does not say how large output {name!r} of a "
            "token is, so that there is no zero to deliver: begin with another batch, or leave such batches out"
        )
    if dtype.kind == "f" and output_spec.dtype is not None:
        dtype = np.dtype(output_spec.dtype)
    if k is None or dtype.kind != "f" or not shape:
        return np.empty((0, *shape), dtype)
    classes = shape[-1] if shape[-1] > 0 else None
    kept = (0, *shape[:-1], min(k, classes or k))
    tail = np.empty(kept[:-1], np.float32)
    return TopK(np.empty(kept, np.int32), np.empty(kept, dtype), tail, output_spec.temperature, classes)


def _empty(array: Array) -> Array:
    return np.empty((0, *array.shape[1:]), array.dtype)
