"""The API server's time by the dates of its answers: equal clocks stay equal, and others are corrected."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.server_clock import ServerClock

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
