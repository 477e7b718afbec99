"""Registries, registrations and elections that a signal handler closes in the middle of their own functions.

Each is interrupted before some lines of its own, drawn with a seed from all that it executes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from edl import notifier
from edl.background import start_call
from edl.discovery import Instance, Store, open_registry, open_store
from edl.errors import ClosedError
from tests.interrupting import NEVER, InterruptAt, interrupt_some
from tests.waiting import DEADLINE_S, wait_until

TEACHER = Instance(service="s", id="a", address="10.0.0.7", port=8500)


@contextlib.contextmanager
def interrupt_wait(number: int, close: Callable[[], None], changed: notifier.Notifier) -> Iterator[InterruptAt]:
    """Interrupt a wait, and close where it has begun and the line was not reached: it is none of the wait's."""
    steady = [0, 0]

    def is_over() -> bool:
        steady[:] = (steady[0] + 1 if steady[1] == interrupt.lines else 0), interrupt.lines
        return interrupt.reached or (bool(changed._waits) and steady[0] > 20)

    def close_if_blocked() -> int:
        wait_until(is_over)
        lines = interrupt.lines
        if not interrupt.reached:
            close()
        return lines

    with InterruptAt(number, close, "edl/") as interrupt:
        closing = start_call("edl-test", close_if_blocked)
        yield interrupt
    interrupt.lines = closing.result(DEADLINE_S)


@pytest.mark.parametrize("what", ["registration", "registry"])
def test_registration_closes_before_lines(url: str, what: str) -> None:
    """In the middle of its own `update`, or of a question that its registry is asked, by the same thread."""

    def use(number: int) -> InterruptAt:
        with open_registry(url) as registry:
            registration = registry.register(TEACHER, 600.0)
            close = {"registration": registration.close, "registry": registry.close}[what]
            with InterruptAt(number, close, "edl/") as interrupt, contextlib.suppress(ClosedError):
                registry.snapshot("s")
                registration.update(replace(TEACHER, capacity=2.0))
                if number == NEVER:
                    assert registry.snapshot("s").instances[0].capacity == 2.0, "not announced when update returned"
            registration.close()
        with open_registry(url) as registry:
            assert not registry.snapshot("s").instances, "what was closed is still registered"
        return interrupt

    interrupt_some(use, 8)


def test_election_closes_before_lines(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "_SIGNAL_POLL_S", 1000.0)  # a lost wake-up would be made up for

    def use(number: int) -> InterruptAt:
        with open_store(url) as other:
            election = other.elect("e", b"candidate", 600.0)
            waiting = interrupt_wait(number, election.close, election._changed)  # type: ignore[attr-defined]
            with waiting as interrupt, contextlib.suppress(ClosedError):
                assert not election.wait(), "there is a leader"
        return interrupt

    with store.elect("e", b"leader", 600.0) as leader:
        assert leader.wait(DEADLINE_S)
        interrupt_some(use, 10)
