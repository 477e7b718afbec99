"""The dispatcher in simulated time: where a task goes, also when it fails, how long it waits, when it is given up."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edl.distill.dispatch.actions import Action, Deliver, FailureKind, GiveUp, Limits, RequestFailure, Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.engine.engine import Outage, OutageStatus
from edl.distill.options import Policy
from edl.distill.transport.calls import failure_from_status
from edl.protocol.transport import grpc


@dataclass
class SimTeacher:
    """Computes one request at a time, in order of arrival; `network_s` passes each way."""

    service_s: float
    network_s: float = 0.0005
    straggle: Callable[[], float] = lambda: 1.0
    busy_until: float = 0.0
    served: int = 0

    def reply_at(self, now: float) -> float:
        start = max(now + self.network_s, self.busy_until)
        self.busy_until = start + self.service_s * self.straggle()
        return self.busy_until + self.network_s


class Timeline:
    """A dispatcher, and what happens to it at which time; it is asked only when it says that it wants to be."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher, self.now = dispatcher, 0.0
        self._events: list[tuple[float, int, Callable[[], Sequence[Action] | None]]] = []
        self._order = itertools.count()

    def at(self, when: float, happens: Callable[[], Sequence[Action] | None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happens))

    def advance(self) -> Sequence[Action] | None:
        """Let the next thing happen, and return what is to be done then; None if nothing happens any more."""
        wanted = self.dispatcher.next_event(self.now)
        if wanted is not None and (not self._events or wanted < self._events[0][0]):
            self.now = max(self.now, wanted)
            return self.dispatcher.tick(self.now)
        if not self._events:
            return None
        self.now, _, happens = heapq.heappop(self._events)
        return happens() or ()


class Simulation(Timeline):
    """Feeds `depth` tasks ahead of the consumer, which takes them in order and at once."""

    def __init__(self, dispatcher: Dispatcher, teachers: dict[str, SimTeacher], *, tasks: int, depth: int = 0) -> None:
        super().__init__(dispatcher)
        self.teachers, self.tasks, self.depth = teachers, tasks, depth
        self.latency: dict[int, float] = {}
        self._added: dict[int, float] = {}
        self.delivered = 0

    def run(self) -> None:
        for name in self.teachers:
            self._apply(self.dispatcher.teacher_up(name, self.now))
        self._feed()
        while self.delivered < self.tasks:
            actions = self.advance()
            assert actions is not None, f"stuck at {self.now:.3f} s with {self.delivered} of {self.tasks} delivered"
            assert self.now < 3600, f"{self.delivered} of {self.tasks} delivered after an hour"
            self._apply(actions)
            self._feed()
            self._apply(self.dispatcher.set_awaited(self.delivered, self.now))

    def _feed(self) -> None:
        while self.delivered in self.latency:
            self.delivered += 1
        depth = self.depth or max(8, 4 * self.dispatcher.capacity)
        while len(self._added) < self.tasks and len(self._added) - self.delivered < depth:
            self._apply(self._add(len(self._added)))

    def _add(self, number: int) -> list[Action]:
        self._added[number] = self.now
        return self.dispatcher.add_task(number, self.now)

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                when = self.teachers[action.teacher].reply_at(self.now)
                self.at(when, lambda a=action: self.dispatcher.attempt_answered(a, self.now))  # type: ignore[misc]
            else:
                assert isinstance(action, Deliver), "given up"
                assert action.task not in self.latency, "delivered twice"
                self.latency[action.task] = self.now - self._added[action.task]
                self.teachers[action.teacher].served += 1


def stragglers(share: float, factor: float, seed: int) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: factor if rng.random() < share else 1.0


def sends(actions: Sequence[Action]) -> list[Send]:
    """Of some actions, those that send."""
    return [action for action in actions if isinstance(action, Send)]


def connected(*teachers: str, **policy: Any) -> Dispatcher:
    """A dispatcher with teachers that are up."""
    dispatcher = Dispatcher(Policy(**policy))
    for teacher in teachers:
        dispatcher.teacher_up(teacher, 0.0)
    return dispatcher


def fail(
    dispatcher: Dispatcher, send: Send, kind: FailureKind, now: float, words: str = "no", retry_after_s: float = 0.0
) -> list[Action]:
    """Report that an attempt has failed."""
    return dispatcher.attempt_failed(send, RequestFailure(kind, words, retry_after_s), now)


