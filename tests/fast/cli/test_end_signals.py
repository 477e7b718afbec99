"""Signals that ask for an end are collected, and the handlers of before come back."""

from __future__ import annotations

import os
import signal

from edl.end_signals import collect_signals


def test_signals_are_collected() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with collect_signals() as caught:
        assert caught == []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert caught == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
