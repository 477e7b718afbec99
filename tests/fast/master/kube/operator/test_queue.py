"""The work queue: each key once, never twice at the same time, and failures wait longer each time."""

from __future__ import annotations

import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edl.errors import ConflictError, KubernetesError
from edl.master.kube.operator.queue import KeySchedule, WorkQueue
from tests.waiting import wait_until

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


ScheduleMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestSchedule = ScheduleMachine.TestCase


def test_key_is_worked_on_once_at_a_time() -> None:
    active: list[str] = []
    added = threading.Event()
    worked: list[str] = []
    overlaps: list[str] = []

    def work(key: str) -> float | None:
        if key in active:
            overlaps.append(key)
        active.append(key)
        assert added.wait(60)
        active.remove(key)
        worked.append(key)
        return None

    queue = WorkQueue(work, workers=4)
    try:
        for number in range(20):
            for key in "abc":
                queue.add(key)
            wait_until(lambda number=number: number or len(active) == 3, "all keys under way")  # type: ignore[misc]
        added.set()
        wait_until(lambda: len(queue) == 0, "the end of the work")
    finally:
        queue.close()
    assert not overlaps
    assert sorted(worked) == list("aabbcc"), "what was added again and again while a key was worked on is once more"


def test_errors_are_repeated_and_reported() -> None:
    """A bug for a key stops no other, and no error ends a worker."""
    results: list[tuple[str, str]] = []
    errors = [KubernetesError("away"), ConflictError("changed")]

    def work(key: str) -> float | None:
        if key == "bug":
            raise ZeroDivisionError
        if errors:
            raise errors.pop(0)
        return None

    def note(key: str, seconds: float, error: Exception | None) -> None:
        results.append((key, type(error).__name__))

    queue = WorkQueue(work, workers=2, on_result=note, schedule=KeySchedule(0.01, 0.02))
    try:
        queue.add("a")
        wait_until(lambda: len(results) == 3, "success")
        assert [name for _, name in results] == ["KubernetesError", "ConflictError", "NoneType"]
        queue.add("bug")
        wait_until(lambda: ("bug", "ZeroDivisionError") in results, "the bug")
        queue.add("b")
        wait_until(lambda: ("b", "NoneType") in results, "another key")
        assert len(queue) == 1, "the bad key is tried again"
    finally:
        queue.close()
