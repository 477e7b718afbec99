"""Counts the bytes of answers, and estimates those still to come, for the bound on memory."""

from __future__ import annotations

import math

import numpy as np

from edl.distill.compress import TopK
from edl.distill.source.sizes import arrays_nbytes
from edl.distill.transport.schema import ModelSpec, Outputs, OutputSpec, TensorMetadata
from edl.errors import ProtocolError
from edl.protocol import tensors

__all__ = ["AnswerSizeEstimator", "outputs_nbytes"]

_FORGET = 0.05
"""Share by which an estimate falls with each answer that is smaller: one row in twenty that is large keeps it up."""


def outputs_nbytes(outputs: Outputs) -> int:
    """Return the bytes that the outputs of an answer hold."""
    return sum(output.nbytes if isinstance(output, TopK) else arrays_nbytes([output]) for output in outputs.values())


class AnswerSizeEstimator:
    """Estimates the bytes of a service's answers: from past answers, or from the model's metadata before the first.

    Args:
        output_spec: what is asked for.
    """

    def __init__(self, output_spec: OutputSpec) -> None:
        self._output_spec = output_spec
        self._row_nbytes: float | None = None

    def expected(self, rows: int, spec: ModelSpec | None) -> int | None:
        """Return the bytes of an answer to so many rows; None while that cannot be told."""
        if self._row_nbytes is not None:
            return math.ceil(rows * self._row_nbytes)
        outputs = [spec.outputs.get(name) if spec is not None else None for name in self._output_spec.outputs]
        row_nbytes = [self._specified(output) for output in outputs]
        known = [nbytes for nbytes in row_nbytes if nbytes is not None]
        return rows * sum(known) if len(known) == len(row_nbytes) else None

    def came(self, rows: int, nbytes: int) -> None:
        """Take in the size of an answer.

        Args:
            rows: of the answer.
            nbytes: that it holds.
        """
        row_nbytes = nbytes / rows
        before = row_nbytes if self._row_nbytes is None else self._row_nbytes
        self._row_nbytes = max(row_nbytes, before + _FORGET * (row_nbytes - before))

    def _specified(self, spec: TensorMetadata | None) -> int | None:
        """Return the bytes of a row of an output, None where its metadata leaves them open."""
        if spec is None or -1 in spec.shape or spec.datatype == "BYTES":
            return None
        try:
            dtype = tensors.dtype_of(spec.datatype)
        except ProtocolError:
            return None
        if dtype.kind == "f" and self._output_spec.dtype is not None:
            dtype = np.dtype(self._output_spec.dtype)
        if self._output_spec.top_k is None or not spec.shape:
            return math.prod(spec.shape) * dtype.itemsize
        k = min(self._output_spec.top_k, spec.shape[-1])
        return math.prod(spec.shape[:-1]) * (k * (4 + dtype.itemsize) + 4)  # int32 ids, values, float32 tail
