"""`Backend`, the interface between the teacher server and a model, and `DescribedBackend` for users' models.

Inputs are views of memory that does not belong to the model. numpy refuses to write to an array that is flagged
read-only. torch and native code ignore the flag, and writing to read-only shared memory kills the process with SIGSEGV.
So before any student is served, the warm-up calls the model on writable memory to check whether the model writes to its
inputs.
"""

from __future__ import annotations

import abc
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from edl.errors import ProtocolError, SettingsError
from edl.protocol.tensors import Array, array_of, datatype_of, dtype_of
from edl_serving.backends.source import existing_file

__all__ = ["Array", "Backend", "TensorSpec", "TopKArrays"]

_log = logging.getLogger(__name__)

_COMPLAINTS = ("read-only", "readonly", "not writeable", "not writable")  # numpy, Cython, numba, torch


def modifies_inputs(predict: Callable[[Mapping[str, Array]], object], batch: Mapping[str, Array]) -> bool:
    """Call a model on a copy of the batch, and return whether it tries to change its inputs."""
    given = {name: np.array(array, order="C") for name, array in batch.items()}
    before = {name: array.copy() for name, array in given.items()}
    for array in given.values():
        array.flags.writeable = False
    try:
        predict(dict(given))  # a copy, since the model may remove entries
    except Exception as exc:
        if is_read_only_error(exc):
            return True
        raise
    return any(not _same(array, before[name]) for name, array in given.items())


def is_read_only_error(exc: BaseException) -> bool:
    """Return whether an error says that an array, rather than a file, is read-only."""
    text = str(exc).lower()
    return isinstance(exc, ValueError | TypeError | RuntimeError) and any(words in text for words in _COMPLAINTS)


def with_nonzero_floats(zeros: Mapping[str, Array]) -> dict[str, Array]:
    """Return the batch with nonzero floats, because doubling or clamping a zero in place would go unnoticed.

    Integers stay zero. They may be indices, and an index out of range makes the GPU unusable for the rest of the
    process.
    """
    batch = dict(zeros)
    for name, array in zeros.items():
        if array.dtype.kind == "f" and array.size:
            batch[name] = np.where(np.arange(array.size) % 2, -1.5, 2.5).astype(array.dtype).reshape(array.shape)
    return batch


def warn_of_copies() -> None:
    _log.warning(
        "the model writes to its inputs, which are read-only: from now on it gets copies. To avoid the copies, "
        "change the model to write to its own arrays"
    )


def _same(array: Array, before: Array) -> bool:
    if array.dtype == object:
        return bool(array.tolist() == before.tolist())
    return array.tobytes() == before.tobytes()  # as bytes, since NaN is not equal to itself


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of an input or output.

    Attributes:
        name: Name of the tensor in requests and responses.
        datatype: KServe's name of the type ("UINT8", "FP32", "INT64", "BYTES", ...).
        shape: Shape of a row, without the batch dimension; -1 means a dimension of any size.

    Raises:
        SettingsError: The name is empty, the datatype is unknown, or a dimension is neither -1 nor above 0.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingsError("a tensor has an empty name")
        try:
            dtype_of(self.datatype)
        except ProtocolError as exc:
            raise SettingsError(f"tensor {self.name!r}: {exc}") from exc
        bad = [size for size in self.shape if size != -1 and size <= 0]
        if bad:
            raise SettingsError(f"tensor {self.name!r}: shape {list(self.shape)} has a dimension of size {bad[0]}")


class TopKArrays(NamedTuple):
    """The k largest values in each row of an output, and what the remaining classes contribute to a softmax.

    Attributes:
        ids: Ids of the classes, INT32 `[rows, k]`, by descending value, then ascending id.
        values: Values of these classes, `[rows, k]` in the output's datatype.
        tail: log(sum(exp(value / temperature))) over the remaining classes, FP32 `[rows]`; -inf if there are none.
    """

    ids: Array
    values: Array
    tail: Array


class UnnamedVersion(str):
    """The version of a backend that does not define its own."""

    __slots__ = ()


