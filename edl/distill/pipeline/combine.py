"""Puts together what the training loop gets for an item: outputs of its rows, from chunks and services."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from edl.distill.compress import TopK
from edl.distill.source.chunk import Item
from edl.distill.transport.schema import Outputs
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["Combine", "Combiner", "item_outputs"]

Combine: TypeAlias = Literal["each", "mean", "mean_probabilities"] | Callable[[Sequence[Any]], Any]


def item_outputs(item: Item, service: int) -> Outputs:
    """Return an item's outputs from a service: writable arrays [rows, ...] of its own, or `TopK`.

    `TopK` of rows may share an answer's memory; that of sequences has its own, since a user may keep a text of each
    request.
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
    return {name: output.map(np.copy) if isinstance(output, TopK) else output for name, output in joined.items()}


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
    return np.concatenate([np.asarray(piece) for piece in pieces])  # copies: what is delivered is the user's own


class Combiner:
    """Makes a single value of each output from the answers of several services.

    Args:
        how: `"each"` delivers them side by side; `"mean"` averages the outputs as they are; `"mean_probabilities"`
            averages softmax(outputs) over the last axis and delivers its logarithm, which is logits again; a function
            gets the list of outputs, in the order of the services.
        weights: of the services, scaled to sum to 1.

    Raises:
        SettingsError: `how` is none of these.
    """

    def __init__(self, how: Combine, weights: Sequence[float]) -> None:
        if not callable(how) and how not in ("each", "mean", "mean_probabilities"):
            raise SettingsError(f"combine={how!r}: expected 'each', 'mean', 'mean_probabilities' or a function")
        self.how = how
        self._weights = np.asarray(weights, np.float64) / sum(weights)

    @property
    def side_by_side(self) -> bool:
        """Whether the services' outputs are delivered side by side."""
        return self.how == "each"

    def __call__(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        """Return a single mapping, or a mapping per service if they are delivered side by side."""
        if self.side_by_side or len(outputs) == 1:
            return list(outputs)
        return [{name: self._one(name, [service[name] for service in outputs]) for name in outputs[0]}]

    def _one(self, name: str, values: Sequence[Array | TopK]) -> Any:
        if callable(self.how):
            return self.how(values)
        arrays = [value for value in values if not isinstance(value, TopK)]
        if len(arrays) < len(values):
            raise SettingsError(f"output {name!r}: top-k labels cannot be averaged; use combine='each' or no top_k")
        if len({array.shape for array in arrays}) > 1:
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            raise SettingsError(f"output {name!r}: services give shapes {shapes}; only equal shapes can be averaged")
        dtype = np.result_type(*arrays)
        if self.how == "mean":
            return sum(w * a.astype(np.float32) for w, a in zip(self._weights, arrays, strict=True)).astype(dtype)
        mean = sum(w * _softmax(a) for w, a in zip(self._weights, arrays, strict=True))
        return np.log(np.maximum(mean, np.finfo(np.float32).tiny)).astype(dtype)


def _softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float32)
    shifted = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def values_by_name(outputs: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return values in the order in which the user named them."""
    return [outputs[name] for name in names]
