"""The soak's own counting: each kind of wrong row is found, and growth beyond noise."""

from __future__ import annotations

import numpy as np

from tests.soak.verdict import SERVICES, RowCheck, labels_of

SMALL = SERVICES["small"]


def checked(numbers: list[int], labels_for: list[int] | None = None, *, inputs_equal: bool = True) -> RowCheck:
    """A check of rows from 100 on that has seen `numbers`, with the labels of `labels_for`."""
    check = RowCheck(100)
    have, want = np.array(labels_for or numbers), np.array(numbers)
    check.add(want, inputs_equal, [labels_of(SMALL, have)], [labels_of(SMALL, want)])
    return check


def test_each_kind_of_wrong_row_is_found() -> None:
    check = checked([100, 101, 102])
    check.end(3)
    assert (check.delivered, check.lost, check.repeated, check.mislabelled, check.changed) == (3, 0, 0, 0, 0)
    check = checked([100, 103])
    check.end(6)
    assert check.lost == 2 + 2, "two in the middle, two at the end"
    check = checked([100, 101, 101, 100])
    assert (check.repeated, check.lost) == (2, 0)
    assert checked([100, 101, 102], [100, 102, 102]).mislabelled == 1
    assert checked([100, 101], inputs_equal=False).changed == 2
    check, numbers = RowCheck(0), np.arange(4)
    check.add(numbers, True, [labels_of(SERVICES["other"], numbers)], [labels_of(SMALL, numbers)])
    assert check.mislabelled == 4, "labels of another width"
