"""The dispatcher's promises, in simulated time."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.actions import Answer, Failure, FailureKind, GiveUp, Policy, Send
from edl.distill.dispatch import Dispatcher
from tests.unit.simulation import SimTeacher, Simulation, stragglers


def sends(actions: list[object]) -> list[Send]:
    return [action for action in actions if isinstance(action, Send)]


def test_every_task_is_answered_once_and_each_teacher_gets_its_share() -> None:
    teachers = {"slow": SimTeacher(0.08), **{f"fast{i}": SimTeacher(0.02) for i in range(3)}}
    dispatcher = Dispatcher()
    simulation = Simulation(dispatcher, teachers, tasks=2000)
    simulation.run()
    assert sorted(simulation.answers) == list(range(2000))
    rate = 2000 / simulation.now
    assert rate > 0.95 * (3 / 0.02 + 1 / 0.08)
    assert teachers["slow"].served < teachers["fast0"].served / 3


def test_a_teacher_far_away_gets_a_wider_window() -> None:
    near, far = SimTeacher(0.02, network_s=0.0005), SimTeacher(0.02, network_s=0.05)
    dispatcher = Dispatcher()
    Simulation(dispatcher, {"near": near, "far": far}, tasks=1500).run()
    assert dispatcher.teachers["near"].window.size <= 3
    assert dispatcher.teachers["far"].window.size >= 6
    assert far.served > 0.9 * near.served


def test_only_a_very_quick_teacher_gets_a_window_for_messages_of_several_requests() -> None:
    sizes = []
    for service_s in (0.0005, 0.002):
        dispatcher = Dispatcher()
        Simulation(dispatcher, {"t": SimTeacher(service_s, network_s=0.0001)}, tasks=1500).run()
        sizes.append(dispatcher.teachers["t"].window.size)
    assert sizes[0] >= 10
    assert sizes[1] <= 7


@pytest.mark.parametrize("seed", range(5))
def test_hedging_cuts_the_tail_within_its_budget(seed: int) -> None:
    def trial(budget: float) -> tuple[Simulation, Dispatcher]:
        teachers = {f"t{i}": SimTeacher(0.02, straggle=stragglers(0.03, 10, 10 * seed + i)) for i in range(4)}
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


def test_hedging_keeps_stragglers_out_of_the_99th_percentile_of_a_student_at_half_pace() -> None:
    def trial(budget: float, first: int) -> tuple[float, int]:
        def each_33rd(first: int) -> Callable[[], float]:
            numbers = itertools.count(first)
            return lambda: 10.0 if next(numbers) % 33 == 0 else 1.0

        services = (0.01, 0.01, 0.01, 0.04)
        teachers = {f"t{i}": SimTeacher(s, straggle=each_33rd(first + 11 * i)) for i, s in enumerate(services)}
        dispatcher = Dispatcher(Policy(hedge_budget=budget))
        simulation = Simulation(dispatcher, teachers, tasks=2000, pace=125)
        simulation.run()
        return sorted(simulation.delivered_after)[int(0.99 * 2000)], dispatcher.hedged

    # Where the stragglers of several teachers happen to coincide, there is nobody to hedge to.
    with_hedging, without = [[trial(budget, first) for first in range(0, 33, 3)] for budget in (0.05, 0.0)]
    assert statistics.median(p99 for p99, _ in with_hedging) < 0.5 * statistics.median(p99 for p99, _ in without)
    assert max(hedged for _, hedged in with_hedging) < 0.05 * 2000


@settings(max_examples=15, deadline=None)
@given(st.floats(0.0, 0.5), st.floats(2, 30), st.sampled_from([0.0, 60.0, 150.0, 250.0]), st.integers(0, 1000))
def test_extra_requests_stay_below_5_percent_of_any_thousand(
    share: float, factor: float, pace: float, seed: int
) -> None:
    services = (0.01, 0.01, 0.01, 0.04)
    teachers = {f"t{i}": SimTeacher(s, straggle=stragglers(share, factor, seed + i)) for i, s in enumerate(services)}
    simulation = Simulation(Dispatcher(), teachers, tasks=2000, pace=pace)
    simulation.run()
    extra = list(itertools.accumulate((send.extra for send in simulation.sends), initial=0))
    assert all(after - before < 50 for before, after in zip(extra, extra[1000:], strict=False))
    assert extra[-1] <= 0.05 * len(simulation.sends), "and of all"
    if factor <= 10:  # what the training loop stands still for, a second and more, goes beyond the budget
        assert all(count <= 0.05 * number for number, count in enumerate(extra)), "at any time"


def test_a_teacher_that_is_held_up_gets_nothing_more_while_others_can_take_it() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    for name in ("a", "b"):
        dispatcher.teacher_up(name, 0.0)
        state = dispatcher.teachers[name]
        state.window.size, state.window.probing = 8, False
        state.window.base_s = state.window.median_s = state.window.usual_s = state.window.service_s = 0.01
    assert [send.teacher for task in range(2) for send in sends(dispatcher.add(task, 0.0))] == ["a", "b"]
    answered = next(number for number, attempt in dispatcher._attempts.items() if attempt.teacher == "b")
    dispatcher.answered(answered, 0.01)
    later = [send.teacher for task in range(2, 5) for send in sends(dispatcher.add(task, 0.02))]
    assert later == ["b", "b", "b"], "a has been silent for twice its usual time"


def test_teachers_are_busy_when_each_that_has_room_has_enough_until_its_next_answer() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    assert dispatcher.busy, "nobody has room"
    for name in ("a", "b"):
        dispatcher.teacher_up(name, 0.0)
        state = dispatcher.teachers[name]
        state.window.size, state.window.probing = 4, False
    found = []
    attempts = []
    for task in range(4):
        attempts += sends(dispatcher.add(task, 0.0))
        found.append(dispatcher.busy)
    assert [send.teacher for send in attempts] == ["a", "b", "a", "b"]
    assert found == [False, False, False, True]
    dispatcher.answered(attempts[0].attempt, 0.001)
    assert not dispatcher.busy
    dispatcher.teacher_down("a")
    dispatcher.tick(0.002)
    assert dispatcher.busy, "only b counts, and it has two"


def test_teachers_are_quick_when_each_live_one_answered_so() -> None:
    dispatcher = Dispatcher()
    for name, latency_s in (("near", 0.001), ("far", 0.01)):
        dispatcher.teacher_up(name, 0.0)
        assert not dispatcher.quick, "not measured yet"
        (send,) = sends(dispatcher.add(len(name), 0.0))
        assert send.teacher == name
        dispatcher.answered(send.attempt, latency_s)
        assert dispatcher.quick == (name == "near")
    dispatcher.teacher_down("far")
    assert dispatcher.quick


def test_a_killed_teacher_costs_only_what_it_had_in_flight() -> None:
    teachers = {f"t{i}": SimTeacher(0.02) for i in range(4)}
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    simulation = Simulation(dispatcher, teachers, tasks=1000)
    lost: list[int] = []

    def kill() -> list[object]:
        lost.append(len(dispatcher.teachers["t0"].in_flight))
        return simulation.kill("t0")  # type: ignore[return-value]

    simulation.at(2.0, kill)  # type: ignore[arg-type]
    simulation.run()
    assert sorted(simulation.answers) == list(range(1000))
    assert lost[0] > 0
    assert dispatcher.resent == lost[0]
    assert sum(len(teacher.sent) for teacher in teachers.values()) == 1000 + lost[0]


def test_without_hedging_nothing_is_sent_twice() -> None:
    teachers = {f"t{i}": SimTeacher(0.02, straggle=stragglers(0.1, 20, i)) for i in range(3)}
    Simulation(Dispatcher(Policy(hedge_budget=0.0)), teachers, tasks=300).run()
    assert sorted(task for teacher in teachers.values() for task in teacher.sent) == list(range(300))


def test_an_overloaded_teacher_is_left_alone_for_as_long_as_it_says() -> None:
    dispatcher = Dispatcher()
    (first,) = sends(dispatcher.teacher_up("a", 0.0) + dispatcher.add(1, 0.0))
    assert dispatcher.failed(first.attempt, Failure(FailureKind.OVERLOADED, "queue full", 0.3), 0.1) == []
    assert dispatcher.next_event(0.1) == pytest.approx(0.4)
    assert dispatcher.tick(0.39) == []
    assert [send.task for send in sends(dispatcher.tick(0.41))] == [1]


def test_a_task_that_one_teacher_fails_goes_to_another() -> None:
    dispatcher = Dispatcher()
    dispatcher.teacher_up("a", 0.0)
    dispatcher.teacher_up("b", 0.0)
    (first,) = sends(dispatcher.add(1, 0.0))
    (second,) = sends(dispatcher.failed(first.attempt, Failure(FailureKind.ERROR, "out of memory"), 0.1))
    assert second.task == 1
    assert second.teacher != first.teacher


def test_what_two_teachers_refuse_is_given_up_with_their_words() -> None:
    dispatcher = Dispatcher()
    for name in "abc":
        dispatcher.teacher_up(name, 0.0)
    (first,) = sends(dispatcher.add(1, 0.0))
    (second,) = sends(dispatcher.failed(first.attempt, Failure(FailureKind.REJECTED, "no input 'x'"), 0.1))
    (end,) = dispatcher.failed(second.attempt, Failure(FailureKind.REJECTED, "no input 'x'"), 0.2)
    assert isinstance(end, GiveUp)
    assert [name for name, _ in end.failures] == [first.teacher, second.teacher]


def test_the_only_teacher_is_believed_when_it_refuses() -> None:
    dispatcher = Dispatcher()
    dispatcher.teacher_up("a", 0.0)
    (send,) = sends(dispatcher.add(1, 0.0))
    (end,) = dispatcher.failed(send.attempt, Failure(FailureKind.REJECTED, "no"), 0.1)
    assert isinstance(end, GiveUp)


def test_a_teacher_that_refuses_what_another_accepts_is_set_aside() -> None:
    dispatcher = Dispatcher()
    dispatcher.teacher_up("a", 0.0)
    dispatcher.teacher_up("b", 0.0)
    (first,) = sends(dispatcher.add(1, 0.0))
    (second,) = sends(dispatcher.failed(first.attempt, Failure(FailureKind.REJECTED, "unknown model"), 0.1))
    dispatcher.answered(second.attempt, 0.2)
    assert "unknown model" in dispatcher.teachers[first.teacher].why
    assert dispatcher.live(0.2) == 1


def test_unusable_outputs_set_a_teacher_aside_at_once() -> None:
    dispatcher = Dispatcher()
    dispatcher.teacher_up("a", 0.0)
    (send,) = sends(dispatcher.add(1, 0.0))
    dispatcher.failed(send.attempt, Failure(FailureKind.BAD_OUTPUT, "NaN in row 3"), 0.1)
    assert dispatcher.live(0.1) == 0
    assert dispatcher.teachers["a"].why == "NaN in row 3"


def test_the_circuit_opens_for_longer_each_time_and_closes_with_a_good_answer() -> None:
    policy = Policy(failures_to_open=2, open_min_s=1.0, task_failures=100)
    dispatcher = Dispatcher(policy)
    dispatcher.teacher_up("a", 0.0)
    now, pauses = 0.0, []
    pending = [send for task in range(20) for send in sends(dispatcher.add(task, now))]
    for _ in range(5):
        while pending:
            now += 0.01
            pending += sends(dispatcher.failed(pending.pop().attempt, Failure(FailureKind.ERROR, "boom"), now))
        again = dispatcher.teachers["a"].closed_until
        pauses.append(round(again - now, 3))
        assert sends(dispatcher.tick(again - 0.01)) == []
        event = dispatcher.next_event(again - 0.01)
        assert event is not None
        assert event <= again
        now = again
        pending = sends(dispatcher.tick(now))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    dispatcher.answered(pending[0].attempt, now)
    assert dispatcher.live(now) == 1
    assert dispatcher.teachers["a"].opened == 0


def test_a_dropped_task_is_forgotten_and_its_late_answer_ignored() -> None:
    dispatcher = Dispatcher()
    dispatcher.teacher_up("a", 0.0)
    (send,) = sends(dispatcher.add(1, 0.0))
    assert dispatcher.drop(1) == [send.attempt]
    assert dispatcher.answered(send.attempt, 1.0) == []
    assert dispatcher.open_tasks == 0


def test_the_oldest_task_goes_first_when_it_is_sent_again() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    first = sends(dispatcher.add(1, 0.0))
    for task in (2, 3, 4):
        dispatcher.add(task, 0.0)
    again = sends(dispatcher.failed(first[0].attempt, Failure(FailureKind.OVERLOADED, "", 0.0), 0.1))
    again += sends(dispatcher.tick(0.2))
    assert again[0].task == 1


def test_a_task_goes_only_where_it_is_not_too_large() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("small", 0.0, 8)
    assert sends(dispatcher.add(1, 0.0, 20)) == []
    assert (dispatcher.too_large(0.0), dispatcher.max_rows) == (20, 8)
    (small,) = sends(dispatcher.add(2, 0.0, 8))
    assert small.teacher == "small"
    (large,) = sends(dispatcher.teacher_up("large", 0.1, 30))
    assert (large.task, large.teacher) == (1, "large")
    assert (dispatcher.too_large(0.1), dispatcher.max_rows) == (0, 8)
    assert sends(dispatcher.add(3, 0.1, 31)) == []
    assert dispatcher.too_large(0.1) == 31
    assert [send.task for send in sends(dispatcher.teacher_up("any", 0.2))] == [3]
    dispatcher.teacher_removed("small")
    assert dispatcher.max_rows == 30


def test_a_teacher_that_would_not_take_it_is_nobody_to_try_it_again_with() -> None:
    for kind in (FailureKind.REJECTED, FailureKind.ERROR):
        dispatcher = Dispatcher(Policy(hedge_budget=0.0))
        dispatcher.teacher_up("small", 0.0, 8)
        dispatcher.teacher_up("large", 0.0)
        (send,) = sends(dispatcher.add(1, 0.0, 20))
        then = dispatcher.failed(send.attempt, Failure(kind, "no"), 0.1)
        if kind is FailureKind.REJECTED:
            assert [type(action) for action in then] == [GiveUp]
        else:
            assert then == []
            assert [again.teacher for again in sends(dispatcher.tick(0.7))] == ["large"]


def test_a_late_task_is_not_sent_where_it_is_too_large() -> None:
    dispatcher = Dispatcher()
    dispatcher.teacher_up("large", 0.0)
    for task in range(50):
        (send,) = sends(dispatcher.add(task, task, 20))
        dispatcher.answered(send.attempt, task + 0.01)
    assert len(sends(dispatcher.add(50, 50.0, 20))) == 1
    dispatcher.teacher_up("small", 50.0, 8)
    assert sends(dispatcher.wanted(50, 55.0)) + sends(dispatcher.tick(60.0)) == []
    assert [send.extra for send in sends(dispatcher.teacher_up("other", 60.0, 20))] == [True]


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "coming", "not coming", "up", "down", "remove", "drain", "answer", "fail", "tick", "drop", "wanted"]
        ),
        st.integers(0, 5),
        st.sampled_from(list(FailureKind)),
        st.floats(0, 3),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(events)
def test_whatever_happens_each_task_ends_once_and_only_usable_teachers_are_asked(
    script: list[tuple[str, int, FailureKind, float]],
) -> None:
    policy = Policy(window=4)
    dispatcher = Dispatcher(policy)
    now = 0.0
    on_way: dict[int, Send] = {}
    added, ended, dropped = 0, set(), set()
    connected: set[str] = set()
    sizes: list[int] = []
    limits = {"t1": 1, "t2": 3}

    def take(actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert action.teacher in connected
                assert sizes[action.task] <= limits.get(action.teacher, 5)
                assert action.task not in ended | dropped
                on_way[action.attempt] = action
                per_teacher = sum(send.teacher == action.teacher for send in on_way.values())
                assert per_teacher <= policy.window
                assert sum(send.task == action.task for send in on_way.values()) <= 2
            elif isinstance(action, Answer | GiveUp):
                assert action.task not in ended
                ended.add(action.task)

    for kind, number, failure, step in script:
        now += step
        name = f"t{number}"
        if kind == "add":
            sizes.append(number)
            take(dispatcher.add(added, now, number))  # type: ignore[arg-type]
            added += 1
        elif kind == "coming" and name not in connected:
            dispatcher.teacher_coming(name)
        elif kind == "not coming":
            take(dispatcher.teacher_not_coming(name, now))  # type: ignore[arg-type]
        elif kind == "up":
            connected.add(name)
            take(dispatcher.teacher_up(name, now, limits.get(name, 0)))  # type: ignore[arg-type]
        elif kind in ("down", "remove", "drain"):
            connected.discard(name)
            {"down": dispatcher.teacher_down, "remove": dispatcher.teacher_removed}.get(
                kind, dispatcher.teacher_draining
            )(name)
            event = dispatcher.next_event(now)
            assert (event is not None and event <= now) or not copy.deepcopy(dispatcher).tick(now), "nobody would look"
        elif kind == "tick":
            take(dispatcher.tick(now))  # type: ignore[arg-type]
        elif kind == "wanted":
            take(dispatcher.wanted(number, now))  # type: ignore[arg-type]
        elif kind == "drop" and number not in ended and number < added:
            for attempt in dispatcher.drop(number):
                del on_way[attempt]
            dropped.add(number)
        elif kind in ("answer", "fail") and on_way:
            attempt = sorted(on_way)[number % len(on_way)]
            del on_way[attempt]
            if kind == "answer":
                take(dispatcher.answered(attempt, now))  # type: ignore[arg-type]
            else:
                take(dispatcher.failed(attempt, Failure(failure, "x"), now))  # type: ignore[arg-type]
        assert dispatcher.hedged <= dispatcher.sent / 2

    # With one good teacher in the end, everything that is open is answered.
    dispatcher.teacher_removed("good")
    connected.add("good")
    take(dispatcher.teacher_up("good", now))  # type: ignore[arg-type]
    for _ in range(50 * (added + 1)):
        if len(ended | dropped) == added:
            break
        now += 1.0
        mine = [attempt for attempt, send in on_way.items() if send.teacher == "good"]
        for attempt in mine:
            del on_way[attempt]
            take(dispatcher.answered(attempt, now))  # type: ignore[arg-type]
        for attempt in list(on_way):
            if attempt in on_way and on_way[attempt].teacher != "good":
                del on_way[attempt]
                take(dispatcher.failed(attempt, Failure(FailureKind.LOST, "gone"), now))  # type: ignore[arg-type]
        take(dispatcher.tick(now))  # type: ignore[arg-type]
    assert ended | dropped == set(range(added))


def test_a_connection_that_breaks_is_counted_once_and_forgotten_when_it_is_back() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    state = dispatcher.teachers["a"]
    state.window.size, state.window.probing = 16, False
    attempts = [send.attempt for task in range(16) for send in sends(dispatcher.add(task, 0.0))]
    assert len(attempts) == 16
    dispatcher.teacher_down("a")
    for attempt in attempts:
        dispatcher.failed(attempt, Failure(FailureKind.LOST, "reset"), 0.1)
    assert len(sends(dispatcher.teacher_up("a", 0.2))) == 1, "at once, and one first to measure"


def test_the_only_live_teacher_is_tried_again_whatever_the_dead_ones_would_say() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("b", 0.0)
    dispatcher.teacher_down("b")
    dispatcher.teacher_up("a", 0.0)
    (first,) = sends(dispatcher.add(1, 0.0))
    assert dispatcher.failed(first.attempt, Failure(FailureKind.ERROR, "once"), 0.1) == []
    assert dispatcher.next_event(0.1) == pytest.approx(0.6)
    (again,) = sends(dispatcher.tick(0.6))
    assert (again.task, again.teacher) == (1, "a")


def test_the_only_teacher_is_asked_again_after_longer_each_time_until_the_task_is_given_up() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0, failures_to_open=100))
    (send,) = sends(dispatcher.teacher_up("a", 0.0) + dispatcher.add(1, 0.0))
    now, waits = 0.0, []
    while not (end := dispatcher.failed(send.attempt, Failure(FailureKind.ERROR, "boom"), now)):
        again = dispatcher.next_event(now)
        assert again is not None
        waits.append(again - now)
        now = again
        (send,) = sends(dispatcher.tick(now))
    assert waits == [0.5, 1.0]
    assert isinstance(end[0], GiveUp)


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.REJECTED])
def test_what_a_teacher_fails_at_waits_for_one_that_is_being_connected_to(kind: FailureKind) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_coming("good")
    (send,) = sends(dispatcher.teacher_up("bad", 0.0) + dispatcher.add(1, 0.0))
    assert dispatcher.failed(send.attempt, Failure(kind, "no"), 0.1) == []
    assert dispatcher.tick(5.0) == []
    assert [send.teacher for send in sends(dispatcher.teacher_up("good", 5.0))] == ["good"]


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.REJECTED])
@pytest.mark.parametrize("gone", ["not connected", "removed", "draining", "silent"])
def test_a_teacher_that_does_not_come_is_not_waited_for(gone: str, kind: FailureKind) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_coming("late")
    (send,) = sends(dispatcher.teacher_up("only", 0.0) + dispatcher.add(1, 0.0))
    assert dispatcher.failed(send.attempt, Failure(kind, "no"), 0.1) == []
    assert dispatcher.next_event(0.1) == pytest.approx(5.1), "a silent one is waited for no longer"
    now = 5.1 if gone == "silent" else 3.0
    if gone == "not connected":
        actions = dispatcher.teacher_not_coming("late", now)
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


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.REJECTED])
def test_however_many_teachers_fail_at_it_first(kind: FailureKind) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_coming("good")
    for name in "abc":
        dispatcher.teacher_up(name, 0.0)
    pending = sends(dispatcher.add(1, 0.0))
    asked = []
    while pending:
        asked.append(pending[0].teacher)
        actions = dispatcher.failed(pending[0].attempt, Failure(kind, "no"), 0.1)
        pending = sends(actions)
        assert actions == pending, "it is not given up"
    assert sorted(asked) == ["a", "b", "c"]
    assert [send.teacher for send in sends(dispatcher.teacher_up("good", 1.0))] == ["good"]


def test_two_teachers_that_fail_have_one_more_try_between_them() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    dispatcher.teacher_up("b", 0.0)
    (first,) = sends(dispatcher.add(1, 0.0))
    (second,) = sends(dispatcher.failed(first.attempt, Failure(FailureKind.ERROR, "no"), 0.1))
    assert dispatcher.failed(second.attempt, Failure(FailureKind.ERROR, "no"), 0.2) == []
    assert dispatcher.next_event(0.2) == pytest.approx(0.7)
    (third,) = sends(dispatcher.tick(0.7))
    (end,) = dispatcher.failed(third.attempt, Failure(FailureKind.ERROR, "no"), 0.8)
    assert isinstance(end, GiveUp)


def test_a_teacher_that_is_set_aside_for_long_is_not_waited_for() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    dispatcher.teacher_up("b", 0.0)
    dispatcher.set_aside("b", "NaN", 0.0)
    (send,) = sends(dispatcher.add(1, 0.0))
    assert dispatcher.failed(send.attempt, Failure(FailureKind.ERROR, "no"), 0.1) == []
    assert dispatcher.next_event(0.1) == pytest.approx(0.6)
    assert [again.teacher for again in sends(dispatcher.tick(0.6))] == ["a"]


def test_a_refusal_of_one_that_left_is_not_the_last_word() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    for name in ("a", "b"):
        dispatcher.teacher_up(name, 0.0, 8)
    dispatcher.teacher_up("small", 0.0, 1)
    (first,) = sends(dispatcher.add(1, 0.0, 8))
    (second,) = sends(dispatcher.failed(first.attempt, Failure(FailureKind.REJECTED, "no"), 0.1))
    for send in (first, second):
        dispatcher.teacher_removed(send.teacher)
    assert dispatcher.failed(second.attempt, Failure(FailureKind.LOST, "gone"), 0.2) == []
    assert [send.task for send in sends(dispatcher.teacher_up("c", 9.0))] == [1]


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.REJECTED])
def test_one_that_never_has_room_is_not_waited_for_without_an_end(kind: FailureKind) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    dispatcher.teacher_up("full", 0.0)
    (send,) = sends(dispatcher.add(1, 0.0))
    assert send.teacher == "a"
    now, actions = 0.1, dispatcher.failed(send.attempt, Failure(kind, "no"), 0.1)
    while not actions or (isinstance(actions[0], Send) and actions[0].teacher == "full"):
        assert now < 10
        if actions:
            (send,) = sends(actions)
            actions = dispatcher.failed(send.attempt, Failure(FailureKind.OVERLOADED, "full", 0.3), now + 0.01)
        else:
            event = dispatcher.next_event(now)
            assert event is not None
            now = event
            actions = dispatcher.tick(now)
    (end,) = actions
    if kind is FailureKind.REJECTED:
        assert isinstance(end, GiveUp)
    else:
        assert isinstance(end, Send)
        assert end.teacher == "a"
    assert now > 5, "it had its time"


def test_a_task_is_not_given_up_while_another_teacher_has_it_too() -> None:
    dispatcher = Dispatcher()
    dispatcher.teacher_up("a", 0.0)
    for task in range(50):
        (send,) = sends(dispatcher.add(task, float(task)))
        dispatcher.answered(send.attempt, task + 0.01)
    (first,) = sends(dispatcher.add(50, 50.0))
    (extra,) = sends(dispatcher.teacher_up("b", 51.0) + dispatcher.wanted(50, 52.0))
    assert extra.extra
    dispatcher.teacher_draining("b")
    assert dispatcher.failed(first.attempt, Failure(FailureKind.REJECTED, "no"), 52.1) == []
    assert isinstance(dispatcher.answered(extra.attempt, 52.2)[0], Answer)


def test_a_task_that_failed_once_is_taken_as_soon_as_there_is_room_again() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    pending = sends(dispatcher.teacher_up("a", 0.0) + dispatcher.add(1, 0.0))
    now, kind = 0.0, FailureKind.ERROR
    while now < 70:
        (send,) = pending
        assert dispatcher.failed(send.attempt, Failure(kind, "no", 0.05), now) == []
        kind = FailureKind.OVERLOADED
        event = dispatcher.next_event(now)
        assert event is not None
        assert event <= now + 0.5
        now = event
        pending = sends(dispatcher.tick(now))
    assert isinstance(dispatcher.answered(pending[0].attempt, now)[0], Answer)


def test_one_refusal_for_want_of_room_says_nothing_about_the_next_task() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    for name, latency_s in (("a", 0.01), ("b", 0.1)):
        dispatcher.teacher_up(name, 0.0)
        (send,) = sends(dispatcher.add(len(dispatcher.teachers), 0.0))
        assert send.teacher == name
        dispatcher.answered(send.attempt, latency_s)
    (first,) = sends(dispatcher.add(3, 1.0))
    assert first.teacher == "a"
    (second,) = sends(dispatcher.failed(first.attempt, Failure(FailureKind.OVERLOADED, "full", 0.1), 1.01))
    assert second.teacher == "b"
    dispatcher.answered(second.attempt, 1.11)
    assert [send.teacher for send in sends(dispatcher.add(4, 2.0))] == ["a"]


def test_one_that_comes_and_has_no_room_yet_is_asked_again() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_coming("good")
    for name in "abc":
        dispatcher.teacher_up(name, 0.0)
    pending = sends(dispatcher.add(1, 0.0))
    for _ in range(3):
        pending = sends(dispatcher.failed(pending[0].attempt, Failure(FailureKind.ERROR, "no"), 0.1))
    (send,) = sends(dispatcher.teacher_up("good", 1.0))
    assert dispatcher.failed(send.attempt, Failure(FailureKind.OVERLOADED, "full", 0.05), 1.1) == []


def test_a_refusal_is_not_believed_while_another_has_no_room_for_a_moment() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    dispatcher.teacher_up("b", 0.0)
    (first,) = sends(dispatcher.add(1, 0.0))
    (second,) = sends(dispatcher.failed(first.attempt, Failure(FailureKind.REJECTED, "no"), 0.1))
    assert dispatcher.failed(second.attempt, Failure(FailureKind.OVERLOADED, "full", 0.05), 0.2) == []
    assert [send.teacher for send in sends(dispatcher.tick(0.26))] == [second.teacher]


def test_what_one_refused_is_sent_again_where_there_was_an_error() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    dispatcher.teacher_up("b", 0.0)
    (first,) = sends(dispatcher.add(1, 0.0))
    (second,) = sends(dispatcher.failed(first.attempt, Failure(FailureKind.REJECTED, "no"), 0.1))
    assert dispatcher.failed(second.attempt, Failure(FailureKind.ERROR, "boom"), 0.2) == []
    assert [send.teacher for send in sends(dispatcher.tick(0.7))] == [second.teacher]


@pytest.mark.parametrize("how", ["down", "removed", "draining"])
def test_a_teacher_that_was_set_aside_and_goes_is_waited_for_no_longer(how: str) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    dispatcher.teacher_up("b", 0.0)
    dispatcher.teachers["b"].closed_until = 3.0
    (send,) = sends(dispatcher.add(1, 0.0))
    assert dispatcher.failed(send.attempt, Failure(FailureKind.ERROR, "no"), 0.1) == []
    assert dispatcher.next_event(0.1) == pytest.approx(3.0)
    go = {"down": dispatcher.teacher_down, "removed": dispatcher.teacher_removed}.get(how, dispatcher.teacher_draining)
    go("b")
    assert dispatcher.next_event(1.0) == 1.0
    assert [again.teacher for again in sends(dispatcher.tick(1.0))] == ["a"]


def test_a_task_that_kills_every_teacher_is_given_up_in_the_end() -> None:
    dispatcher = Dispatcher(Policy(task_losses=3))
    now, end = 0.0, []
    pending = sends(dispatcher.teacher_up("a", now) + dispatcher.add(1, now))
    while not end:
        now += 1
        assert now < 10
        dispatcher.teacher_down("a")
        end = dispatcher.failed(pending[0].attempt, Failure(FailureKind.LOST, "reset"), now)
        pending = sends(dispatcher.teacher_up("a", now))
    assert isinstance(end[0], GiveUp)
