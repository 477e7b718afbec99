"""Output options: what a request asks to be done with the outputs before they are sent.

`edl_top_k` keeps the k largest logits of a row and sums up the rest, `edl_dtype` chooses the type of floating-point
outputs. Both work on the last axis, row by row, so requests with different options share a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.protocol import kserve, names
from edl.protocol.tensors import dtype_of
from edl.quoting import quote
from edl_serving.backends.backend import Array, TensorSpec, TopKArrays
from edl_serving.request_error import invalid_argument

_FLOATS = ("FP16", "FP32", "FP64")
_DTYPES = ("FP16", "FP32")
_COLDEST = 1e-3  # with less, float32 logits overflow
_HOTTEST = 1e6  # with more, they vanish


@dataclass(frozen=True)
class OutputOptions:
    """The output options of a request.

    Attributes:
        top_k: How many values of the last axis to keep, None for all.
        temperature: Temperature of the sum over the classes left out.
        datatype: Type to cast floating-point outputs to, None to leave them. Finite values stay finite.
    """

    top_k: int | None = None
    temperature: float = 1.0
    datatype: str | None = None

    @classmethod
    def parse(cls, parameters: Mapping[str, kserve.InferParameter]) -> OutputOptions:
        """Read a request's parameters; leave parameters of other extensions alone."""
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
        """Return the names under which an output is sent."""
        if self.top_k is None:
            return (spec.name,)
        if spec.datatype not in _FLOATS:
            raise invalid_argument(
                f"parameter {names.TOP_K}: output {quote(spec.name)} is {spec.datatype}; ask for floating-point outputs"
            )
        if not spec.shape:
            raise invalid_argument(
                f"parameter {names.TOP_K}: output {quote(spec.name)} has one value a row, no classes"
            )
        self._check_classes(spec.name, spec.shape[-1])
        return names.top_k_names(spec.name)

    def check_outputs(self, specs: list[TensorSpec]) -> None:
        """Refuse `edl_dtype` if no requested output is of floating point."""
        if self.datatype is not None and specs and not any(spec.datatype in _FLOATS for spec in specs):
            spec = specs[0]
            raise invalid_argument(
                f"parameter {names.DTYPE}={self.datatype}: output {quote(spec.name)} is {spec.datatype}, "
                "and only floating-point outputs can change type"
            )

    def apply_to(self, spec: TensorSpec, output: Array) -> dict[str, Array]:
        """Return the arrays `[rows, ...]` that are sent for an output, by the names of `wire_names`."""
        if self.top_k is None:
            return {spec.name: self.cast(output)}
        self._check_classes(spec.name, output.shape[-1])
        return self._named(spec, top_k(output, self.top_k, self.temperature))

    def apply_to_top_k(self, spec: TensorSpec, computed: TopKArrays) -> dict[str, Array]:
        """Do as `apply_to`, for an output of which the model has computed the largest values."""
        return self._named(spec, cut_top_k(computed, self.top_k or 1, self.temperature))

    def _named(self, spec: TensorSpec, found: tuple[Array, Array, Array]) -> dict[str, Array]:
        ids, values, tail = found
        return dict(zip(names.top_k_names(spec.name), (ids, self.cast(values), tail), strict=True))

    def row_bytes(self, spec: TensorSpec, shape: tuple[int, ...], name: str) -> int:
        """Return the bytes of a row of what is sent for an output."""
        itemsize = dtype_of(self.datatype if self.datatype and spec.datatype in _FLOATS else spec.datatype).itemsize
        if name == spec.name or self.top_k is None:
            return itemsize * math.prod(shape)
        ids, values, _ = names.top_k_names(spec.name)
        leading = math.prod(shape[:-1])
        return leading * {ids: 4 * self.top_k, values: itemsize * self.top_k}.get(name, 4)

    def cast(self, output: Array) -> Array:
        """Return `output` in the datatype that the request asks for."""
        if self.datatype is None or output.dtype.kind != "f":
            return output
        return _cast_clamped(output, dtype_of(self.datatype))

    def _check_classes(self, name: str, classes: int) -> None:
        if self.top_k is not None and classes != -1 and self.top_k > classes:
            raise invalid_argument(f"parameter {names.TOP_K}={self.top_k}: output {quote(name)} has {classes} classes")


_AS_THEY_ARE = OutputOptions()


def _cast_clamped(output: Array, dtype: np.dtype[Any]) -> Array:
    """Cast `output`; finite values beyond the range of `dtype` become its largest, as students do it themselves.

    An infinite logit would make all probabilities of its row NaN, and masks such as -1e9 are common.
    """
    if output.dtype.itemsize <= dtype.itemsize or not output.size:
        return output.astype(dtype, copy=False)
    most = np.finfo(dtype).max
    if not (-most <= output.min() and output.max() <= most):  # also where there is NaN
        output = np.where(np.isinf(output), output, np.clip(output, -most, most))
    return output.astype(dtype)


def read_parameter(parameters: Mapping[str, kserve.InferParameter], name: str, fields: tuple[str, ...]) -> Any:
    """Return a parameter that must come in one of `fields`; None if it was not sent."""
    if name not in parameters:  # a look-up in a protobuf map would add it
        return None
    field = parameters[name].WhichOneof("parameter_choice")
    if field not in fields:
        raise invalid_argument(f"parameter {name}: must be given as {' or '.join(fields)}, not {field}")
    return getattr(parameters[name], field)


def top_k(logits: Array, k: int, temperature: float) -> tuple[Array, Array, Array]:
    """Find the k largest logits of the last axis, and what the others add to a softmax.

    Returns:
        Class ids (int32 `[..., k]`, by falling logit, equal logits by rising id), their logits (as `logits`), and
        log(sum(exp(logit / temperature))) over the others (float32 `[...]`, -inf if there are none).
    """
    ids = np.argpartition(logits, logits.shape[-1] - k, axis=-1)[..., -k:]
    ids.sort(axis=-1)
    values = np.take_along_axis(logits, ids, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    ids = np.take_along_axis(ids, order, -1)
    values = np.take_along_axis(values, order, -1)
    if k == logits.shape[-1]:
        return ids.astype(np.int32), values, np.full(logits.shape[:-1], -np.inf, np.float32)
    tail = logits.astype(np.float64 if logits.dtype.itemsize > 4 else np.float32)
    np.put_along_axis(tail, ids, -np.inf, -1)
    largest = tail.max(-1, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0)  # inf - inf would be NaN
    with np.errstate(over="ignore", divide="ignore"):
        np.subtract(tail, shift, out=tail)
        np.divide(tail, temperature, out=tail)
        total = np.exp(tail, out=tail).sum(-1, keepdims=True)
        lse = np.log(total) + shift / temperature
    return ids.astype(np.int32), values, lse[..., 0].astype(np.float32)


def cut_top_k(computed: TopKArrays, k: int, temperature: float) -> TopKArrays:
    """Keep the k largest of more values; what is left out joins the tail.

    Returns:
        What k asked for at once would have given: the same ids and values; the tail is rounded once more.
    """
    ids, values, tail = computed
    if values.shape[-1] == k:
        return computed
    terms = np.concatenate([values[..., k:].astype(np.float64) / temperature, tail[..., None].astype(np.float64)], -1)
    largest = terms.max(-1, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0)  # inf - inf would be NaN
    with np.errstate(over="ignore", divide="ignore"):
        lse = np.log(np.exp(terms - shift).sum(-1, keepdims=True)) + shift
    return TopKArrays(ids[..., :k], values[..., :k], lse[..., 0].astype(np.float32))
