"""Detection of models that write to their inputs, which are views of memory that is not their own.

numpy refuses that by the array's flag. torch and native code do not look at it, and a process that writes to read-only
shared memory is killed by SIGSEGV: so it is found out before there are students, on memory that may be written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from edl.protocol.tensors import Array

__all__ = ["is_read_only_error", "warn_of_copies", "with_nonzero_floats", "modifies_inputs"]

_log = logging.getLogger(__name__)

_COMPLAINTS = ("read-only", "readonly", "not writeable", "not writable")  # numpy, Cython, numba, torch


def modifies_inputs(predict: Callable[[Mapping[str, Array]], object], batch: Mapping[str, Array]) -> bool:
    """Call a model, and find out whether it tries to change the batch.

    Args:
        predict: the model.
        batch: arrays by name; copies are passed on.

    Returns:
        Whether it does.

    Raises:
        Exception: what the model raises for another reason.
    """
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
