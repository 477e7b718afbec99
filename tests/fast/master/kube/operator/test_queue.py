"""The work queue: each key once, never twice at the same time, and failures wait longer each time."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edl.errors import ConflictError, KubernetesError
from edl.master.kube.operator.queue import KeySchedule, WorkQueue

KEYS = st.sampled_from("abcd")


class ScheduleMachine(RuleBasedStateMachine):
    """Against a model: key -> earliest time that was asked for since it was last taken."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = KeySchedule(1.0, 8.0)
        self.now_s = 0.0
        self.wanted: dict[str, float] = {}
        self.active: set[str] = set()

    @rule(key=KEYS, delay_s=st.floats(0, 20))
    def add(self, key: str, delay_s: float) -> None:
        self.schedule.add(key, self.now_s + delay_s)
        self.wanted[key] = min(self.wanted.get(key, float("inf")), self.now_s + delay_s)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def take(self) -> None:
        due = {key: at_s for key, at_s in self.wanted.items() if key not in self.active and at_s <= self.now_s}
        key = self.schedule.take(self.now_s)
        assert (key is None) == (not due), f"{key} is given out, due are {due}"
        if key is not None:
            assert due[key] == min(due.values()), f"{key} is not the first of {due}"
            self.active.add(key)
            del self.wanted[key]

    @rule(failed=st.booleans(), requeue_s=st.none() | st.floats(0, 30))
    def finish(self, failed: bool, requeue_s: float | None) -> None:
        if not self.active:
            return
        key = min(self.active)
        self.active.discard(key)
        self.schedule.finish(key, self.now_s, failed=failed, requeue_s=requeue_s)
        if requeue_s is not None:
            self.wanted[key] = min(self.wanted.get(key, float("inf")), self.now_s + requeue_s)
        if failed:  # the wait has chance in it: what the schedule says is checked for its bounds, and taken over
            due_s = self.schedule._due[key]
            assert due_s <= min(self.wanted.get(key, float("inf")), self.now_s + 8.0)
            assert due_s >= min(self.wanted.get(key, float("inf")), self.now_s + 0.8)
            self.wanted[key] = due_s

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.schedule.forget(key)
        self.wanted.pop(key, None)

    @invariant()
    def counts(self) -> None:
        assert len(self.schedule) == len(self.wanted.keys() | self.active)
        waiting = [at_s for key, at_s in self.wanted.items() if key not in self.active]
        assert self.schedule.get_next_due_s() == min(waiting, default=None)


TestSchedule = ScheduleMachine.TestCase


@given(st.integers(1, 40))
def test_failures_wait_longer(failures: int) -> None:
    schedule = KeySchedule(1.0, 60.0)
    schedule.add("a", 0.0)
    now_s, waits = 0.0, []
    for _ in range(failures):
        assert schedule.take(now_s) == "a"
        schedule.finish("a", now_s, failed=True)
        due_s = schedule.get_next_due_s()
        assert due_s is not None
        waits.append(due_s - now_s)
        now_s = due_s
    for number, wait_s in enumerate(waits):
        most_s = min(60.0, 2.0**number)
        assert 0.79 * most_s <= wait_s <= 1.01 * most_s


def test_success_ends_the_backoff() -> None:
    schedule = KeySchedule(1.0, 60.0)
    for failed in (True, True, False, True):
        schedule.add("a", 0.0)
        assert schedule.take(1e6) == "a"
        schedule.finish("a", 0.0, failed=failed)
    due_s = schedule.get_next_due_s()
    assert due_s is not None
    assert due_s <= 1.0


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def test_key_is_worked_on_once_at_a_time() -> None:
    active: dict[str, int] = {}
    added = threading.Event()
    worked: list[str] = []
    lock = threading.Lock()
    overlaps = []

    def work(key: str) -> float | None:
        with lock:
            active[key] = active.get(key, 0) + 1
            if active[key] > 1:
                overlaps.append(key)
        assert added.wait(60)
        with lock:
            active[key] -= 1
            worked.append(key)
        return None

    queue = WorkQueue(work, workers=4)
    try:
        for _ in range(20):
            for key in "abc":
                queue.add(key)
            time.sleep(0.002)
        added.set()
        wait_for(lambda: len(queue) == 0)
    finally:
        queue.close()
    assert not overlaps
    assert set(worked) == set("abc")
    assert len(worked) <= 6, "what was added again and again while a key was worked on is once more"


def test_errors_are_repeated_and_reported() -> None:
    results: list[tuple[str, str]] = []
    errors = [KubernetesError("away"), ConflictError("changed")]

    def work(key: str) -> float | None:
        if errors:
            raise errors.pop(0)
        return None

    queue = WorkQueue(
        work,
        workers=1,
        on_result=lambda key, seconds, error: results.append((key, type(error).__name__)),
        schedule=KeySchedule(0.01, 0.02),
    )
    try:
        queue.add("a")
        wait_for(lambda: len(results) == 3)
    finally:
        queue.close()
    assert results == [("a", "KubernetesError"), ("a", "ConflictError"), ("a", "NoneType")]


def test_bug_for_a_key_stops_no_other(caplog: object) -> None:
    worked = []

    def work(key: str) -> float | None:
        if key == "bad":
            raise ZeroDivisionError
        worked.append(key)
        return None

    queue = WorkQueue(work, workers=2, schedule=KeySchedule(0.01, 0.02))
    try:
        queue.add("bad")
        for number in range(5):
            queue.add(f"good-{number}")
        wait_for(lambda: len(worked) == 5)
        assert len(queue) == 1, "the bad key is tried again"
    finally:
        queue.close()
