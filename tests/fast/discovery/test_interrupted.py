"""Watches and registries that a signal handler closes in the middle of their own functions."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edl import notifier
from edl.discovery import Instance
from edl.discovery.common.latest_value import LatestValue
from edl.discovery.common.resource import Resource
from edl.discovery.registry import Registration, Registry
from edl.discovery.urls import open_registry, open_store
from edl.errors import ClosedError
from tests.interrupting import InterruptAt, deadline


def test_slot_is_closed_before_any_line() -> None:
    for number in itertools.count(1):
        # A time that ends the wait may be over before a busy machine reaches the line: that is tried again.
        if not (interrupts_take(number, 0.2) or interrupts_take(number, 2.0)):
            assert number > 4, "nothing was interrupted"
            break


def interrupts_take(number: int, after_s: float) -> bool:
    """Wait for a slot that is closed before a line of the wait, or after a time; whether the line was reached."""
    slot: LatestValue[int] = LatestValue()
    waits = threading.Timer(after_s, lambda: interrupt.reached or slot.close())
    with deadline(10, f"closed before line {number} of a wait"):
        with InterruptAt(number, slot.close, "edl/") as interrupt:
            waits.start()
            assert slot.take() is None
        waits.cancel()
    return interrupt.reached


class Parts(Resource):
    def add(self) -> Resource:
        return self._own(Resource())


def test_owner_is_closed_before_any_line() -> None:
    for number in itertools.count(1):
        owner, parts = Parts(), []
        with deadline(10, f"closed before line {number}"), InterruptAt(number, owner.close, "edl/") as interrupt:
            with contextlib.suppress(ClosedError):
                parts = [owner.add() for _ in range(3)]
                parts[0].close()
            owner.close()
        assert all(part._closed for part in parts), "a part was left open"
        if not interrupt.reached:
            assert number > 20, "nothing was interrupted"
            break


def test_registry_is_closed_before_lines(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    for number in itertools.count(1, 17):
        with deadline(20, f"closed before line {number}"):
            registry = open_registry(url)
            with InterruptAt(number, registry.close, "edl/") as interrupt, contextlib.suppress(ClosedError):
                for _ in range(2):
                    with registry.watch("s") as watch:
                        watch.get(5)
            registry.close()
        if not interrupt.reached:
            assert number > 50, "nothing was interrupted"
            break


TEACHER = Instance(service="s", id="a", address="10.0.0.7", port=8500)


def closers(registry: Registry, registration: Registration) -> dict[str, Callable[[], None]]:
    return {"registration": registration.close, "registry": registry.close}


@pytest.mark.parametrize("what", ["registration", "registry"])
def test_registration_closes_at_any_line(tmp_path: Path, what: str) -> None:
    """In the middle of its own `update`, or of a question that its registry is asked, by the same thread."""
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    for number in itertools.count(1, 23):
        with deadline(10, f"closed before line {number}"), open_registry(url) as registry:
            registration = registry.register(TEACHER)
            close = closers(registry, registration)[what]
            with InterruptAt(number, close, "edl/") as interrupt, contextlib.suppress(ClosedError):
                for capacity in (2.0, 3.0):
                    registry.snapshot("s")
                    registration.update(replace(TEACHER, capacity=capacity))
            registration.close()
        if not interrupt.reached:
            assert number > 100, "nothing was interrupted"
            break
        with open_registry(url) as registry:
            assert not registry.snapshot("s").instances, "what was closed is still registered"


def test_registration_tells_why_it_failed(tmp_path: Path) -> None:
    """The thread that announces is another one than the caller's, which hears of errors all the same."""
    with open_registry(f"sqlite:///{tmp_path}/discovery.sqlite") as registry:
        registration = registry.register(TEACHER)
        for capacity in (2.0, 3.0):
            registration.update(replace(TEACHER, capacity=capacity))
            assert registry.snapshot("s").instances[0].capacity == capacity, "not announced when update returned"


def test_election_is_closed_before_any_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "_SIGNAL_POLL_S", 1000.0)  # a lost wake-up would be made up for
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    with open_store(url) as other, other.elect("e", b"leader") as leader:
        assert leader.wait(10)
        for number in itertools.count(1):
            # A short time ends the wait where the line comes after it. It may be over before a busy machine reaches a
            # line that comes before: that is tried again.
            if not (interrupts_candidate(url, number, 0.05) or interrupts_candidate(url, number, 2.0)):
                assert number > 8, "nothing was interrupted"
                break


def interrupts_candidate(url: str, number: int, after_s: float) -> bool:
    """Wait in an election that is closed before a line of the wait, or after a time; whether the line was reached."""
    with deadline(30, f"closed before line {number} of a wait"), open_store(url) as store:
        election = store.elect("e", b"candidate")
        waits = threading.Timer(after_s, lambda: interrupt.reached or election.close())
        with InterruptAt(number, election.close, "edl/") as interrupt:
            waits.start()
            with contextlib.suppress(ClosedError):
                assert not election.wait(), "there is a leader"
        waits.join()
    return interrupt.reached
