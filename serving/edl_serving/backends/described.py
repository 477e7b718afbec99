"""The common part of backends that run a model of the user's: what its inputs and outputs are.

Names, types and shapes come from text, from files, from a sample batch, or from what the model answers.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np

from edl.errors import ProtocolError, SettingsError
from edl.protocol.tensors import array_of, datatype_of, dtype_of
from edl_serving.backends.backend import Array, Backend, TensorSpec, zeros
from edl_serving.backends.source import existing_file

T = TypeVar("T")
Predict: TypeAlias = Callable[[Mapping[str, Array]], Mapping[str, Array]]
_SPEC = re.compile(r"(?P<name>.+):(?P<type>[A-Za-z]\w*)\s*(?:\[(?P<shape>[^\[\]]*)\])?")


def parse_spec(text: str) -> TensorSpec:
    """Parse a tensor written `name:TYPE[size,size]`, without the batch dimension; -1 or ? is any size.

    `TYPE` is KServe's name or numpy's, in any case: `image:uint8[3,224,224]`, `label:INT64`, `words:BYTES[?]`.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"tensor {text!r}: expected name:TYPE[size,size], for example image:uint8[3,224,224]")
    sizes = [size.strip() for size in (match["shape"] or "").split(",") if size.strip()]
    try:
        shape = tuple(-1 if size in ("?", "-1") else int(size) for size in sizes)
    except ValueError:
        raise SettingsError(f"tensor {text!r}: sizes are whole numbers, or -1 for any, separated by commas") from None
    return TensorSpec(match["name"], _datatype(match["type"]), shape)


def _datatype(name: str) -> str:
    for known in (name.upper(), {"str": "BYTES", "bytes": "BYTES", "bfloat16": "BF16"}.get(name.lower(), "")):
        try:
            dtype_of(known)
            return known
        except ProtocolError:
            continue
    try:
        return datatype_of(np.dtype(name.lower()))
    except (TypeError, ProtocolError):
        return name  # TensorSpec refuses it, and lists what there is


def parse_specs(texts: Sequence[str | TensorSpec]) -> tuple[TensorSpec, ...]:
    """Parse tensors whose names must differ."""
    specs = tuple(text if isinstance(text, TensorSpec) else parse_spec(text) for text in texts)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"tensor {name!r} is given twice")
    return specs


def read_sample(path: str) -> dict[str, Array]:
    """Read the arrays of an `.npz` file, a batch of an input for every name."""
    try:
        with np.load(existing_file(path, "--sample"), allow_pickle=False) as file:
            arrays: dict[str, Array] = {name: file[name] for name in file.files}
    except (ValueError, OSError, AttributeError, TypeError) as exc:
        raise SettingsError(f"--sample {path!r}: not an .npz file of plain arrays ({exc})") from exc
    lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    if not lengths or len(set(lengths.values())) > 1 or not next(iter(lengths.values())):
        raise SettingsError(f"--sample {path!r}: every array needs the same number of rows, at least 1; got {lengths}")
    return arrays


def spec_of(name: str, batch: Array) -> TensorSpec:
    """Return the spec of an array `[rows, *shape]`."""
    return TensorSpec(name, datatype_of(batch.dtype), batch.shape[1:])


def infer_outputs(
    predict: Predict, inputs: Sequence[TensorSpec], sample: Mapping[str, Array] | None
) -> list[TensorSpec]:
    """Find a model's outputs by calling it: with a sample, or twice with zeros.

    Dimensions of any size are 1 in the first batch of zeros and 2 in the second; where the outputs differ in a size,
    that is of any size too.
    """
    made_up = ({spec.name: zeros(spec, rows, free) for spec in inputs} for rows, free in ((2, 1), (3, 2)))
    batches = [sample] if sample else [*made_up]
    seen: dict[str, list[Array]] = {}
    for batch in batches:
        rows = len(next(iter(batch.values())))
        for name, array in predict(batch).items():
            if array.ndim == 0 or len(array) != rows:
                raise SettingsError(f"the model answers {rows} rows with {name!r} of shape {list(array.shape)}")
            seen.setdefault(name, []).append(array)
    return [_merge(name, arrays) for name, arrays in seen.items()]


def complete_outputs(
    given: Sequence[str | TensorSpec],
    predict: Predict,
    inputs: Sequence[TensorSpec],
    sample: Mapping[str, Array] | None,
) -> tuple[TensorSpec, ...]:
    """Complete the specs of outputs, of which some may be given by name alone, by calling the model."""
    if given and all(isinstance(text, TensorSpec) or ":" in text for text in given):
        return parse_specs(given)
    found = {spec.name: spec for spec in infer_outputs(predict, inputs, sample)}
    if not given:
        return tuple(found.values())
    names = [text.name if isinstance(text, TensorSpec) else text.rpartition(":")[0] or text.strip() for text in given]
    try:
        specs = select_outputs(found, names)
    except ValueError as exc:
        raise SettingsError(f"--output: {exc}") from None
    completed = [
        text if isinstance(text, TensorSpec) or ":" in text else replace(specs[name], name=name)
        for text, name in zip(given, names, strict=True)
    ]
    return parse_specs(completed)


def default_output_names(count: int) -> list[str]:
    """Return names for the outputs of a model that gives them none."""
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]


def select_outputs(answers: Mapping[str, T], names: Sequence[str]) -> Mapping[str, T]:
    """Select outputs of a model by name, or in order if the model gives them no names."""
    if all(name in answers for name in names):
        return answers
    if list(answers) == default_output_names(len(answers)) and len(names) <= len(answers):
        return dict(zip(names, answers.values(), strict=False))
    raise ValueError(f"the model answers {', '.join(map(repr, answers))}; wanted are {', '.join(map(repr, names))}")