@pytest.mark.parametrize("teachers", ["a", "abc"])
def test_refused_task_is_given_up(teachers: str) -> None:
    """Two teachers that refuse it are believed, or the only one, and their words are passed on."""
    dispatcher = connected(*teachers)
    actions, asked = dispatcher.add_task(1, 0.0), []
    while isinstance(actions[0], Send):
        (send,) = sends(actions)
        asked.append((send.teacher, RequestFailure(FailureKind.REJECTED, f"{send.teacher} has no input 'x'")))
        actions = dispatcher.attempt_failed(send, asked[-1][1], 0.1)
    (end,) = actions
    assert isinstance(end, GiveUp)
    assert [*end.failures] == asked
    assert len(asked) == min(2, len(teachers))


def test_wrong_refusal_sets_a_teacher_aside() -> None:
    dispatcher = connected("a", "b")
    (first,) = sends(dispatcher.add_task(1, 0.0))
    (second,) = sends(fail(dispatcher, first, FailureKind.REJECTED, 0.1, "unknown model"))
    dispatcher.attempt_answered(second, 0.2)
    assert "unknown model" in dispatcher.teachers[first.teacher].why
    assert dispatcher.count_serving(0.2) == 1


def test_circuit_opens_for_longer_each_time() -> None:
    """Up to half a minute, even of a teacher that fails for days; and it closes with a good answer."""
    dispatcher = connected("a", failures_to_open=2, open_min_s=1.0, task_failures=10**6)
    now, pauses = 0.0, []
    pending = [send for task in range(20) for send in sends(dispatcher.add_task(task, now))]
    for _ in range(1100):  # beyond the exponent of a float
        while pending:
            now += 0.01
            pending += sends(fail(dispatcher, pending.pop(), FailureKind.ERROR, now, "boom"))
        again = dispatcher.teachers["a"].closed_until
        pauses.append(round(again - now, 3))
        assert sends(dispatcher.tick(again - 0.01)) == []
        assert dispatcher.next_event(again - 0.01) <= again
        now = again
        pending = sends(dispatcher.tick(now))
    assert pauses[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert set(pauses[5:]) == {30.0}
    dispatcher.attempt_answered(pending[0], now)
    assert dispatcher.count_serving(now) == 1
    assert dispatcher.teachers["a"].opened == 0


def test_only_teacher_is_asked_with_back_off() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0, failures_to_open=100))
    (send,) = sends(dispatcher.teacher_up("a", 0.0) + dispatcher.add_task(1, 0.0))
    now, waits = 0.0, []
    while not (end := fail(dispatcher, send, FailureKind.ERROR, now, "boom")):
        again = dispatcher.next_event(now)
        waits.append(again - now)
        now = again
        (send,) = sends(dispatcher.tick(now))
    assert waits == [0.5, 1.0]
    assert isinstance(end[0], GiveUp)


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.REJECTED])
@pytest.mark.parametrize("gone", ["not connected", "removed", "draining", "silent"])
def test_absent_teacher_is_not_waited_for(gone: str, kind: FailureKind) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_connecting("late")
    (send,) = sends(dispatcher.teacher_up("only", 0.0) + dispatcher.add_task(1, 0.0))
    assert fail(dispatcher, send, kind, 0.1) == []
    assert dispatcher.next_event(0.1) == pytest.approx(5.1), "a silent one is waited for no longer"
    now = 5.1 if gone == "silent" else 3.0
    if gone == "not connected":
        actions = dispatcher.teacher_unreachable("late", now)
    else:
        if gone != "silent":
            (dispatcher.teacher_removed if gone == "removed" else dispatcher.teacher_draining)("late")
        assert dispatcher.next_event(now) == pytest.approx(now), "what waits has to be looked at"
        actions = dispatcher.tick(now)
    (then,) = actions
    if kind is FailureKind.REJECTED:
        assert isinstance(then, GiveUp)
        assert [name for name, _ in then.failures] == ["only"], "it need not refuse it twice"
    else:
        assert isinstance(then, Send)
        assert then.teacher == "only"


def test_task_in_flight_is_not_given_up() -> None:
    dispatcher = connected("a")
    for task in range(50):
        (send,) = sends(dispatcher.add_task(task, float(task)))
        dispatcher.attempt_answered(send, task + 0.01)
    (first,) = sends(dispatcher.add_task(50, 50.0))
    (extra,) = sends(dispatcher.teacher_up("b", 51.0) + dispatcher.set_awaited(50, 52.0))
    assert extra.extra
    dispatcher.teacher_draining("b")
    assert fail(dispatcher, first, FailureKind.REJECTED, 52.1) == []
    assert isinstance(dispatcher.attempt_answered(extra, 52.2)[0], Deliver)


def test_refusal_waits_for_a_full_teacher() -> None:
    dispatcher = connected("a", "b", hedge_budget=0.0)
    (first,) = sends(dispatcher.add_task(1, 0.0))
    (second,) = sends(fail(dispatcher, first, FailureKind.REJECTED, 0.1))
    assert fail(dispatcher, second, FailureKind.OVERLOADED, 0.2, "full", retry_after_s=0.05) == []
    assert [send.teacher for send in sends(dispatcher.tick(0.26))] == [second.teacher]


