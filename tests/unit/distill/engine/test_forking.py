"""The parent's garbage collector while several of its threads fork at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from edl.distill.engine.event_loop import EventLoopThread, _GarbageGuard


@pytest.fixture(autouse=True)
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(EventLoopThread, "used", True)
    assert gc.isenabled()
    yield
    gc.enable()


def test_it_is_on_again_after_the_last_of_several_forks_at_once() -> None:
    _GarbageGuard.before()
    _GarbageGuard.before()
    _GarbageGuard.after_in_parent()
    assert not gc.isenabled(), "a fork is still under way"
    _GarbageGuard.after_in_parent()
    assert gc.isenabled()


def test_it_stays_off_where_the_program_turned_it_off() -> None:
    gc.disable()
    _GarbageGuard.before()
    _GarbageGuard.after_in_parent()
    assert not gc.isenabled()
