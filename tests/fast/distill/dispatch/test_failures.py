"""What becomes of a task that fails: where it goes then, how long it waits, and when it is given up."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.dispatch.actions import Deliver, FailureKind, GiveUp, RequestFailure, Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.dispatch.policy import Policy
from edl.distill.transport.grpc_status import failure_from_status
from edl.protocol.transport import grpc
from tests.fast.distill.dispatch.simulation import connected, fail, sends


@pytest.mark.parametrize("teachers", ["a", "abc"])
def test_refused_task_is_given_up(teachers: str) -> None:
    """Two teachers that refuse it are believed, or the only one, and their words are passed on."""
    dispatcher = Dispatcher()
    for name in teachers:
        dispatcher.teacher_up(name, 0.0)
    actions, asked = dispatcher.add_task(1, 0.0), []
    while isinstance(actions[0], Send):
        (send,) = sends(actions)
        asked.append((send.teacher, RequestFailure(FailureKind.REJECTED, f"{send.teacher} has no input 'x'")))
        actions = dispatcher.attempt_failed(send.attempt, asked[-1][1], 0.1)
    (end,) = actions
    assert isinstance(end, GiveUp)
    assert [*end.failures] == asked
    assert len(asked) == min(2, len(teachers))


def test_wrong_refusal_sets_a_teacher_aside() -> None:
    """A teacher that refuses what another accepts is set aside."""
    dispatcher = connected("a", "b")
    (first,) = sends(dispatcher.add_task(1, 0.0))
    (second,) = sends(fail(dispatcher, first, FailureKind.REJECTED, 0.1, "unknown model"))
    dispatcher.attempt_answered(second.attempt, 0.2)
    assert "unknown model" in dispatcher.teachers[first.teacher].why
    assert dispatcher.count_serving(0.2) == 1


def test_circuit_opens_for_longer_each_time() -> None:
    """The circuit opens for longer each time and closes with a good answer."""
    policy = Policy(failures_to_open=2, open_min_s=1.0, task_failures=100)
    dispatcher = Dispatcher(policy)
    dispatcher.teacher_up("a", 0.0)
    now, pauses = 0.0, []
    pending = [send for task in range(20) for send in sends(dispatcher.add_task(task, now))]
    for _ in range(5):
        while pending:
            now += 0.01
            pending += sends(
                dispatcher.attempt_failed(pending.pop().attempt, RequestFailure(FailureKind.ERROR, "boom"), now)
            )
        again = dispatcher.teachers["a"].closed_until
        pauses.append(round(again - now, 3))
        assert sends(dispatcher.tick(again - 0.01)) == []
        event = dispatcher.next_event(again - 0.01)
        assert event is not None
        assert event <= again
        now = again
        pending = sends(dispatcher.tick(now))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    dispatcher.attempt_answered(pending[0].attempt, now)
    assert dispatcher.count_serving(now) == 1
    assert dispatcher.teachers["a"].opened == 0


def test_only_teacher_is_asked_with_back_off() -> None:
    """The only teacher is asked again after longer each time until the task is given up."""
    dispatcher = Dispatcher(Policy(hedge_budget=0.0, failures_to_open=100))
    (send,) = sends(dispatcher.teacher_up("a", 0.0) + dispatcher.add_task(1, 0.0))
    now, waits = 0.0, []
    while not (end := fail(dispatcher, send, FailureKind.ERROR, now, "boom")):
        again = dispatcher.next_event(now)
        assert again is not None
        waits.append(again - now)
        now = again
        (send,) = sends(dispatcher.tick(now))
    assert waits == [0.5, 1.0]
    assert isinstance(end[0], GiveUp)


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.REJECTED])
@pytest.mark.parametrize("gone", ["not connected", "removed", "draining", "silent"])
def test_absent_teacher_is_not_waited_for(gone: str, kind: FailureKind) -> None:
    """A teacher that does not come is not waited for."""
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


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.REJECTED])
def test_any_number_of_failures_comes_first(kind: FailureKind) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_connecting("good")
    for name in "abc":
        dispatcher.teacher_up(name, 0.0)
    pending = sends(dispatcher.add_task(1, 0.0))
    asked = []
    while pending:
        asked.append(pending[0].teacher)
        actions = fail(dispatcher, pending[0], kind, 0.1)
        pending = sends(actions)
        assert actions == pending, "it is not given up"
    assert sorted(asked) == ["a", "b", "c"]
    assert [send.teacher for send in sends(dispatcher.teacher_up("good", 1.0))] == ["good"]


def test_task_in_flight_is_not_given_up() -> None:
    """A task is not given up while another teacher has it too."""
    dispatcher = connected("a")
    for task in range(50):
        (send,) = sends(dispatcher.add_task(task, float(task)))
        dispatcher.attempt_answered(send.attempt, task + 0.01)
    (first,) = sends(dispatcher.add_task(50, 50.0))
    (extra,) = sends(dispatcher.teacher_up("b", 51.0) + dispatcher.set_awaited(50, 52.0))
    assert extra.extra
    dispatcher.teacher_draining("b")
    assert fail(dispatcher, first, FailureKind.REJECTED, 52.1) == []
    assert isinstance(dispatcher.attempt_answered(extra.attempt, 52.2)[0], Deliver)


def test_refusal_waits_for_a_full_teacher() -> None:
    """A refusal is not believed while another has no room for a moment."""
    dispatcher = connected("a", "b", hedge_budget=0.0)
    (first,) = sends(dispatcher.add_task(1, 0.0))
    (second,) = sends(fail(dispatcher, first, FailureKind.REJECTED, 0.1))
    assert fail(dispatcher, second, FailureKind.OVERLOADED, 0.2, "full", retry_after_s=0.05) == []
    assert [send.teacher for send in sends(dispatcher.tick(0.26))] == [second.teacher]


def test_deadly_task_is_given_up() -> None:
    """A task that kills every teacher is given up in the end."""
    dispatcher = Dispatcher(Policy(task_losses=3))
    now, end = 0.0, []
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
    dispatcher = connected("a", hedge_budget=0.0)
    actions, now, sent = dispatcher.add_task(1, 0.0), 0.0, 0
    while now < 6.0:
        sent += sum(isinstance(action, Send) for action in actions)
        for action in actions:
            assert isinstance(action, Send)
            actions = fail(dispatcher, action, FailureKind.OVERLOADED, now, "full", retry_after_s=hint)
        event = dispatcher.next_event(now)
        assert event is not None, "it is asked again"
        assert event > now, "and not at once"
        now, actions = event, dispatcher.tick(event)
    assert sent <= 12, f"{sent} requests in 6 s for one batch"


def test_a_burst_of_refusals_counts_once() -> None:
    dispatcher = connected("a", hedge_budget=0.0)
    sends = [action for task in range(4) for action in dispatcher.add_task(task, 0.0) if isinstance(action, Send)]
    for send in sends:
        fail(dispatcher, send, FailureKind.OVERLOADED, 0.0, "full")
    assert dispatcher.teachers["a"].closed_until == pytest.approx(0.05), f"after {len(sends)} refusals of one moment"


def test_a_full_teacher_is_live() -> None:
    dispatcher = connected("a", hedge_budget=0.0)
    (send,) = (action for action in dispatcher.add_task(1, 0.0) if isinstance(action, Send))
    fail(dispatcher, send, FailureKind.OVERLOADED, 0.0, "full", retry_after_s=30.0)
    assert not dispatcher.teachers["a"].is_usable(1.0), "it is left alone for as long as it said"
    assert dispatcher.count_serving(1.0) == 1, "and that is no outage: nothing is logged, and no deadline runs"
    dispatcher.set_aside("a", FailureKind.BAD_OUTPUT, "NaN", 1.0)
    assert dispatcher.count_serving(2.0) == 0


def test_an_answer_ends_the_growth() -> None:
    dispatcher = connected("a", hedge_budget=0.0)
    now = 0.0
    for task in range(20):
        (send,) = (action for action in dispatcher.add_task(task, now) if isinstance(action, Send))
        fail(dispatcher, send, FailureKind.OVERLOADED, now, "full")
        state = dispatcher.teachers["a"]
        assert state.closed_until == pytest.approx(now + 0.05), "each one was answered in the end"
        now = state.closed_until
        (send,) = (action for action in dispatcher.tick(now) if isinstance(action, Send))
        dispatcher.attempt_answered(send.attempt, now + 0.01)
        now += 0.01


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


@pytest.mark.parametrize("kind", [FailureKind.OVERLOADED, FailureKind.ERROR])
def test_a_teacher_may_fail_for_days(kind: FailureKind) -> None:
    """More often than the exponent of a float is large: the pause stays what it was."""
    dispatcher = connected("a", hedge_budget=0.0, task_failures=10**6)
    actions, now = dispatcher.add_task(1, 0.0), 0.0
    for _ in range(1100):
        for action in actions:
            assert isinstance(action, Send)
            actions = fail(dispatcher, action, kind, now)
        event = dispatcher.next_event(now)
        assert event is not None, f"it is never asked again after {now:.0f} s"
        now, actions = event, dispatcher.tick(event)
    assert now > 1100