def test_deadly_task_is_given_up() -> None:
    dispatcher = Dispatcher(Policy(task_losses=3))
    now, end = 0.0, list[Action]()
    pending = sends(dispatcher.teacher_up("a", now) + dispatcher.add_task(1, now))
    while not end:
        now += 1
        assert now < 10
        dispatcher.teacher_down("a")
        end = fail(dispatcher, pending[0], FailureKind.LOST, now, "reset")
        pending = sends(dispatcher.teacher_up("a", now))
    assert isinstance(end[0], GiveUp)
    assert now == 4, "it was lost more than three times"


@pytest.mark.parametrize("hint", [0.0, math.nan, -1.0])
def test_without_a_hint_the_pause_grows(hint: float) -> None:
    """Until there is room; refusals of one moment count once."""
    dispatcher = connected("a", hedge_budget=0.0)
    state, now, pauses = dispatcher.teachers["a"], 0.0, []
    state.window.size, state.window.probing = 4, False
    pending = [send for task in range(4) for send in sends(dispatcher.add_task(task, 0.0))]
    assert len(pending) == 4
    for _ in range(1100):
        for send in pending:
            fail(dispatcher, send, FailureKind.OVERLOADED, now, "full", retry_after_s=hint)
        pauses.append(round(state.closed_until - now, 3))
        assert dispatcher.next_event(now) == state.closed_until, "it is asked again"
        now = state.closed_until
        pending = sends(dispatcher.tick(now))
    assert pauses[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6]
    assert set(pauses[6:]) == {2.0}
    (send,) = sends(dispatcher.attempt_answered(pending[0], now))
    fail(dispatcher, send, FailureKind.OVERLOADED, now, "full", retry_after_s=hint)
    assert state.closed_until == pytest.approx(now + 0.05), "there was room in between"


def test_a_full_teacher_is_live() -> None:
    dispatcher = connected("a", hedge_budget=0.0)
    (send,) = sends(dispatcher.add_task(1, 0.0))
    fail(dispatcher, send, FailureKind.OVERLOADED, 0.0, "full", retry_after_s=30.0)
    assert not dispatcher.teachers["a"].is_usable(1.0), "it is left alone for as long as it said"
    assert dispatcher.count_serving(1.0) == 1, "and that is no outage: nothing is logged, and no deadline runs"
    dispatcher.set_aside("a", FailureKind.BAD_OUTPUT, "NaN", 1.0)
    assert dispatcher.count_serving(2.0) == 0
    assert dispatcher.pauses == {FailureKind.OVERLOADED: 1, FailureKind.BAD_OUTPUT: 1}


SENSELESS = ["nan", "-nan", "inf", "1e999", "-1", "", "soon", "0x10", "9" * 5000, b"\xff", -7, 0, "0"]


@settings(deadline=None, max_examples=40)
@given(st.text() | st.binary() | st.integers() | st.floats().map(str))
def test_any_hint_gives_a_usable_pause(hint: Any) -> None:
    """A hint of any kind says that the teacher is there, and full; it cannot send students away for days."""

    def hint_s(hint: Any) -> float:
        failed = failure_from_status(grpc.StatusCode.UNAVAILABLE, "full", hint, "h:1").failure
        assert failed.kind is FailureKind.OVERLOADED
        return failed.retry_after_s

    assert 0.0 <= hint_s(hint) <= 60.0
    assert [hint_s(senseless) for senseless in SENSELESS] == [0.0] * len(SENSELESS)
    assert hint_s("250") == hint_s(b"250") == hint_s(250) == 0.25
    assert hint_s("1e15") == hint_s(2**62) == 60.0


def test_teachers_get_their_share() -> None:
    teachers = {"slow": SimTeacher(0.08), **{f"fast{i}": SimTeacher(0.02) for i in range(3)}}
    dispatcher = Dispatcher()
    simulation = Simulation(dispatcher, teachers, tasks=2000)
    simulation.run()
    assert sorted(simulation.latency) == list(range(2000))
    rate = 2000 / simulation.now
    assert rate > 0.95 * (3 / 0.02 + 1 / 0.08)
    assert teachers["slow"].served < teachers["fast0"].served / 3


def test_distant_teacher_gets_a_wider_window() -> None:
    near, far = SimTeacher(0.02, network_s=0.0005), SimTeacher(0.02, network_s=0.05)
    dispatcher = Dispatcher()
    Simulation(dispatcher, {"near": near, "far": far}, tasks=1500).run()
    assert dispatcher.teachers["near"].window.size <= 3
    assert dispatcher.teachers["far"].window.size >= 6
    assert far.served > 0.9 * near.served


