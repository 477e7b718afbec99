"""Teachers' answers: their size, their shapes before the first arrives, and their assembly for the training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from edl.distill.compress import TopK
from edl.distill.source.chunk import Item
from edl.distill.source.fingerprint import arrays_nbytes
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec, TensorMetadata
from edl.errors import ProtocolError, SettingsError, SourceError
from edl.protocol import tensors
from edl.protocol.tensors import Array

_FORGET = 0.05
"""Share by which the estimate falls with each smaller answer, so that one large row in twenty keeps it up."""


def outputs_nbytes(outputs: Outputs) -> int:
    """Return the bytes that the outputs of an answer hold."""
    return sum(output.nbytes if isinstance(output, TopK) else arrays_nbytes([output]) for output in outputs.values())


class AnswerSizeEstimator:
    """Estimates the bytes of a service's answers: from past answers, or from the model's metadata before the first."""

    def __init__(self, output_spec: OutputSpec) -> None:
        self._output_spec = output_spec
        self._row_nbytes: float | None = None

    def expected(self, rows: int, spec: ModelSpec | None) -> int | None:
        """Return the expected bytes of an answer for `rows` rows; None while unknown."""
        if self._row_nbytes is not None:
            return math.ceil(rows * self._row_nbytes)
        row_nbytes = _specified_nbytes(spec, self._output_spec) if spec is not None else None
        return rows * row_nbytes if row_nbytes is not None else None

    def came(self, rows: int, nbytes: int) -> None:
        """Record the size of an answer."""
        row_nbytes = nbytes / rows
        before = row_nbytes if self._row_nbytes is None else self._row_nbytes
        self._row_nbytes = max(row_nbytes, before + _FORGET * (row_nbytes - before))


def _specified_nbytes(spec: ModelSpec, output_spec: OutputSpec) -> int | None:
    """Return the bytes of a row according to the model's metadata; None if the metadata leaves sizes open."""
    try:
        outputs = empty_outputs(spec, output_spec).values()
    except SourceError:
        return None
    arrays: list[Array] = [
        part
        for each in outputs
        for part in ([each.ids, each.values, each.tail_lse] if isinstance(each, TopK) else [each])
    ]
    if any(array.dtype.hasobject for array in arrays):
        return None
    nbytes: int = sum(math.prod(array.shape[1:]) * array.itemsize for array in arrays)
    return nbytes


def empty_like(outputs: Outputs) -> Outputs:
    """Return outputs of no rows with the types and shapes of others, without keeping their memory alive."""
    return {
        name: output.map(_empty) if isinstance(output, TopK) else _empty(np.asarray(output))
        for name, output in outputs.items()
    }


def empty_outputs(spec: ModelSpec, output_spec: OutputSpec) -> Outputs:
    """Return outputs of no rows, according to the model's metadata."""
    return {name: _empty_output(name, spec.outputs.get(name), output_spec) for name in output_spec.outputs}


def _empty_output(name: str, known: TensorMetadata | None, output_spec: OutputSpec) -> Array | TopK:
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
            "token is, so its zeros have an unknown shape: begin with another batch, or leave such batches out"
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


Combine: TypeAlias = Literal["each", "mean", "mean_probabilities"] | Callable[[Sequence[Any]], Any]


def item_outputs(item: Item, service: int) -> Outputs:
    """Return an item's outputs from a service: writable arrays [rows, ...] of its own, or `TopK`.

    `TopK` of rows may share the memory of an answer. `TopK` of sequences are copied, because a user who keeps one text
    of each request would otherwise keep all answers.
    """
    pieces: list[Outputs] = []
    for chunk, start, stop in item.parts:
        outputs = chunk.outputs[service]
        assert outputs is not None
        pieces.append({name: output[start:stop] for name, output in outputs.items()})
    joined = {name: _joined(name, [piece[name] for piece in pieces]) for name in pieces[0]}
    chunk, start, stop = item.parts[0]
    if not chunk.longest_sequence or len(pieces) > 1 or stop - start == chunk.rows or item.mask is not None:
        return joined  # concatenated, or all of a request, or copied when it is padded
    return {name: copied(output) if isinstance(output, TopK) else output for name, output in joined.items()}


def copied(output: Array | TopK) -> Array | TopK:
    """Return an output as arrays of its own, which do not keep those of a whole request alive."""
    return output.map(np.copy) if isinstance(output, TopK) else np.copy(output)


def _joined(name: str, pieces: Sequence[Array | TopK]) -> Array | TopK:
    shapes = {(piece.ids if isinstance(piece, TopK) else piece).shape[1:] for piece in pieces}
    if len(shapes) > 1:
        raise SettingsError(
            f"output {name!r} has rows of shapes {' and '.join(str(list(shape)) for shape in sorted(shapes))} in the "
            "answers to pieces of one batch: send it as one request (batch_rows, teacher_batch_size), or pad all rows "
            "to one length"
        )
    if isinstance(pieces[0], TopK):
        return (
            pieces[0] if len(pieces) == 1 else TopK.concatenate([piece for piece in pieces if isinstance(piece, TopK)])
        )
    return np.concatenate([np.asarray(piece) for piece in pieces])  # copies, because the user may modify the result


class Combiner:
    """Combines the answers of several services into one value for each output."""

    def __init__(self, how: Combine, weights: Sequence[float]) -> None:
        if not callable(how) and how not in ("each", "mean", "mean_probabilities"):
            raise SettingsError(f"combine={how!r}: expected 'each', 'mean', 'mean_probabilities' or a function")
        self._how = how
        self._weights = np.asarray(weights, np.float64) / sum(weights)

    def __call__(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        """Return a single mapping, or a mapping per service if they are delivered side by side."""
        if self._how == "each" or len(outputs) <= 1:
            return list(outputs)
        return [{name: self._one(name, [service[name] for service in outputs]) for name in outputs[0]}]

    def _one(self, name: str, values: Sequence[Array | TopK]) -> Any:
        if callable(self._how):
            return self._how(values)
        arrays = [value for value in values if not isinstance(value, TopK)]
        if len(arrays) < len(values):
            raise SettingsError(f"output {name!r}: top-k labels cannot be averaged; use combine='each' or no top_k")
        if len({array.shape for array in arrays}) > 1:
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            raise SettingsError(f"output {name!r}: services give shapes {shapes}; only equal shapes can be averaged")
        dtype = np.result_type(*arrays)
        if self._how == "mean":
            return sum(w * a.astype(np.float32) for w, a in zip(self._weights, arrays, strict=True)).astype(dtype)
        mean = sum(w * _softmax(a) for w, a in zip(self._weights, arrays, strict=True))
        return np.log(np.maximum(mean, np.finfo(np.float32).tiny)).astype(dtype)


def _softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float32)
    shifted = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return result