def _merge(name: str, arrays: Sequence[Array]) -> TensorSpec:
    first, last = arrays[0], arrays[-1]
    if first.ndim != last.ndim or first.dtype != last.dtype:
        raise SettingsError(
            f"output {name!r} is once {first.dtype}{list(first.shape[1:])} and once {last.dtype}{list(last.shape[1:])}"
        )
    shape = tuple(a if a == b else -1 for a, b in zip(first.shape[1:], last.shape[1:], strict=True))
    return TensorSpec(name, datatype_of(first.dtype), shape)


def cast_to_spec(spec: TensorSpec, value: object) -> Array:
    """Cast an array to the dtype of a spec; raise TypeError if that would change values beyond rounding."""
    try:
        array = array_of(value)
    except ProtocolError as exc:
        raise TypeError(f"output {spec.name!r}: {exc}") from exc
    dtype = dtype_of(spec.datatype)
    if array.dtype == dtype:
        return array
    if dtype.kind == "O" or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"output {spec.name!r} is {array.dtype}, which does not become {spec.datatype}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if array.size and not np.can_cast(array.dtype, dtype, "safe"):
        _refuse_overflow(spec, array, converted)
    return converted


def _refuse_overflow(spec: TensorSpec, array: Array, converted: Array) -> None:
    """Refuse whole numbers that wrapped around, and finite numbers that became infinite."""
    if array.dtype.kind in "iu" and converted.dtype.kind in "iu":
        limits = np.iinfo(converted.dtype)
        low, high = int(array.min()), int(array.max())
        lost = low if low < limits.min else high if high > limits.max else None
    else:
        changed = np.isinf(converted) & np.isfinite(array)
        lost = array[changed][0] if changed.any() else None
    if lost is not None:
        raise TypeError(f"output {spec.name!r} holds {lost} as {array.dtype}, which {spec.datatype} does not have")


@dataclass(frozen=True)
class BatchSizeRange:
    """The batch sizes that a model accepts; `most` is None for any."""

    least: int = 1
    most: int | None = None


def predict_in_parts(predict: Predict, inputs: Mapping[str, Array], accepted: BatchSizeRange) -> dict[str, Array]:
    """Call `predict` with batches of sizes that it accepts.

    A batch that is too large is cut. A batch that is too small is filled up with copies of its last row, whose answers
    are dropped.
    """
    rows = len(next(iter(inputs.values())))
    most = accepted.most or rows
    if accepted.least <= rows <= most:
        return dict(predict(inputs))
    parts: list[Mapping[str, Array]] = []
    for start in range(0, rows, most):
        part = {name: array[start : start + most] for name, array in inputs.items()}
        count = min(most, rows - start)
        if count < accepted.least:
            part = {
                name: np.concatenate([array, *[array[-1:]] * (accepted.least - count)]) for name, array in part.items()
            }
        parts.append({name: array[:count] for name, array in predict(part).items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class DescribedBackend(Backend):
    """A backend around `_run_model`, which calls the model and returns all outputs, by the model's own names.

    A subclass calls `_resolve_specs` at the end of its constructor, when `_run_model` works.
    """

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    platform: str = ""
    _sample: Mapping[str, Array] | None = None

    def __init__(self, version: str, platform: str) -> None:
        self._version = version
        self.platform = platform

    def _resolve_specs(
        self,
        inputs: Sequence[str | TensorSpec],
        outputs: Sequence[str | TensorSpec],
        sample: Mapping[str, Array] | None,
        unknown: str,
    ) -> None:
        """Set the specs of inputs and outputs; `unknown` says what to do if neither inputs nor sample are given.

        Outputs may be names alone; without any they are all that the model answers. The model is called with the
        sample, to find its outputs and to warm up, or else with zeros.
        """
        self.inputs = parse_specs(inputs)
        if sample and not self.inputs:
            self.inputs = tuple(spec_of(name, array) for name, array in sample.items())
        if not self.inputs:
            raise SettingsError(unknown)
        if sample:
            missing = [spec.name for spec in self.inputs if spec.name not in sample]
            if missing:
                raise SettingsError(f"--sample has {', '.join(sample)}, and no {missing[0]!r}")
            self._sample = {spec.name: cast_to_spec(spec, sample[spec.name]) for spec in self.inputs}
        self.outputs = complete_outputs(outputs, self._run_model, self.inputs, self._sample)

    @property
    def version(self) -> str:
        """The version that was given, or else `version_if_unnamed`."""
        return self._version or self.version_if_unnamed

    @property
    def names_its_version(self) -> bool:
        """Whether a version was given."""
        return bool(self._version)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the outputs, cast to their specs."""
        answers = select_outputs(self._run_model(inputs), [spec.name for spec in self.outputs])
        return {spec.name: cast_to_spec(spec, answers[spec.name]) for spec in self.outputs}

    def sample(self, rows: int) -> Mapping[str, Array]:
        """Return rows of the sample, over and over; zeros without a sample."""
        if self._sample is None:
            return super().sample(rows)
        return {name: array[np.arange(rows) % len(array)] for name, array in self._sample.items()}

    @property
    def _sample_is_made_up(self) -> bool:
        return self._sample is None

    @abc.abstractmethod
    def _run_model(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return all outputs of the model for a batch, by the model's names."""
