"""Teachers' answers: their size, and their assembly for the training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from edl.distill.compress import TopK
from edl.distill.source.chunk import Item
from edl.distill.source.fingerprint import arrays_nbytes
from edl.distill.transport.schema import Outputs
from edl.errors import SettingsError
from edl.protocol.tensors import Array

_FORGET = 0.05  # decrease of the estimate per smaller answer, so that one large row in twenty keeps it high


def outputs_nbytes(outputs: Outputs) -> int:
    return sum(output.nbytes if isinstance(output, TopK) else arrays_nbytes([output]) for output in outputs.values())


class AnswerSizeEstimator:
    """Estimates the size in bytes of a service's answers from its past answers."""

    def __init__(self) -> None:
        self._row_nbytes: float | None = None

    def expected(self, rows: int) -> int | None:
        return None if self._row_nbytes is None else math.ceil(rows * self._row_nbytes)

    def came(self, rows: int, nbytes: int) -> None:
        row_nbytes = nbytes / rows
        before = row_nbytes if self._row_nbytes is None else self._row_nbytes
        self._row_nbytes = max(row_nbytes, before + _FORGET * (row_nbytes - before))


Combine: TypeAlias = Literal["each", "mean", "mean_probabilities"] | Callable[[Sequence[Any]], Any]


def item_outputs(item: Item, service: int) -> Outputs:
    """Return an item's outputs from a service: the item's own writable arrays [rows, ...], or `TopK`.

    The `TopK` of a sequence is copied. Otherwise, as long as one text is kept, the answers to its whole request would
    stay in memory.
    """
    pieces: list[Outputs] = []
    for chunk, start, stop in item.parts:
        outputs = chunk.outputs[service]
        assert outputs is not None
        pieces.append({name: output[start:stop] for name, output in outputs.items()})
    joined = {name: _joined(name, [piece[name] for piece in pieces]) for name in pieces[0]}
    chunk, start, stop = item.parts[0]
    if not chunk.longest_sequence or len(pieces) > 1 or stop - start == chunk.rows or item.mask is not None:
        return joined  # concatenated, or a whole request, or copied when padded
    return {name: copied(output) if isinstance(output, TopK) else output for name, output in joined.items()}


def copied(output: Array | TopK) -> Array | TopK:
    """Return a copy of an output that does not keep the arrays of the whole request in memory."""
    return output.map(np.copy) if isinstance(output, TopK) else np.copy(output)


def _joined(name: str, pieces: Sequence[Array | TopK]) -> Array | TopK:
    shapes = {(piece.ids if isinstance(piece, TopK) else piece).shape[1:] for piece in pieces}
    if len(shapes) > 1:
        raise SettingsError(
            f"output {name!r} has rows of shapes {' and '.join(str(list(shape)) for shape in sorted(shapes))} in the "
            "answers to pieces of one batch: send the batch as one request (batch_rows, teacher_batch_size), or pad "
            "all rows to one length"
        )
    if isinstance(pieces[0], TopK):
        return (
            pieces[0] if len(pieces) == 1 else TopK.concatenate([piece for piece in pieces if isinstance(piece, TopK)])
        )
    return np.concatenate([np.asarray(piece) for piece in pieces])  # copies, because the user may modify the result


class Combiner:
    """Combines the answers of several services into one value per output."""

    def __init__(self, how: Combine, weights: Sequence[float]) -> None:
        if not callable(how) and how not in ("each", "mean", "mean_probabilities"):
            raise SettingsError(f"combine={how!r}: expected 'each', 'mean', 'mean_probabilities' or a function")
        self._how = how
        self._weights = np.asarray(weights, np.float64) / sum(weights)

    def __call__(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        """Return a single mapping, or one mapping per service if their answers are not combined."""
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
