"""The dispatcher's promises, in simulated time."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.dispatch.actions import Deliver, FailureKind, GiveUp, RequestFailure, Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.dispatch.policy import Policy
from tests.fast.distill.dispatch.simulation import SimTeacher, Simulation, sends, stragglers


def test_teachers_get_their_share() -> None:
    """Every task is answered once and each teacher gets its share."""
    teachers = {"slow": SimTeacher(0.08), **{f"fast{i}": SimTeacher(0.02) for i in range(3)}}
    dispatcher = Dispatcher()
    simulation = Simulation(dispatcher, teachers, tasks=2000)
    simulation.run()
    assert sorted(simulation.answers) == list(range(2000))
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


def test_only_quick_teachers_get_bundles() -> None:
    """Only a very quick teacher gets a window for messages of several requests."""
    sizes = []
    for service_s in (0.0005, 0.002):
        dispatcher = Dispatcher()
        Simulation(dispatcher, {"t": SimTeacher(service_s, network_s=0.0001)}, tasks=1500).run()
        sizes.append(dispatcher.teachers["t"].window.size)
    assert sizes[0] >= 10
    assert sizes[1] <= 7


@pytest.mark.parametrize("seed", range(2))
def test_hedging_cuts_the_tail_in_budget(seed: int) -> None:
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


def test_hedging_helps_at_half_pace() -> None:
    """Hedging keeps stragglers out of the 99th percentile of a student at half pace."""

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
    with_hedging, without = [[trial(budget, first) for first in range(0, 33, 11)] for budget in (0.05, 0.0)]
    assert statistics.median(p99 for p99, _ in with_hedging) < 0.5 * statistics.median(p99 for p99, _ in without)
    assert max(hedged for _, hedged in with_hedging) < 0.05 * 2000


@settings(max_examples=6, deadline=None)
@given(st.floats(0.0, 0.5), st.floats(2, 30), st.sampled_from([0.0, 60.0, 150.0, 250.0]), st.integers(0, 1000))
def test_extra_requests_stay_below_5_percent(share: float, factor: float, pace: float, seed: int) -> None:
    """Extra requests stay below 5% of any thousand."""
    services = (0.01, 0.01, 0.01, 0.04)
    teachers = {f"t{i}": SimTeacher(s, straggle=stragglers(share, factor, seed + i)) for i, s in enumerate(services)}
    simulation = Simulation(Dispatcher(), teachers, tasks=2000, pace=pace)
    simulation.run()
    extra = list(itertools.accumulate((send.extra for send in simulation.sends), initial=0))
    assert all(after - before < 50 for before, after in zip(extra, extra[1000:], strict=False))
    assert extra[-1] <= 0.05 * len(simulation.sends), "and of all"
    if factor <= 10:  # what the training loop stands still for, a second and more, goes beyond the budget
        assert all(count <= 0.05 * number for number, count in enumerate(extra)), "at any time"


def test_held_up_teacher_gets_nothing_more() -> None:
    """A teacher that is held up gets nothing more while others can take it."""
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    for name in ("a", "b"):
        dispatcher.teacher_up(name, 0.0)
        state = dispatcher.teachers[name]
        state.window.size, state.window.probing = 8, False
        state.window.base_s = state.window.median_s = state.window.usual_s = state.window.service_s = 0.01
    assert [send.teacher for task in range(2) for send in sends(dispatcher.add_task(task, 0.0))] == ["a", "b"]
    answered = next(number for number, attempt in dispatcher._attempts.items() if attempt.teacher == "b")
    dispatcher.attempt_answered(answered, 0.01)
    later = [send.teacher for task in range(2, 5) for send in sends(dispatcher.add_task(task, 0.02))]
    assert later == ["b", "b", "b"], "a has been silent for twice its usual time"


def test_busy_means_enough_until_an_answer() -> None:
    """Teachers are busy when each that has room has enough until its next answer."""
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    assert dispatcher.busy, "nobody has room"
    for name in ("a", "b"):
        dispatcher.teacher_up(name, 0.0)
        state = dispatcher.teachers[name]
        state.window.size, state.window.probing = 4, False
    found = []
    attempts = []
    for task in range(4):
        attempts += sends(dispatcher.add_task(task, 0.0))
        found.append(dispatcher.busy)
    assert [send.teacher for send in attempts] == ["a", "b", "a", "b"]
    assert found == [False, False, False, True]
    dispatcher.attempt_answered(attempts[0].attempt, 0.001)
    assert not dispatcher.busy
    dispatcher.teacher_down("a")
    dispatcher.tick(0.002)
    assert dispatcher.busy, "only b counts, and it has two"


def test_quick_means_all_live_answered_so() -> None:
    """Teachers are quick when each live one answered so."""
    dispatcher = Dispatcher()
    for name, latency_s in (("near", 0.001), ("far", 0.01)):
        dispatcher.teacher_up(name, 0.0)
        assert not dispatcher.low_latency, "not measured yet"
        (send,) = sends(dispatcher.add_task(len(name), 0.0))
        assert send.teacher == name
        dispatcher.attempt_answered(send.attempt, latency_s)
        assert dispatcher.low_latency == (name == "near")
    dispatcher.teacher_down("far")
    assert dispatcher.low_latency


def test_killed_teacher_costs_its_requests() -> None:
    """A killed teacher costs only what it had in flight."""
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


def test_overloaded_teacher_is_left_alone() -> None:
    """An overloaded teacher is left alone for as long as it says."""
    dispatcher = Dispatcher()
    (first,) = sends(dispatcher.teacher_up("a", 0.0) + dispatcher.add_task(1, 0.0))
    assert (
        dispatcher.attempt_failed(first.attempt, RequestFailure(FailureKind.OVERLOADED, "queue full", 0.3), 0.1) == []
    )
    assert dispatcher.next_event(0.1) == pytest.approx(0.4)
    assert dispatcher.tick(0.39) == []
    assert [send.task for send in sends(dispatcher.tick(0.41))] == [1]


def test_dropped_tasks_answer_is_ignored() -> None:
    """A dropped task is forgotten and its late answer ignored."""
    dispatcher = Dispatcher()
    dispatcher.teacher_up("a", 0.0)
    (send,) = sends(dispatcher.add_task(1, 0.0))
    assert dispatcher.drop_task(1) == [send.attempt]
    assert dispatcher.attempt_answered(send.attempt, 1.0) == []
    assert dispatcher.open_tasks == 0


def test_oldest_task_is_sent_again_first() -> None:
    """The oldest task goes first when it is sent again."""
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    first = sends(dispatcher.add_task(1, 0.0))
    for task in (2, 3, 4):
        dispatcher.add_task(task, 0.0)
    again = sends(dispatcher.attempt_failed(first[0].attempt, RequestFailure(FailureKind.OVERLOADED, "", 0.0), 0.1))
    again += sends(dispatcher.tick(0.2))
    assert again[0].task == 1


def test_task_goes_only_where_it_fits() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("small", 0.0, 8)
    assert sends(dispatcher.add_task(1, 0.0, 20)) == []
    assert (dispatcher.oversized_rows(0.0), dispatcher.max_rows) == (20, 8)
    (small,) = sends(dispatcher.add_task(2, 0.0, 8))
    assert small.teacher == "small"
    (large,) = sends(dispatcher.teacher_up("large", 0.1, 30))
    assert (large.task, large.teacher) == (1, "large")
    assert (dispatcher.oversized_rows(0.1), dispatcher.max_rows) == (0, 8)
    assert sends(dispatcher.add_task(3, 0.1, 31)) == []
    assert dispatcher.oversized_rows(0.1) == 31
    assert [send.task for send in sends(dispatcher.teacher_up("any", 0.2))] == [3]
    dispatcher.teacher_removed("small")
    assert dispatcher.max_rows == 30


def test_too_small_teacher_is_no_second_try() -> None:
    """A teacher that would not take it is nobody to try it again with."""
    for kind in (FailureKind.REJECTED, FailureKind.ERROR):
        dispatcher = Dispatcher(Policy(hedge_budget=0.0))
        dispatcher.teacher_up("small", 0.0, 8)
        dispatcher.teacher_up("large", 0.0)
        (send,) = sends(dispatcher.add_task(1, 0.0, 20))
        then = dispatcher.attempt_failed(send.attempt, RequestFailure(kind, "no"), 0.1)
        if kind is FailureKind.REJECTED:
            assert [type(action) for action in then] == [GiveUp]
        else:
            assert then == []
            assert [again.teacher for again in sends(dispatcher.tick(0.7))] == ["large"]


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


@settings(max_examples=60, deadline=None)
@given(events)
def test_any_events_end_each_task_once(
    script: list[tuple[str, int, FailureKind, float]],
) -> None:
    """Whatever happens, each task ends once, and only usable teachers are asked."""
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
            elif isinstance(action, Deliver | GiveUp):
                assert action.task not in ended
                ended.add(action.task)

    for kind, number, failure, step in script:
        now += step
        name = f"t{number}"
        if kind == "add":
            sizes.append(number)
            take(dispatcher.add_task(added, now, number))  # type: ignore[arg-type]
            added += 1
        elif kind == "coming" and name not in connected:
            dispatcher.teacher_connecting(name)
        elif kind == "not coming":
            take(dispatcher.teacher_unreachable(name, now))  # type: ignore[arg-type]
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
            take(dispatcher.set_awaited(number, now))  # type: ignore[arg-type]
        elif kind == "drop" and number not in ended and number < added:
            for attempt in dispatcher.drop_task(number):
                del on_way[attempt]
            dropped.add(number)
        elif kind in ("answer", "fail") and on_way:
            attempt = sorted(on_way)[number % len(on_way)]
            del on_way[attempt]
            if kind == "answer":
                take(dispatcher.attempt_answered(attempt, now))  # type: ignore[arg-type]
            else:
                take(dispatcher.attempt_failed(attempt, RequestFailure(failure, "x"), now))  # type: ignore[arg-type]
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
            take(dispatcher.attempt_answered(attempt, now))  # type: ignore[arg-type]
        for attempt in list(on_way):
            if attempt in on_way and on_way[attempt].teacher != "good":
                del on_way[attempt]
                take(dispatcher.attempt_failed(attempt, RequestFailure(FailureKind.LOST, "gone"), now))  # type: ignore[arg-type]
        take(dispatcher.tick(now))  # type: ignore[arg-type]
    assert ended | dropped == set(range(added))


def test_broken_connection_counts_once() -> None:
    """A connection that breaks is counted once and forgotten when it is back."""
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    state = dispatcher.teachers["a"]
    state.window.size, state.window.probing = 16, False
    attempts = [send.attempt for task in range(16) for send in sends(dispatcher.add_task(task, 0.0))]
    assert len(attempts) == 16
    dispatcher.teacher_down("a")
    for attempt in attempts:
        dispatcher.attempt_failed(attempt, RequestFailure(FailureKind.LOST, "reset"), 0.1)
    assert len(sends(dispatcher.teacher_up("a", 0.2))) == 1, "at once, and one first to measure"


def test_long_sequences_go_where_they_fit() -> None:
    """A request is no larger than others, but only a teacher that takes its longest sequence is asked."""
    dispatcher = Dispatcher(Policy())
    dispatcher.teacher_up("short", 0.0, 100, 0, 0, 16)
    assert dispatcher.max_sequence == 16
    assert [action.teacher for action in dispatcher.add_task(1, 0.0, 64, 256, 16) if isinstance(action, Send)] == [
        "short"
    ]
    assert dispatcher.add_task(2, 0.0, 64, 256, 17) == []
    assert dispatcher.oversized_rows(0.0) == 64, "it waits for a teacher that takes it"
    sent = dispatcher.teacher_up("long", 0.1, 100, 0, 0, 200)
    assert [(action.task, action.teacher) for action in sent if isinstance(action, Send)] == [(2, "long")]
    assert (dispatcher.oversized_rows(0.1), dispatcher.max_sequence) == (0, 100), "a request holds 100 rows"
    dispatcher.teacher_up("any", 0.2)
    assert dispatcher.max_sequence == 0