class Backend(abc.ABC):
    """An instance of a model.

    The server calls `warm_up`, `predict` and `close` one at a time from a single worker thread; the constructor runs in
    the caller's thread. The attributes and properties must be available after construction and must not change.
    """

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of `predict`."""

    @property
    @abc.abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs of `predict`."""

    version: str = UnnamedVersion("1")
    """The version of the weights. Students use it as the key of their label caches, so each model needs its own
    version.

    `edl serve --factory` sets a hash if the backend defines no version."""

    platform: str = "python"
    """The platform that `ModelMetadata` reports."""

    writes_inputs: bool = False
    """Whether `predict` changes its input arrays; if so, the server passes copies to it. `warm_up` detects this."""

    max_top_k: int | None = None
    """The largest k that `predict_top_k` accepts; None if the model implements only `predict`."""

    sequence_input: str | None = None
    """The INT32 input of shape () that is 0 in the first row of a sequence and rises by 1 from row to row.

    Batches then hold whole sequences. None if rows are independent of one another."""

    max_sequence: int | None = None
    """The largest number of rows in a sequence; None for as many as fit in a batch."""

    optional_outputs: Mapping[str, str] = {}
    """Optional outputs; each maps to the name of the optional input that a request must send to get the output."""

    instance_meta: Mapping[str, str] = {}
    """Metadata to publish in discovery in addition to the server's own."""

    @abc.abstractmethod
    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute outputs for a batch.

        Args:
            inputs: Arrays `[rows, *shape]` for every name in `inputs` (optional ones only if they were sent), in the
                dtype of the input's datatype (BYTES: object arrays of bytes), C-contiguous. They are views of network
                buffers or of shared memory, so they may be read-only and unaligned. Do not keep them: the memory is
                reused after `predict` returns. If `writes_inputs` is True, you may write to the arrays.

        Returns:
            Arrays `[rows, *shape]` for every name in `outputs`, with the same rows in the same order, in the dtype of
            the output's datatype. The server reads them before it calls `predict` again, so a backend may return the
            same arrays each time. Additional names are ignored.

        Raises:
            Exception: Any exception. The students whose requests are in this batch get its type and message, and the
                server keeps running.
        """

    @property
    def top_k_outputs(self) -> frozenset[str]:
        """The outputs that `predict_top_k` returns as `TopKArrays`; by default, all whose last dimension is known."""
        return frozenset(spec.name for spec in self.outputs if spec.shape and spec.shape[-1] != -1)

    def predict_top_k(
        self, inputs: Mapping[str, Array], k: int, temperature: float
    ) -> Mapping[str, Array | TopKArrays]:
        """Compute outputs for a batch without copying whole outputs to the host.

        The server calls this method instead of `predict` if `max_top_k` is not None.

        Args:
            inputs: The same arrays as for `predict`.
            k: How many values to return, from 1 to `max_top_k`.
            temperature: Temperature of the tails.

        Returns:
            The same as `predict`, but `TopKArrays` for each of `top_k_outputs`.

        Raises:
            Exception: Any exception, as for `predict`.
        """
        raise NotImplementedError(f"{type(self).__name__} has max_top_k={self.max_top_k} and no predict_top_k")

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:  # noqa: B027 - most take any
        """Refuse a bad request before it is queued. Called on the server's event loop, so it must take microseconds.

        Args:
            inputs: The arrays of this request alone, as for `predict`.
            temperature: Temperature that the request specifies.

        Raises:
            RequestError: The request cannot be computed (`request_error.invalid_argument`). `predict` may also raise
                `RequestError`, for faults that are found only during the computation.
        """

    def find_fault(self) -> str:
        """Return the reason why the model cannot take requests now; an empty string if it can.

        The server calls this every second on its event loop, so it must return at once. While this method returns a
        fault, the server is not ready and is not in discovery.
        """
        return ""

    def sample(self, rows: int) -> Mapping[str, Array]:
        """Return a batch to try the model with; zeros by default.

        Args:
            rows: Number of rows in the batch.

        Returns:
            Arrays `[rows, *shape]` for every name in `inputs` that is not optional.
        """
        optional = {*self.optional_outputs.values()}
        return {spec.name: zeros(spec, rows) for spec in self.inputs if spec.name not in optional}

    def warm_up(self, max_rows: int) -> None:
        """Call the model before the server is ready, so that the first request is as fast as later ones.

        By default, the model is called on `sample` with one row and with `max_rows`. The first call detects whether the
        model writes to its inputs. For this check, the floats in a sample of zeros are replaced by other values, unless
        the model fails on those values.

        Args:
            max_rows: The largest number of rows that `predict` will get at once.
        """
        if self.max_top_k is not None:
            for rows in sorted({1, max_rows}):
                self.predict_top_k(self.sample(rows), self.max_top_k, 1.0)
            return
        if self.writes_inputs or not self._look_for_writes():
            self._predict_sample(self.sample(1))
        if max_rows > 1:
            self._predict_sample(self.sample(max_rows))

    def _look_for_writes(self) -> bool:
        """Call the model to set `writes_inputs`; return False if the caller must call it again with writable inputs."""
        batch = self.sample(1)
        writes = None
        if self._sample_is_made_up:
            try:
                writes = modifies_inputs(self._predict_sample, with_nonzero_floats(batch))
            except Exception as exc:  # noqa: BLE001 - zeros are a valid sample: the failure is not the model's fault
                _log.debug("the model does not take floats other than zeros: %s: %s", type(exc).__name__, exc)
        self.writes_inputs = modifies_inputs(self._predict_sample, batch) if writes is None else writes
        if self.writes_inputs:
            warn_of_copies()
        return not self.writes_inputs

    def _predict_sample(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return self.predict(inputs)

    @property
    def _sample_is_made_up(self) -> bool:
        return type(self).sample is Backend.sample

    def close(self) -> None:  # noqa: B027 - most models have nothing to release
        """Release the model's resources. Called once, after the last `predict`."""


