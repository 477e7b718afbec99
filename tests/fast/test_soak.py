"""The soak's own counting: each kind of wrong row is found, and growth beyond noise."""

from __future__ import annotations

import numpy as np

from tests.soak.verdict import SERVICES, Counts, EpochRecord, Outcome, RowCheck, count, growth_of, labels_of

SMALL = SERVICES["small"]
MIB = 1 << 20


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


def record(how: str = "whole", error: str = "", **wrong: int) -> EpochRecord:
    counts = {"delivered": 10, "lost": 0, "repeated": 0, "mislabelled": 0, "changed": 0} | wrong
    return EpochRecord("batch", 1, 7, how, error, seconds=1.0, rss_bytes=MIB, descriptors=9, threads=3, **counts)


def outcome(counts: Counts, **parts: object) -> Outcome:
    nothing = {"faults": {"x": 2}, "regions_held": 0}
    nothing |= {name: [] for name in ("hangs", "ends", "growths", "left_behind", "left_out")}
    return Outcome(minutes=1.0, counts=counts, students=1, teachers=1, **(nothing | parts))  # type: ignore[arg-type]


def test_each_problem_fails_the_soak() -> None:
    assert outcome(count([record()])).good
    assert not outcome(count([])).good, "nothing was delivered"
    for wrong in ("lost", "repeated", "mislabelled", "changed"):
        assert not outcome(count([record(**{wrong: 1})])).good  # type: ignore[arg-type]
    for part in ("hangs", "ends", "left_behind"):
        assert not outcome(count([record()]), **{part: ["something"]}).good
    assert not outcome(count([record()]), regions_held=1).good


def test_growth_beyond_noise_is_found() -> None:
    steady = [(100 * MIB + index % 3 * MIB, 20 + index % 2, 9) for index in range(40)]
    leak = [(100 * MIB + index * MIB, 20, 9) for index in range(40)]
    sockets = [(100 * MIB, 20 + index, 9) for index in range(40)]
    assert [growth_of("p", samples).grown for samples in (steady, leak, sockets)] == [False, True, True]  # type: ignore[union-attr]
    assert growth_of("p", steady[:7]) is None, "too few samples say nothing"
