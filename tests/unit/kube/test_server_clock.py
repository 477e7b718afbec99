"""The API server's time by the dates of its answers: equal clocks stay equal, and others are corrected."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.server_clock import ServerClock

START_S = 1_800_000_000.0


class Machines:
    """A machine and an API server whose clock differs by `skew_s`."""

    def __init__(self, skew_s: float) -> None:
        self.now_s = START_S
        self.skew_s = skew_s
        self.clock = ServerClock(lambda: self.now_s)

    def ask(self, there_s: float = 0.01, back_s: float = 0.01) -> None:
        sent_s = self.clock.begin()
        self.now_s += there_s
        date = formatdate(int(self.now_s + self.skew_s), usegmt=True)
        self.now_s += back_s
        self.clock.note(date, sent_s)

    @property
    def error_s(self) -> float:
        return self.clock.read() - (self.now_s + self.skew_s)


@settings(max_examples=40)
@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(0, 3)), min_size=1, max_size=20),
)
def test_error_is_bounded(skew_s: float, requests: list[tuple[float, float, float]]) -> None:
    machines = Machines(skew_s)
    for there_s, back_s, pause_s in requests:
        machines.now_s += pause_s
        machines.ask(there_s, back_s)
    slowest = max(there_s + back_s for there_s, back_s, _ in requests)
    assert abs(machines.error_s) <= 1.0 + slowest + 0.1


@given(st.floats(0, 1))
def test_equal_clocks_stay_equal(fraction: float) -> None:
    machines = Machines(0.0)
    machines.now_s += fraction
    for _ in range(20):
        machines.now_s += 0.37
        machines.ask()
        assert machines.error_s == 0.0


def test_many_answers_narrow_it_down() -> None:
    machines = Machines(20.5)
    for _ in range(200):
        machines.now_s += 0.513
        machines.ask()
    assert abs(machines.error_s) < 0.3


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_clock_that_is_set_is_noticed(step_s: float) -> None:
    machines = Machines(0.0)
    machines.ask()
    machines.now_s += step_s
    machines.skew_s -= step_s
    machines.ask()
    assert abs(machines.error_s) <= 1.1


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 99 Foo 2026 00:00:00 GMT", "Thu, 01 Jan 99999 00:00:00 GMT"])
def test_bad_date_changes_nothing(date: str) -> None:
    machines = Machines(0.0)
    machines.clock.note(date, machines.clock.begin())
    assert machines.error_s == 0.0


def test_late_answer_changes_nothing() -> None:
    machines = Machines(100.0)
    machines.ask(there_s=60.0)
    assert machines.error_s == -100.0
    machines.ask()
    assert abs(machines.error_s) <= 1.1


def test_wrong_clock_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines(-20.0)
    for _ in range(3):
        machines.ask()
    assert [record.getMessage() for record in caplog.records] == [
        "this machine's clock is 19 s ahead of the API server's, whose counts"
    ]