def zeros(spec: TensorSpec, rows: int, free: int = 1) -> Array:
    """Return a batch of zeros (empty strings for BYTES) that fits `spec`; dimensions of any size become `free`."""
    shape = (rows, *(free if size == -1 else size for size in spec.shape))
    if spec.datatype == "BYTES":
        return np.full(shape, b"", np.object_)
    return np.zeros(shape, dtype_of(spec.datatype))


T = TypeVar("T")
Predict: TypeAlias = Callable[[Mapping[str, Array]], Mapping[str, Array]]
_SPEC = re.compile(r"(?P<name>.+):(?P<type>[A-Za-z]\w*)\s*(?:\[(?P<shape>[^\[\]]*)\])?")


def parse_spec(text: str) -> TensorSpec:
    """Parse a tensor written `name:TYPE[size,size]`, without the batch dimension; -1 or ? means any size.

    `TYPE` is KServe's or numpy's name of the type, in upper or lower case: `image:uint8[3,224,224]`, `label:INT64`,
    `words:BYTES[?]`.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"tensor {text!r}: expected name:TYPE[size,size], for example image:uint8[3,224,224]")
    sizes = [size.strip() for size in (match["shape"] or "").split(",") if size.strip()]
    try:
        shape = tuple(-1 if size in ("?", "-1") else int(size) for size in sizes)
    except ValueError:
        raise SettingsError(f"tensor {text!r}: expected whole numbers as sizes, or -1 for any size") from None
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
        return name  # TensorSpec refuses it, and lists the known types


def parse_specs(texts: Sequence[str | TensorSpec]) -> tuple[TensorSpec, ...]:
    specs = tuple(text if isinstance(text, TensorSpec) else parse_spec(text) for text in texts)
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"tensor {name!r} is given twice")
    return specs


def read_sample(path: str) -> dict[str, Array]:
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
    return TensorSpec(name, datatype_of(batch.dtype), batch.shape[1:])


def infer_outputs(
    predict: Predict, inputs: Sequence[TensorSpec], sample: Mapping[str, Array] | None
) -> list[TensorSpec]:
    """Find a model's outputs by calling it, once with the sample or twice with zeros.

    A dimension of any size is 1 in the first batch of zeros and 2 in the second. If the size of an output dimension
    differs between the two calls, that dimension is of any size too.
    """
    made_up = ({spec.name: zeros(spec, rows, free) for spec in inputs} for rows, free in ((2, 1), (3, 2)))
    batches = [sample] if sample else [*made_up]
    seen: dict[str, list[Array]] = {}
    for batch in batches:
        rows = len(next(iter(batch.values())))
        for name, array in predict(batch).items():
            if array.ndim == 0 or len(array) != rows:
                raise SettingsError(f"for {rows} rows, the model returns {name!r} of shape {list(array.shape)}")
            seen.setdefault(name, []).append(array)
    return [_merge(name, arrays) for name, arrays in seen.items()]


def complete_outputs(
    given: Sequence[str | TensorSpec],
    predict: Predict,
    inputs: Sequence[TensorSpec],
    sample: Mapping[str, Array] | None,
) -> tuple[TensorSpec, ...]:
    """Call the model to complete the specs of outputs that are given by name only."""
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
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]


def select_outputs(answers: Mapping[str, T], names: Sequence[str]) -> Mapping[str, T]:
    """Select outputs of a model by name, or by position if the model does not name its outputs."""
    if all(name in answers for name in names):
        return answers
    if list(answers) == default_output_names(len(answers)) and len(names) <= len(answers):
        return dict(zip(names, answers.values(), strict=False))
    raise ValueError(f"the model returns {', '.join(map(repr, answers))}; expected {', '.join(map(repr, names))}")


def _merge(name: str, arrays: Sequence[Array]) -> TensorSpec:
    first, last = arrays[0], arrays[-1]
    if first.ndim != last.ndim or first.dtype != last.dtype:
        raise SettingsError(
            f"output {name!r} is first {first.dtype}{list(first.shape[1:])} and then {last.dtype}{list(last.shape[1:])}"
        )
    shape = tuple(a if a == b else -1 for a, b in zip(first.shape[1:], last.shape[1:], strict=True))
    return TensorSpec(name, datatype_of(first.dtype), shape)


def cast_to_spec(spec: TensorSpec, value: object) -> Array:
    """Cast an array to a spec's dtype; raise TypeError if the cast would change values by more than rounding."""
    try:
        array = array_of(value)
    except ProtocolError as exc:
        raise TypeError(f"output {spec.name!r}: {exc}") from exc
    dtype = dtype_of(spec.datatype)
    if array.dtype == dtype:
        return array
    if dtype.kind == "O" or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(f"output {spec.name!r} is {array.dtype}, which cannot be cast to {spec.datatype}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if array.size and not np.can_cast(array.dtype, dtype, "safe"):
        _refuse_overflow(spec, array, converted)
    return converted


def _refuse_overflow(spec: TensorSpec, array: Array, converted: Array) -> None:
    """Refuse a cast in which integers wrapped around or finite numbers became infinite."""
    if array.dtype.kind in "iu" and converted.dtype.kind in "iu":
        limits = np.iinfo(converted.dtype)
        low, high = int(array.min()), int(array.max())
        lost = low if low < limits.min else high if high > limits.max else None
    else:
        changed = np.isinf(converted) & np.isfinite(array)
        lost = array[changed][0] if changed.any() else None
    if lost is not None:
        raise TypeError(f"output {spec.name!r} holds {lost} as {array.dtype}, which {spec.datatype} cannot hold")


@dataclass(frozen=True)
class BatchSizeRange:
    """The batch sizes that a model accepts; `most` is None if there is no largest size."""

    least: int = 1
    most: int | None = None


def predict_in_parts(predict: Predict, inputs: Mapping[str, Array], accepted: BatchSizeRange) -> dict[str, Array]:
    """Call `predict` with accepted batch sizes: split a large batch, pad a small one with copies of its last row."""
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
    """A backend around `_run_model`. A subclass's constructor calls `_resolve_specs` last, once `_run_model` works."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    _sample: Mapping[str, Array] | None = None

    def _resolve_specs(
        self,
        inputs: Sequence[str | TensorSpec],
        outputs: Sequence[str | TensorSpec],
        sample: Mapping[str, Array] | None,
        unknown: str,
    ) -> None:
        """Set the specs of inputs and outputs; `unknown` is the error text if both inputs and sample are missing.

        Outputs may be names only; if none are given, all outputs of the model are used. The model is called with the
        sample, or else with zeros, to find its outputs and to warm it up.
        """
        self.inputs = parse_specs(inputs)
        if sample and not self.inputs:
            self.inputs = tuple(spec_of(name, array) for name, array in sample.items())
        if not self.inputs:
            raise SettingsError(unknown)
        if sample:
            missing = [spec.name for spec in self.inputs if spec.name not in sample]
            if missing:
                raise SettingsError(f"--sample has {', '.join(sample)}, but no {missing[0]!r}")
            self._sample = {spec.name: cast_to_spec(spec, sample[spec.name]) for spec in self.inputs}
        self.outputs = complete_outputs(outputs, self._run_model, self.inputs, self._sample)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        answers = select_outputs(self._run_model(inputs), [spec.name for spec in self.outputs])
        return {spec.name: cast_to_spec(spec, answers[spec.name]) for spec in self.outputs}

    def _predict_sample(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Refuse shapes that the user did not declare; with inputs of any size, students may send other sizes."""
        answers = self.predict(inputs)
        if any(-1 in spec.shape for spec in self.inputs):
            return answers
        for spec in self.outputs:
            found = answers[spec.name].shape[1:]
            if len(found) != len(spec.shape) or any(
                want not in (-1, size) for want, size in zip(spec.shape, found, strict=True)
            ):
                sizes = ",".join(map(str, found))
                raise SettingsError(
                    f"output {spec.name!r} is declared as {list(spec.shape)}, but the model returns {list(found)} per "
                    f'row: declare --output "{spec.name}:{spec.datatype}[{sizes}]", or give its name only'
                )
        return answers

    def sample(self, rows: int) -> Mapping[str, Array]:
        if self._sample is None:
            return super().sample(rows)
        return {name: array[np.arange(rows) % len(array)] for name, array in self._sample.items()}

    @property
    def _sample_is_made_up(self) -> bool:
        return self._sample is None

    @abc.abstractmethod
    def _run_model(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return all outputs of the model for a batch, under the model's own names."""
