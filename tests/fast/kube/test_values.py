"""Quantities and times of the API, and the API server's clock by the dates of its answers."""

from __future__ import annotations

from decimal import Decimal
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.objects import parse_time
from edl.kube.quantity import format_quantity, parse_quantity
from edl.kube.server_clock import ServerClock


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
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)


@settings(max_examples=40)
@given(st.decimals(min_value=0, max_value=10**15, places=9))
def test_quantity_comes_back(amount: Decimal) -> None:
    assert parse_quantity(format_quantity(amount)) == amount
    rounded = parse_quantity(format_quantity(amount, binary=True))
    assert amount <= rounded < amount + 1, "memory is in whole bytes, and never less"
    assert format_quantity(Decimal("1e-10")) == "1n"


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


@pytest.mark.parametrize(
    "text", ["", "now", "2026-11-23", "2026-11-23T04:00:00", "2026-13-01T00:00:00Z", "1.Z", "1.5Z"]
)
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time(text)


START_S = 1_800_000_000.0
DAY_S = 86400.0


class Machines:
    """A machine and an API server whose clock is ahead by `skew_s`.

    Attributes:
        now_s: the time by the API server.
        skew_s: by how much this machine's clock is behind it.
    """

    def __init__(self, skew_s: float) -> None:
        self.now_s = START_S
        self.skew_s = skew_s
        self.clock = ServerClock(lambda: self.now_s - self.skew_s, lambda: self.now_s - START_S)

    def ask(self, there_s: float = 0.01, back_s: float = 0.01, *, wrong_s: float = 0.0, date: str | None = None) -> str:
        sent_s = self.clock.begin()
        self.now_s += there_s
        date = date or formatdate(int(self.now_s + wrong_s), usegmt=True)
        self.now_s += back_s
        self.clock.note(date, sent_s)
        return date

    def agree(self, wrong_s: float = 0.0) -> None:
        """Ask until the answers count."""
        for _ in range(4):
            self.ask(wrong_s=wrong_s)
            self.now_s += 1.0

    @property
    def error_s(self) -> float:
        return self.clock.read() - self.now_s


@settings(max_examples=40)
@given(
    st.floats(-8e4, 8e4),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(0, 3)), min_size=3, max_size=20),
)
def test_error_is_bounded(skew_s: float, requests: list[tuple[float, float, float]]) -> None:
    machines = Machines(skew_s)
    machines.ask()
    machines.now_s += 3.0
    for there_s, back_s, pause_s in requests:
        machines.now_s += pause_s
        machines.ask(there_s, back_s)
    assert abs(machines.error_s) <= 1.2, "the first answer was quick, and all agree with it"


@pytest.mark.parametrize("wrong_s", [-3600.0, 30.0, 3600.0, DAY_S - 10, DAY_S, 2 * DAY_S])
def test_wrong_answer_changes_nothing(wrong_s: float) -> None:
    """An answer of another server between good ones has no effect on what ends jobs, at no moment."""
    for skew_s in (0.0, 50.0):
        machines = Machines(skew_s)
        machines.ask(wrong_s=wrong_s)
        assert machines.error_s == -skew_s
        machines.agree()
        for _ in range(10):
            machines.ask(wrong_s=wrong_s)
            assert abs(machines.error_s) <= 1.1
            machines.now_s += 1.0
            machines.ask()
            assert abs(machines.error_s) <= 1.1


@pytest.mark.parametrize("step_s", [-7200.0, -3600.0, 3600.0])
def test_other_server_counts_in_time(step_s: float) -> None:
    machines = Machines(0.0)
    machines.agree()
    machines.agree(step_s)
    assert abs(machines.error_s - step_s) <= 1.1


def test_small_step_back_is_waited_for() -> None:
    machines = Machines(0.0)
    machines.agree(30.0)
    last_s = machines.clock.read()
    machines.agree(0.0)
    for _ in range(60):
        now_s = machines.clock.read()
        assert now_s >= last_s
        last_s = now_s
        machines.now_s += 1.0
        machines.ask()
    assert abs(machines.error_s) <= 1.1


@pytest.mark.parametrize(
    "date",
    [
        "",
        "yesterday",
        "Mon, 99 Foo 2026 00:00:00 GMT",
        "Thu, 01 Jan 99999 00:00:00 GMT",
        formatdate(START_S - 18000) .replace("+0000", "-0000"),
    ],
)  # fmt: skip
def test_bad_date_changes_nothing(date: str) -> None:
    machines = Machines(0.0)
    for _ in range(5):
        machines.clock.note(date, machines.clock.begin())
        machines.now_s += 1.0
    assert machines.error_s == 0.0


def test_time_is_doubtful_at_first() -> None:
    """What is decided by the pod's clock in the first seconds, such as a deadline, cannot be taken back."""
    machines = Machines(3600.0)
    assert not machines.clock.is_doubtful(), "nothing contradicts this machine's clock"
    machines.ask()
    assert machines.clock.is_doubtful()
    machines.agree()
    assert not machines.clock.is_doubtful()
