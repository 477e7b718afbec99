"""How long a full teacher is left alone: its own hint where that makes sense, else a pause that grows."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.distill.dispatch.actions import FailureKind, RequestFailure, Send
from edl.distill.dispatch.dispatcher import Dispatcher
from edl.distill.dispatch.policy import Policy
from edl.distill.transport.grpc_status import failure_from_status
from edl.protocol.transport import grpc

BAD = ["nan", "-nan", "inf", "-inf", "1e999", "-1", "-5.5", "", "soon", "0x10", "9" * 5000, b"\xff", b"nan", -7, 0, "0"]


def hint_s(hint: Any) -> float:
    failed = failure_from_status(grpc.StatusCode.UNAVAILABLE, "full", hint, "h:1").failure
    assert failed.kind is FailureKind.OVERLOADED, "a hint of any kind says that the teacher is there, and full"
    return failed.retry_after_s


@pytest.mark.parametrize("hint", BAD, ids=lambda hint: repr(hint)[:12])
def test_a_senseless_hint_is_none(hint: Any) -> None:
    assert hint_s(hint) == 0.0


def test_a_hint_is_bounded() -> None:
    assert hint_s("250") == hint_s(b"250") == hint_s(250) == 0.25
    assert hint_s("1e15") == hint_s(2**62) == 60.0, "a teacher must not send its students away for days"


@settings(deadline=None)
@given(st.text() | st.binary() | st.integers() | st.floats().map(str))
def test_any_hint_gives_a_usable_pause(hint: Any) -> None:
    seconds = hint_s(hint)
    assert math.isfinite(seconds)
    assert 0.0 <= seconds <= 60.0


@pytest.mark.parametrize("hint", [0.0, math.nan, -1.0])
def test_without_a_hint_the_pause_grows(hint: float) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    actions, now, sent = dispatcher.add_task(1, 0.0), 0.0, 0
    while now < 6.0:
        sent += sum(isinstance(action, Send) for action in actions)
        for action in actions:
            assert isinstance(action, Send)
            actions = dispatcher.attempt_failed(
                action.attempt, RequestFailure(FailureKind.OVERLOADED, "full", hint), now
            )
        event = dispatcher.next_event(now)
        assert event is not None, "it is asked again"
        assert event > now, "and not at once"
        now, actions = event, dispatcher.tick(event)
    assert sent <= 12, f"{sent} requests in 6 s for one batch"


def test_a_burst_of_refusals_counts_once() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    sends = [action for task in range(4) for action in dispatcher.add_task(task, 0.0) if isinstance(action, Send)]
    for send in sends:
        dispatcher.attempt_failed(send.attempt, RequestFailure(FailureKind.OVERLOADED, "full"), 0.0)
    assert dispatcher.teachers["a"].closed_until == pytest.approx(0.05), f"after {len(sends)} refusals of one moment"


def test_a_full_teacher_is_live() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    (send,) = (action for action in dispatcher.add_task(1, 0.0) if isinstance(action, Send))
    dispatcher.attempt_failed(send.attempt, RequestFailure(FailureKind.OVERLOADED, "full", 30.0), 0.0)
    assert not dispatcher.teachers["a"].is_usable(1.0), "it is left alone for as long as it said"
    assert dispatcher.count_serving(1.0) == 1, "and that is no outage: nothing is logged, and no deadline runs"
    dispatcher.set_aside("a", FailureKind.BAD_OUTPUT, "NaN", 1.0)
    assert dispatcher.count_serving(2.0) == 0


def test_set_aside_while_it_has_no_room() -> None:
    """It is not live, though it said that it has no room for longer than it is set aside."""
    dispatcher = Dispatcher(Policy(hedge_budget=0.0, aside_s=30.0))
    dispatcher.teacher_up("a", 0.0)
    (send,) = (action for action in dispatcher.add_task(1, 0.0) if isinstance(action, Send))
    dispatcher.attempt_failed(send.attempt, RequestFailure(FailureKind.OVERLOADED, "full", 60.0), 0.0)
    until = dispatcher.teachers["a"].closed_until
    dispatcher.set_aside("a", FailureKind.BAD_OUTPUT, "NaN", 1.0)
    assert dispatcher.count_serving(2.0) == 0
    assert dispatcher.teachers["a"].closed_until == max(until, 31.0)


def test_an_answer_ends_the_growth() -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0))
    dispatcher.teacher_up("a", 0.0)
    now = 0.0
    for task in range(20):
        (send,) = (action for action in dispatcher.add_task(task, now) if isinstance(action, Send))
        dispatcher.attempt_failed(send.attempt, RequestFailure(FailureKind.OVERLOADED, "full"), now)
        state = dispatcher.teachers["a"]
        assert state.closed_until == pytest.approx(now + 0.05), "each one was answered in the end"
        now = state.closed_until
        (send,) = (action for action in dispatcher.tick(now) if isinstance(action, Send))
        dispatcher.attempt_answered(send.attempt, now + 0.01)
        now += 0.01


@pytest.mark.parametrize("kind", [FailureKind.OVERLOADED, FailureKind.ERROR])
def test_a_teacher_may_fail_for_days(kind: FailureKind) -> None:
    dispatcher = Dispatcher(Policy(hedge_budget=0.0, task_failures=10**6))
    dispatcher.teacher_up("a", 0.0)
    actions, now = dispatcher.add_task(1, 0.0), 0.0
    for _ in range(2500):
        for action in actions:
            assert isinstance(action, Send)
            actions = dispatcher.attempt_failed(action.attempt, RequestFailure(kind, "no"), now)
        event = dispatcher.next_event(now)
        assert event is not None, f"it is never asked again after {now:.0f} s"
        now, actions = event, dispatcher.tick(event)
    assert now > 2500, "2**1025 is no float: the pause stays what it was"
