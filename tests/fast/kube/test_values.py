"""Quantities and times of the API, and the API server's clock by the dates of its answers."""

from __future__ import annotations

from decimal import Decimal
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.connection import ServerClock
from edl.kube.objects import format_bytes, parse_quantity, parse_time


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        *(("0", "0"), ("2", "2"), ("500m", "0.5"), ("1.5Gi", str(3 * 2**29)), ("2e3", "2000"), ("1E", str(10**18))),
        *(("1E3", "1000"), (".5", "0.5"), ("5.", "5"), ("+1k", "1000"), ("-1", "-1"), ("100n", "0.0000001")),
        *(("1Ki", "1024"), ("1u", "0.000001"), (" 3 ", "3"), (2, "2"), (0.5, "0.5")),
    ],
)
def test_quantities_are_read(text: str | float, amount: str) -> None:
    assert parse_quantity(text) == Decimal(amount)


@pytest.mark.parametrize(
    "text",
    ["", "m", "Gi", "1 Gi", "1GiB", "1ki", "1K", "1e", "0x10", "1e9999", "nan", "inf", "1" * 65, "\uff11", "1,5", True],
)
def test_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


@settings(max_examples=40)
@given(st.decimals(min_value=0, max_value=10**15, places=9))
def test_quantity_comes_back(amount: Decimal) -> None:
    assert amount <= parse_quantity(format_bytes(amount)) < amount + 1, "memory is in whole bytes, and never less"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("1970-01-01T00:00:00Z", 0.0), ("2026-11-23T04:00:00Z", 1795406400.0), ("1970-01-01T00:00:01.5Z", 1.5)),
        *(("1970-01-01T00:00:00.000001Z", 1e-6), ("1970-01-01T00:00:00.123456789Z", 0.123456789)),
        *(("1970-01-01T01:00:00+01:00", 0.0), ("1969-12-31T23:59:59Z", -1.0)),
    ],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds, abs=1e-9)


class Machines:
    """A machine and an API server whose clock is ahead by `skew_s`; `now_s` is the server's time."""

    def __init__(self, skew_s: float) -> None:
        self.now_s, self.skew_s = 1_800_000_000.0, skew_s
        self.clock = ServerClock(lambda: self.now_s - self.skew_s)

    def ask(self, there_s: float = 0.01, back_s: float = 0.01, *, wrong_s: float = 0.0) -> None:
        self.now_s += there_s
        date = formatdate(int(self.now_s + wrong_s), usegmt=True)
        self.now_s += back_s
        self.clock.note(date, there_s + back_s)
        self.now_s += 1.0

    @property
    def error_s(self) -> float:
        return self.clock.read() - self.now_s


@settings(max_examples=40)
@given(st.floats(-8e4, 8e4), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=3, max_size=20))
def test_error_is_bounded(skew_s: float, requests: list[tuple[float, float]]) -> None:
    machines = Machines(skew_s)
    for there_s, back_s in requests:
        machines.ask(there_s, back_s)
    assert abs(machines.error_s) <= 3.0


@pytest.mark.parametrize("wrong_s", [-3600.0, 30.0, 3600.0, 2 * 86400.0])
@pytest.mark.parametrize("skew_s", [0.0, 50.0])
def test_wrong_answer_changes_nothing(wrong_s: float, skew_s: float) -> None:
    """An answer of another server between good ones has no effect on what ends jobs, at no moment."""
    machines = Machines(skew_s)
    machines.ask(wrong_s=wrong_s)
    assert machines.error_s == -skew_s
    for turn in range(12):
        machines.ask(wrong_s=wrong_s if turn % 4 == 3 else 0.0)
        assert abs(machines.error_s) <= 2.0 or turn < 2
    for _ in range(3):
        machines.ask(wrong_s=600.0)
    assert abs(machines.error_s - 600.0) <= 2.0, "the API server's clock was set"