def test_hedging_cuts_the_tail_in_budget() -> None:
    def trial(budget: float) -> tuple[Simulation, Dispatcher]:
        teachers = {f"t{i}": SimTeacher(0.02, straggle=stragglers(0.03, 10, i)) for i in range(4)}
        dispatcher = Dispatcher(Policy(hedge_budget=budget))
        simulation = Simulation(dispatcher, teachers, tasks=2000, depth=12)
        simulation.run()
        return simulation, dispatcher

    with_hedging, dispatcher = trial(0.05)
    without, _ = trial(0.0)
    assert 0 < dispatcher.hedged <= 0.05 * 2000 + 1
    assert with_hedging.now < 0.95 * without.now
    # A straggler holds up its teacher and so the request behind it: 6% are late, of which the budget covers 5%.
    tail = [sorted(simulation.latency.values())[int(0.95 * 2000)] for simulation in (with_hedging, without)]
    assert tail[0] < 0.7 * tail[1]


def test_oldest_task_is_sent_again_first() -> None:
    dispatcher = connected("a", hedge_budget=0.0)
    first = sends(dispatcher.add_task(1, 0.0))
    for task in (2, 3, 4):
        dispatcher.add_task(task, 0.0)
    again = sends(fail(dispatcher, first[0], FailureKind.OVERLOADED, 0.1, ""))
    again += sends(dispatcher.tick(0.2))
    assert again[0].task == 1


def test_task_goes_only_where_it_fits() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("small", 0.0, Limits(8))
    assert sends(dispatcher.add_task(1, 0.0, 20)) == []
    assert (dispatcher.oversized(0.0), dispatcher.limits.max_rows) == ((20, 0), 8)
    (small,) = sends(dispatcher.add_task(2, 0.0, 8))
    assert small.teacher == "small"
    (large,) = sends(dispatcher.teacher_up("large", 0.1, Limits(30)))
    assert (large.task, large.teacher) == (1, "large")
    assert (dispatcher.oversized(0.1), dispatcher.limits.max_rows) == ((0, 0), 8)
    assert sends(dispatcher.add_task(3, 0.1, 31)) == []
    assert dispatcher.oversized(0.1) == (31, 0)
    assert [send.task for send in sends(dispatcher.teacher_up("any", 0.2))] == [3]
    dispatcher.teacher_removed("small")
    assert dispatcher.limits.max_rows == 30


def test_broken_connection_counts_once() -> None:
    dispatcher = connected("a", hedge_budget=0.0)
    state = dispatcher.teachers["a"]
    state.window.size, state.window.probing = 16, False
    attempts = [send for task in range(16) for send in sends(dispatcher.add_task(task, 0.0))]
    assert len(attempts) == 16
    dispatcher.teacher_down("a")
    for attempt in attempts:
        dispatcher.attempt_failed(attempt, RequestFailure(FailureKind.LOST, "reset"), 0.1)
    assert not dispatcher.pauses, "of all that was under way none counts"
    assert len(sends(dispatcher.teacher_up("a", 0.2))) == 1, "at once, and one first to measure"


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
        self._on_way: dict[Send, None] = {}
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
        lost = [send for send in self._on_way if send.teacher == name]
        return [action for attempt in lost for action in self._reply(attempt, RequestFailure(FailureKind.LOST, "gone"))]

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                course = self._courses[action.teacher]
                assert action.teacher in self._up, "it is not connected"
                assert action.task not in self.ended
                self._on_way[action] = None
                others = self._on_way.keys()
                assert sum(send.teacher == action.teacher for send in others) <= WINDOW
                assert sum(send.task == action.task for send in others) <= 2, "it is hedged once at most"
                kind = next(self._answers[action.teacher])
                failure = None if kind is None else RequestFailure(kind, "no", 0.3)
                self.at(
                    self.now + course.service_s,
                    lambda attempt=action, failure=failure: self._reply(attempt, failure),  # type: ignore[misc]
                )
            else:
                assert action.task not in self.ended
                self.ended[action.task] = action

    def _reply(self, attempt: Send, failure: RequestFailure | None) -> Sequence[Action]:
        if attempt not in self._on_way:
            return ()
        del self._on_way[attempt]
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
    world = World([*found, GOOD], tasks_at)
    world.run()
    assert sorted(world.ended) == list(range(len(tasks_at)))


@settings(max_examples=60, deadline=None)
@given(courses, times)
def test_bad_teacher_costs_no_task(bad: Course, tasks_at: list[float]) -> None:
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
    assert outage.check(110.5, 0) == OutageStatus(False, 120.5, " in the last 10 s")
    assert outage.check(155.0, 0) == OutageStatus(False, 160.0, " in the last 55 s")
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
