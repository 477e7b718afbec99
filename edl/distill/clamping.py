"""Warns of labels that float16 does not hold, and that were clamped to its largest value."""

from __future__ import annotations

import logging

import numpy as np

from edl.protocol.tensors import Array

__all__ = ["ClampWarnings"]

logger = logging.getLogger("edl.distill")

_MOST = float(np.finfo(np.float16).max)
_MOST_BITS = int(np.float16(_MOST).view(np.uint16))
_MAGNITUDE = 0x7FFF  # all bits of a float16 but its sign


class ClampWarnings:
    """Warns once of each output with finite values beyond float16's range.

    Args:
        where: whose labels they are, for messages.
        remedy: what keeps the values.
    """

    def __init__(self, where: str, remedy: str) -> None:
        self._where = where
        self._remedy = remedy
        self._warned: set[str] = set()

    def before(self, name: str, array: Array) -> None:
        """Check an output that is about to become float16."""
        if name in self._warned or array.dtype.kind != "f" or array.dtype.itemsize <= 2 or not array.size:
            return
        if array.min() >= -_MOST and array.max() <= _MOST:
            return
        beyond = array[np.isfinite(array) & (np.abs(array) > _MOST)]
        if beyond.size:
            self._warn(name, float(beyond[np.abs(beyond).argmax()]))

    def after(self, name: str, array: Array) -> None:
        """Check an output that a teacher made float16; whole numbers are compared in a fraction of the time."""
        if name in self._warned or array.dtype != np.float16:
            return
        if ((array.view(np.uint16) & _MAGNITUDE) == _MOST_BITS).any():
            self._warn(name, None)

    def _warn(self, name: str, value: float | None) -> None:
        self._warned.add(name)
        logger.warning(
            "output %r of %s has finite values beyond what float16 holds%s: they are clamped to +-%g. That is harmless "
            "for masks such as -1e9; if these are labels, %s",
            name,
            self._where,
            f" ({value:g})" if value is not None else "",
            _MOST,
            self._remedy,
        )
