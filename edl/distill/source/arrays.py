"""Makes numpy arrays of what a source yields, or refuses it with the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np

from edl.distill.source.fingerprint import is_tensor
from edl.errors import ProtocolError, SourceError
from edl.protocol.tensors import Array, array_of

__all__ = ["as_array"]


def as_array(value: Any, what: str) -> Array:
    """Return a numpy array of numbers or strings: of an array, a tensor of any framework, or a list.

    Args:
        value: of any type.
        what: the value's place in the source, for messages.

    Returns:
        The value itself if it is an array of numbers, a view of it if it is a tensor on the CPU, else a copy; bytes and
        strings as objects.

    Raises:
        SourceError: no teacher could be sent this as it is.
    """
    try:
        numpy_has_it = isinstance(value, np.ndarray) or not is_tensor(value)
        array = array_of(value) if numpy_has_it else _array_of_tensor(value)
    except (ValueError, TypeError, OverflowError, ProtocolError) as exc:
        raise SourceError(f"{what}: cannot be made an array: {exc}") from exc
    if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise SourceError(f"{what}: a masked array cannot be sent; fill in what is masked, array.filled(0) for example")
    if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # of ml_dtypes, as JAX has it; a name costs 5 us
        array = array.astype(np.float32)
    if array.dtype.kind not in "biufO" or array.dtype.itemsize > 8:
        raise SourceError(
            f"{what}: dtype {array.dtype} cannot be sent: make it numbers of up to 64 bits, booleans, bytes or strings"
        )
    if array.dtype.kind == "O":
        strange = {kind for kind in set(map(type, array.flat)) if not issubclass(kind, bytes | str)}
        if strange:
            at, found = next((at, element) for at, element in enumerate(array.flat) if type(element) in strange)
            raise SourceError(
                f"{what}: an array of Python objects cannot be sent; make it an array of numbers or strings "
                f"(element {at} is {type(found).__name__})"
            )
    return array


def _array_of_tensor(value: Any) -> Array:
    """Return an array of a tensor of torch or paddle, on whichever device it lies."""
    try:
        tensor = value.detach().cpu()
        array: Array = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
    except RuntimeError as exc:  # sparse, nested, without data, ...
        raise TypeError(exc) from exc
    return array
