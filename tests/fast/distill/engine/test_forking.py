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


def test_on_again_after_the_last_fork() -> None:
    """It is on again after the last of several forks at once."""
    _GarbageGuard.before()
    _GarbageGuard.before()
    _GarbageGuard.after_in_parent()
    assert not gc.isenabled(), "a fork is still under way"
    _GarbageGuard.after_in_parent()
    assert gc.isenabled()


def test_stays_off_where_the_program_says() -> None:
    gc.disable()
    _GarbageGuard.before()
    _GarbageGuard.after_in_parent()
    assert not gc.isenabled()
