"""Nothing that waits is forgotten: the dispatcher in simulated time, asked only when it says that it wants to be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from edl.distill.dispatch.actions import Action, Deliver, FailureKind, GiveUp, RequestFailure, Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.dispatch.outage import Outage, OutageStatus
from edl.distill.dispatch.policy import Policy
from tests.fast.distill.dispatch.simulation import Timeline

RESCUE_S = 100.0
"""When a good teacher comes that stays."""
END_S = 300.0
WINDOW = 4


@dataclass(frozen=True)
class Course:
    """What becomes of one teacher: how it answers, one way after the other; when it is first connected to, is up and
    goes, None for never."""

    answers: tuple[FailureKind | None, ...]
    service_s: float
    coming_at: float
    up_after_s: float | None
    stays_s: float | None
    goes: str


class World(Timeline):
    """Teachers on their courses, and tasks that are added at some times."""

    def __init__(self, courses: Sequence[Course], tasks_at: Sequence[float]) -> None:
        super().__init__(Dispatcher(Policy(window=WINDOW)))
        self.ended: dict[int, Deliver | GiveUp] = {}
        self._courses = {f"t{number}": course for number, course in enumerate(courses)}
        self._on_way: dict[int, Send] = {}
        self._up: set[str] = set()
        self._answers = {name: itertools.cycle(course.answers) for name, course in self._courses.items()}
        for name, course in self._courses.items():
            self._plan(name, course)
        for task, at in enumerate(tasks_at):
            self.at(at, lambda task=task: self.dispatcher.add_task(task, self.now))  # type: ignore[misc]

    def run(self) -> None:
        for _ in range(20_000):
            actions = self.advance()
            if actions is None or self.now >= END_S:
                return
            self._carry_out(actions)
        raise AssertionError("it wants to be asked without an end")

    def _plan(self, name: str, course: Course) -> None:
        self.at(course.coming_at, lambda: self.dispatcher.teacher_connecting(name))
        if course.up_after_s is None:
            self.at(course.coming_at + 5.0, lambda: self.dispatcher.teacher_unreachable(name, self.now))
        else:
            self.at(course.coming_at + course.up_after_s, lambda: self._come(name))
        if course.stays_s is not None:
            self.at(course.coming_at + (course.up_after_s or 0.0) + course.stays_s, lambda: self._go(name, course))

    def _come(self, name: str) -> Sequence[Action]:
        self._up.add(name)
        return self.dispatcher.teacher_up(name, self.now)

    def _go(self, name: str, course: Course) -> Sequence[Action]:
        self._up.discard(name)
        if course.goes == "drains":
            self.dispatcher.teacher_draining(name)
            return ()
        (self.dispatcher.teacher_down if course.goes == "breaks" else self.dispatcher.teacher_removed)(name)
        lost = [attempt for attempt, send in self._on_way.items() if send.teacher == name]
        return [action for attempt in lost for action in self._reply(attempt, RequestFailure(FailureKind.LOST, "gone"))]

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                course = self._courses[action.teacher]
                assert action.teacher in self._up, "it is not connected"
                assert action.task not in self.ended
                self._on_way[action.attempt] = action
                others = self._on_way.values()
                assert sum(send.teacher == action.teacher for send in others) <= WINDOW
                assert sum(send.task == action.task for send in others) <= 2, "it is hedged once at most"
                kind = next(self._answers[action.teacher])
                failure = None if kind is None else RequestFailure(kind, "no", 0.3)
                self.at(
                    self.now + course.service_s,
                    lambda attempt=action.attempt, failure=failure: self._reply(attempt, failure),  # type: ignore[misc]
                )
            else:
                assert action.task not in self.ended
                self.ended[action.task] = action

    def _reply(self, attempt: int, failure: RequestFailure | None) -> Sequence[Action]:
        if self._on_way.pop(attempt, None) is None:
            return ()
        if failure is None:
            return self.dispatcher.attempt_answered(attempt, self.now)
        return self.dispatcher.attempt_failed(attempt, failure, self.now)


seconds = st.floats(0, 20).map(lambda value: round(value, 2))
courses = st.builds(
    Course,
    answers=st.lists(st.sampled_from([None, *FailureKind]), min_size=1, max_size=5).map(tuple),
    service_s=st.sampled_from([0.01, 0.2, 3.0]),
    coming_at=seconds,
    up_after_s=st.none() | seconds,
    stays_s=st.none() | seconds,
    goes=st.sampled_from(["drains", "breaks", "leaves"]),
)
times = st.lists(seconds, min_size=1, max_size=12)
GOOD = Course((None,), 0.05, RESCUE_S, 0.0, None, "")
BUSY = Course((FailureKind.OVERLOADED,), 3.0, 0.0, 0.0, None, "")


@settings(max_examples=60, deadline=None)
@given(st.lists(courses, max_size=5), times)
@example([BUSY, BUSY], [0.0])  # one of them is always open again when the other says that it has no room
def test_tasks_end_when_a_good_teacher_comes(found: list[Course], tasks_at: list[float]) -> None:
    """Every task ends when there is a good teacher at last."""
    world = World([*found, GOOD], tasks_at)
    world.run()
    assert sorted(world.ended) == list(range(len(tasks_at)))


@settings(max_examples=60, deadline=None)
@given(courses, times)
def test_bad_teacher_costs_no_task(bad: Course, tasks_at: list[float]) -> None:
    """One bad teacher costs no task where a good one is there or comes."""
    good = Course((None,), 0.05, 0.0, 4.9, None, "")
    world = World([bad, good], tasks_at)
    world.run()
    assert {task for task, end in world.ended.items() if isinstance(end, Deliver)} == set(range(len(tasks_at)))


TIMEOUT_S, REQUEST_S = 60.0, 20.0


def test_outage_is_said_recalled_and_ended() -> None:
    outage = Outage(TIMEOUT_S, REQUEST_S)
    outage.start_work(100.0)
    assert outage.check(100.0, 0) == OutageStatus(False, 110.0, ": waiting up to 60 s")
    assert outage.check(105.0, 0) == OutageStatus(False, 110.0)
    assert outage.check(110.5, 0) == OutageStatus(False, 120.5, " since 10 s")
    assert outage.check(155.0, 0) == OutageStatus(False, 160.0, " since 55 s")
    assert outage.check(160.0, 0).expired
    outage.finish_work()
    outage.start_work(1000.0)
    assert outage.check(1000.0, 0) == OutageStatus(False, 1010.0, ": waiting up to 60 s"), "later work waits in full"


def test_a_teacher_that_comes_ends_it() -> None:
    outage = Outage(TIMEOUT_S, REQUEST_S)
    outage.start_work(0.0)
    outage.check(0.0, 0)
    outage.record_answer(50.0)
    assert outage.check(50.0, 1) == OutageStatus(False, 55.0)
    assert outage.check(70.0, 0) == OutageStatus(False, 80.0, ": waiting up to 60 s")


def test_mute_teachers_are_awaited_briefly() -> None:
    """Teachers that are there and never answer are waited for no longer than a request more."""
    outage = Outage(TIMEOUT_S, REQUEST_S)
    outage.start_work(0.0)
    assert [outage.check(now, 2).expired for now in (0.0, 79.9, 80.0)] == [False, False, True]
    outage.start_work(0.0)
    assert [outage.check(now, live).expired for now, live in ((79.0, 1), (79.5, 0), (80.0, 0))] == [False, False, True]
