"""The interface of a model to the teacher server.

Inputs are views of memory that is not the model's own. numpy refuses writes to them by the array's flag. torch and
native code do not look at it, and a process that writes to read-only shared memory is killed by SIGSEGV: so a model
that writes is found out before there are students, on memory that may be written to.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edl.errors import ProtocolError, SettingsError
from edl.protocol.tensors import Array, dtype_of

__all__ = ["Array", "Backend", "TensorSpec", "TopKArrays"]

_log = logging.getLogger(__name__)

_COMPLAINTS = ("read-only", "readonly", "not writeable", "not writable")  # numpy, Cython, numba, torch


def modifies_inputs(predict: Callable[[Mapping[str, Array]], object], batch: Mapping[str, Array]) -> bool:
    """Call a model, and find out whether it tries to change the batch."""
    given = {name: np.array(array, order="C") for name, array in batch.items()}
    before = {name: array.copy() for name, array in given.items()}
    for array in given.values():
        array.flags.writeable = False
    try:
        predict(dict(given))  # which the model may empty
    except Exception as exc:
        if is_read_only_error(exc):
            return True
        raise
    return any(not _same(array, before[name]) for name, array in given.items())


def is_read_only_error(exc: BaseException) -> bool:
    """Return whether an error is the refusal to write to an array, rather than to a file."""
    text = str(exc).lower()
    return isinstance(exc, ValueError | TypeError | RuntimeError) and any(words in text for words in _COMPLAINTS)


def with_nonzero_floats(zeros: Mapping[str, Array]) -> dict[str, Array]:
    """Return a batch with other floats in place of zeros: times two, or cut off at 0 or 1, a zero stays what it is.

    Whole numbers stay zeros: they may be indices, and a GPU whose kernel was given a larger index than it has is lost.
    """
    batch = dict(zeros)
    for name, array in zeros.items():
        if array.dtype.kind == "f" and array.size:
            batch[name] = np.where(np.arange(array.size) % 2, -1.5, 2.5).astype(array.dtype).reshape(array.shape)
    return batch


def warn_of_copies() -> None:
    """Log a warning that the model gets copies of its inputs, and how to save them."""
    _log.warning(
        "the model writes to its inputs, which are read-only: from now on it gets copies. Have it write to arrays of "
        "its own to save them"
    )


def _same(array: Array, before: Array) -> bool:
    if array.dtype == object:
        return bool(array.tolist() == before.tolist())
    return array.tobytes() == before.tobytes()  # as it lies: NaN is not equal to itself


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of an input or output.

    Attributes:
        name: Its name on the wire.
        datatype: KServe's name of the type ("UINT8", "FP32", "INT64", "BYTES", ...).
        shape: Shape of a row, without the batch dimension; -1 is a dimension of any size.

    Raises:
        SettingsError: an empty name, an unknown datatype, or a dimension that is neither -1 nor above 0.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingsError("a tensor needs a name")
        try:
            dtype_of(self.datatype)
        except ProtocolError as exc:
            raise SettingsError(f"tensor {self.name!r}: {exc}") from exc
        bad = [size for size in self.shape if size != -1 and size <= 0]
        if bad:
            raise SettingsError(f"tensor {self.name!r}: shape {list(self.shape)} has a size of {bad[0]}")


class TopKArrays(NamedTuple):
    """The k largest values of each row of an output, and what the others add to a softmax.

    Attributes:
        ids: Ids of the classes, INT32 `[rows, k]`, by falling value; equal values by rising id.
        values: Their values, `[rows, k]` in the output's datatype.
        tail: log(sum(exp(value / temperature))) over the classes left out, FP32 `[rows]`; -inf if there are none.
    """

    ids: Array
    values: Array
    tail: Array


class Backend(abc.ABC):
    """An instance of a model.

    The server calls `warm_up`, `predict` and `close` of a backend from a single worker thread, never at the same time;
    the constructor runs in the caller's. The properties must be there, and stay the same, from construction on; a
    subclass may have plain attributes in their place.
    """

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What `predict` takes."""

    @property
    @abc.abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What `predict` returns."""

    version_if_unnamed = "1"
    """What `version` is where a subclass does not say. `edl serve --factory` puts a hash here."""

    writes_inputs = False
    """Whether `predict` changes the arrays that it is given: then it gets copies. `warm_up` finds it out."""

    @property
    def version(self) -> str:
        """The version of the weights, which students key their cache of labels by: two models must differ in it."""
        return self.version_if_unnamed

    @property
    def names_its_version(self) -> bool:
        """Whether `version` comes from the model, and not from outside."""
        return type(self).version is not Backend.version

    @property
    def platform(self) -> str:
        """What `ModelMetadata` calls the platform."""
        return "python"

    @property
    def inline(self) -> bool:
        """Whether `predict` takes microseconds, as a look-up does: the server calls it on its event loop.

        That saves the way to a worker thread and back. Everything else (health checks, other requests) waits meanwhile,
        and requests are not batched, so no real model may say so.
        """
        return False

    @abc.abstractmethod
    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Compute outputs for a batch.

        Args:
            inputs: every name in `inputs` (optional ones where they were sent), `[rows, *shape]` in the dtype of its
                datatype (BYTES: object arrays of bytes), C-contiguous. They are views of the network's buffers or of
                shared memory, so they may be read-only and not aligned, and they must not be kept: the memory is used
                again after `predict` returns. With `writes_inputs` they may be written to.

        Returns:
            Every name in `outputs`, `[rows, *shape]` with the same number of rows and in the same order, in the dtype
            of its datatype. The server has read them before it calls `predict` again, so a backend may return the same
            arrays every time. More names than that are ignored.

        Raises:
            Exception: any; the students of this batch are told its type and message, and the server serves on.
        """

    @property
    def max_top_k(self) -> int | None:
        """The largest k of `predict_top_k`; None for a model that is called by `predict` alone."""
        return None

    @property
    def top_k_outputs(self) -> frozenset[str]:
        """The outputs that `predict_top_k` returns as `TopKArrays`; those with a last dimension of a known size."""
        return frozenset(spec.name for spec in self.outputs if spec.shape and spec.shape[-1] != -1)

    def predict_top_k(
        self, inputs: Mapping[str, Array], k: int, temperature: float
    ) -> Mapping[str, Array | TopKArrays]:
        """Compute outputs for a batch, where `max_top_k` is not None; the whole outputs never come to the host.

        Args:
            inputs: as for `predict`.
            k: How many values to return, from 1 to `max_top_k`.
            temperature: Temperature of the tails.

        Returns:
            As `predict`, but `TopKArrays` for `top_k_outputs`.

        Raises:
            Exception: as for `predict`.
        """
        raise NotImplementedError(f"{type(self).__name__} has max_top_k={self.max_top_k} and no predict_top_k")

    @property
    def sequence_input(self) -> str | None:
        """The INT32 input of shape () that is 0 where a sequence begins, and then rises by 1 from row to row.

        Batches hold whole sequences then. None where rows have nothing to do with one another.
        """
        return None

    @property
    def max_sequence(self) -> int | None:
        """The most rows of a sequence; None for as many as a batch has."""
        return None

    @property
    def optional_outputs(self) -> Mapping[str, str]:
        """The outputs that are there only if the request has an optional input: the input's name by the output's."""
        return {}

    @property
    def instance_meta(self) -> Mapping[str, str]:
        """Metadata that students find in discovery beside the server's own."""
        return {}

    def check_inputs(self, inputs: Mapping[str, Array], temperature: float) -> None:  # noqa: B027 - most take any
        """Refuse a request before it waits. Called on the server's event loop: microseconds only.

        Args:
            inputs: as for `predict`, of the request alone.
            temperature: Temperature that the request asks for.

        Raises:
            RequestError: the request cannot be computed (`request_error.invalid_argument`). `predict` may raise it as
                well, where it shows only then.
        """

    def find_fault(self) -> str:
        """Return why the model cannot be asked now, empty if it can.

        The server calls this every second on its event loop, so it must answer at once. While there is a fault the
        server is not ready, and is out of discovery.
        """
        return ""

    def sample(self, rows: int) -> Mapping[str, Array]:
        """Return a batch to try the model with; zeros by default.

        Args:
            rows: Rows of the batch.

        Returns:
            Every name in `inputs` that is not optional, `[rows, *shape]`.
        """
        optional = {*self.optional_outputs.values()}
        return {spec.name: zeros(spec, rows) for spec in self.inputs if spec.name not in optional}

    def warm_up(self, max_rows: int) -> None:
        """Make the first request as fast as the rest; called before the server is ready.

        By default, the model is called twice on `sample`. The first call finds out whether it writes to its inputs:
        with floats that are not 0 where the sample is made up, unless the model does not take those.

        Args:
            max_rows: Most rows that `predict` will be given at once.
        """
        if self.max_top_k is not None:
            for rows in sorted({1, max_rows}):
                self.predict_top_k(self.sample(rows), self.max_top_k, 1.0)
            return
        if self.writes_inputs or not self._look_for_writes():
            self.predict(self.sample(1))
        if max_rows > 1:
            self.predict(self.sample(max_rows))

    def _look_for_writes(self) -> bool:
        """Set `writes_inputs`; return whether the model has been called, and did not fail."""
        batch = self.sample(1)
        changed = with_nonzero_floats(batch) if self._sample_is_made_up else batch
        try:
            self.writes_inputs = modifies_inputs(self.predict, changed)
        except Exception as exc:
            if changed is batch:
                raise
            # Zeros are what it is promised.
            _log.debug("the model does not take floats other than zeros: %s: %s", type(exc).__name__, exc)
            self.writes_inputs = modifies_inputs(self.predict, batch)
        if self.writes_inputs:
            warn_of_copies()
        return not self.writes_inputs

    @property
    def _sample_is_made_up(self) -> bool:
        return type(self).sample is Backend.sample

    def close(self) -> None:  # noqa: B027 - most models have nothing to release
        """Release what the model holds. Called once, after the last `predict`."""


def zeros(spec: TensorSpec, rows: int, free: int = 1) -> Array:
    """Return a batch of zeros (empty strings for BYTES) that fits `spec`; dimensions of any size become `free`."""
    shape = (rows, *(free if size == -1 else size for size in spec.shape))
    if spec.datatype == "BYTES":
        return np.full(shape, b"", np.object_)
    return np.zeros(shape, dtype_of(spec.datatype))
