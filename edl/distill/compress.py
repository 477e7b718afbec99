"""Compresses soft labels to each row's k largest logits plus the mass of the other classes, and to float16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.errors import SettingsError
from edl.protocol.tensors import Array, cast_clamped, split_top_k
from edl.settings import is_above_zero

__all__ = ["TopK", "to_float16", "top_k"]


@dataclass(frozen=True, eq=False)
class TopK:
    """The k largest logits of each row, and the total weight of the other classes.

    With `temperature` T, the teacher's probability of class `ids[i, j]` is `exp(values[i, j] / T - L[i])`, and the
    total probability of all other classes is `exp(tail_lse[i] - L[i])`. `L[i]` is the value for which these
    probabilities sum to 1.

    The arrays are numpy arrays. `map` converts them to a framework's tensors; a `TopK` of tensors supports only the
    attributes, `len`, indexing and `map`. A single row, such as `labels[3]` or a reader's sample, has no row axis: ids
    and values are [k], and tail_lse is a scalar. `stack` joins such rows again.

    Attributes:
        ids: Class ids by descending logit, int32 [rows, ..., k]; each class at most once per row.
        values: Logits of these classes, float16 or float32 [rows, ..., k].
        tail_lse: Log of the sum of exp(logit / temperature) over the other classes, float32 [rows, ...]; -inf if there
            are none.
        temperature: Temperature of the tail. The tail cannot be converted to a different temperature.
        classes: Number of classes; None if unknown.

    Raises:
        SettingsError: The arrays do not match, or a class id is invalid.
    """

    ids: Array
    values: Array
    tail_lse: Array
    temperature: float = 1.0
    classes: int | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if type(self.temperature) is not float:
            object.__setattr__(self, "temperature", float(self.temperature))
        if isinstance(self.ids, np.ndarray):  # tensors come from checked arrays; reading them would stall a GPU
            self._check_arrays()

    def _check_arrays(self) -> None:
        if self.ids.dtype.kind not in "iu" or self.values.dtype.kind != "f" or self.tail_lse.dtype.kind != "f":
            raise SettingsError(
                f"top-k labels have types {self.ids.dtype}, {self.values.dtype}, {self.tail_lse.dtype}: "
                "ids must be integers, values and tail_lse floating-point"
            )
        if self.ids.ndim < 1 or self.values.shape != self.ids.shape or self.tail_lse.shape != self.ids.shape[:-1]:
            raise SettingsError(
                f"top-k labels have shapes {list(self.ids.shape)}, {list(self.values.shape)}, "
                f"{list(self.tail_lse.shape)}: ids and values must be [rows, ..., k], tail_lse [rows, ...]"
            )
        if self.classes is not None and self.k > self.classes:
            raise SettingsError(f"top-k labels have k={self.k}, but there are only {self.classes} classes")
        if self.ids.size:
            low, high = int(self.ids.min()), int(self.ids.max())
            if low < 0 or (self.classes is not None and high >= self.classes):
                below = f" and below {self.classes}, the number of classes" if self.classes is not None else ""
                raise SettingsError(f"top-k labels have class ids from {low} to {high}: must be at least 0{below}")

    @property
    def k(self) -> int:
        """Number of classes kept per row."""
        return int(self.ids.shape[-1])

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return self.ids.nbytes + self.values.nbytes + self.tail_lse.nbytes

    def __len__(self) -> int:
        """Return the number of rows."""
        if self.ids.ndim < 2:
            raise TypeError("top-k labels of one sample have no rows")
        return len(self.ids)

    def __getitem__(self, rows: int | slice | Array | Sequence[int]) -> TopK:
        """Return a row without the row axis, or some of the rows.

        Args:
            rows: A position or slice, which returns views of the same memory; or indices, or a mask.
        """
        if self.ids.ndim < 2:
            raise SettingsError("top-k labels of one sample have no rows to select; the sample's classes are in `ids`")
        tail_lse = self.tail_lse[rows, ...] if isinstance(rows, int | np.integer) else self.tail_lse[rows]
        return TopK(self.ids[rows], self.values[rows], tail_lse, self.temperature, self.classes)

    def map(self, function: Callable[[Array], Any]) -> TopK:
        """Return the same labels with `function` applied to each of the three arrays.

        Args:
            function: Function of an array, such as `torch.from_numpy`.
        """
        return TopK(function(self.ids), function(self.values), function(self.tail_lse), self.temperature, self.classes)

    def to(self, *args: Any, **kwargs: Any) -> TopK:
        """Return the labels, whose arrays must be tensors, moved to a device. Other libraries' trainers call this.

        Args:
            *args: Positional arguments of the tensors' `to`.
            **kwargs: Keyword arguments of the tensors' `to`.
        """
        return self.map(lambda tensor: tensor.to(*args, **kwargs))  # type: ignore[attr-defined]  # tensors, not arrays

    @staticmethod
    def concatenate(pieces: Sequence[TopK]) -> TopK:
        """Return the rows of all pieces in new arrays.

        Args:
            pieces: Labels with the same k, temperature and, if known, number of classes.

        Raises:
            SettingsError: The pieces differ, or have no row axis.
        """
        if any(piece.ids.ndim < 2 for piece in pieces):
            raise SettingsError("top-k labels of one sample have no rows to concatenate: use TopK.stack")
        return _put_together(pieces, np.concatenate)

    @staticmethod
    def stack(samples: Sequence[TopK]) -> TopK:
        """Return labels of single samples as rows, in new arrays.

        Args:
            samples: Labels of one sample each, with the same k, temperature and, if known, number of classes.

        Raises:
            SettingsError: The samples differ.
        """
        shapes = {sample.ids.shape for sample in samples}
        if len(shapes) > 1:
            found = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise SettingsError(f"top-k labels of shapes {found} cannot be stacked: pad the samples to one shape")
        return _put_together(samples, np.stack)


def _put_together(pieces: Sequence[TopK], join: Callable[[list[Array]], Array]) -> TopK:
    if not pieces:
        raise SettingsError("no top-k labels to join: pass at least one piece")
    # Pieces without a number of classes take it from the others: a service may have teachers of both kinds.
    first = next((piece for piece in pieces if piece.classes is not None), pieces[0])
    for piece in pieces:
        classes = first.classes if piece.classes is None else piece.classes
        if (piece.k, piece.temperature, classes) != (first.k, first.temperature, first.classes):
            raise SettingsError(
                f"top-k labels cannot be combined: k={first.k}, temperature={first.temperature:g}, "
                f"classes={first.classes} and k={piece.k}, temperature={piece.temperature:g}, "
                f"classes={piece.classes}"
            )
    return TopK(
        join([piece.ids for piece in pieces]),
        join([piece.values for piece in pieces]),
        join([piece.tail_lse for piece in pieces]),
        first.temperature,
        first.classes,
    )


def top_k(logits: Array, k: int, temperature: float = 1.0) -> TopK:
    """Keep the `k` largest logits of each row. Ties for the last place are broken arbitrarily.

    Args:
        logits: Logits, floating-point [rows, ..., classes].
        k: Number of logits to keep, from 1 to the number of classes; keeping all classes loses no information.
        temperature: Temperature at which the student's loss will be computed.

    Returns:
        Labels whose values have the dtype of `logits`.

    Raises:
        SettingsError: A value is invalid.
    """
    logits = np.asarray(logits)
    if logits.ndim < 2 or logits.dtype.kind != "f":
        raise SettingsError(f"logits are {logits.dtype} {list(logits.shape)}: must be floating-point [rows, classes]")
    classes = logits.shape[-1]
    if not 1 <= k <= classes:
        raise SettingsError(f"k={k}: must be from 1 to the number of classes, {classes}")
    check_temperature(temperature)
    ids, values, tail_lse = split_top_k(logits, k, temperature)
    return TopK(ids, values, tail_lse, float(temperature), classes)


def to_float16(array: Array) -> Array:
    """Return the array as float16; finite values beyond float16's range are clamped to it instead of becoming infinite.

    An infinite logit, such as one converted from a mask value of -1e9, would make every probability in its row NaN.

    Args:
        array: Floating-point array of any shape.
    """
    return cast_clamped(array, np.dtype(np.float16))


def check_temperature(temperature: float) -> None:
    """Raise `SettingsError` unless a temperature is above 0 and finite."""
    if not is_above_zero(temperature) or temperature == float("inf"):
        raise SettingsError(f"temperature={temperature!r}: must be a finite number above 0")
