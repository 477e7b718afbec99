"""Rows that belong to sequences: a sequence of T tokens is T rows, whose position counts from 0."""

from __future__ import annotations

import numpy as np

from edl_serving.backends.backend import Array
from edl_serving.request_error import invalid_argument, quote

__all__ = ["check_sequences"]


def check_sequences(name: str, position: Array, max_sequence: int) -> None:
    """Refuse rows that are not whole sequences.

    Args:
        name: of the input with the positions, for errors.
        position: INT32 `[rows]`, at least one.
        max_sequence: the most rows of a sequence.

    Raises:
        RequestError: the first row is not 0, another row is neither 0 nor its predecessor + 1, or a sequence is longer
            than `max_sequence`.
    """
    if position[0] != 0:
        raise invalid_argument(
            f"input {quote(name)} is {int(position[0])} in row 0: a request holds whole sequences, which begin at 0"
        )
    wrong = np.flatnonzero((position[1:] != position[:-1] + 1) & (position[1:] != 0))
    if len(wrong):
        row = int(wrong[0]) + 1
        raise invalid_argument(
            f"input {quote(name)} is {int(position[row])} in row {row}, behind {int(position[row - 1])}: it must rise "
            "by 1 from row to row, and be 0 where a sequence begins"
        )
    longest = int(position.max()) + 1
    if longest > max_sequence:
        row = int(position.argmax()) - longest + 1
        raise invalid_argument(
            f"input {quote(name)}: the sequence that begins in row {row} has {longest} rows, and this server takes "
            f"{max_sequence} (edl serve --max-tokens, --max-batch, or the model's own limit): cut it, or leave it out"
        )
