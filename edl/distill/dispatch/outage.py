"""Decides how long work waits while no teacher is live or answers, and what is logged meanwhile. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outage", "OutageStatus"]

_REMIND_S = 10.0
"""Between two warnings of an outage: often enough for a person who watches, and six lines a minute in a log."""
_SILENT_S = 5.0
"""Silence of live teachers that is worth a warning: longer than most models compute a batch."""


@dataclass(frozen=True)
class OutageStatus:
    """State of open work during an outage.

    Attributes:
        expired: whether the work has waited for too long, and fails.
        check_at: when to check again, in seconds.
        message: how long the work waits for a live teacher, in words for a person; empty without news.
        silent_s: seconds for which live teachers have not answered; 0 where that is not worth a word, or was reported.
    """

    expired: bool
    check_at: float
    message: str = ""
    silent_s: float = 0.0


class Outage:
    """Keeps track of a time without teachers, or without an answer. Every method takes the time `now` in seconds.

    Args:
        timeout_s: how long work may wait while no teacher is live.
        request_timeout_s: how much longer it may wait for an answer while a teacher is live.
    """

    def __init__(self, timeout_s: float, request_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._request_timeout_s = request_timeout_s
        self._outage_since: float | None = None
        self._reminded_at = 0.0
        self._progress_at = 0.0
        self._longest_silence_s = 0.0  # silence of live teachers that was followed by an answer, and so may be usual
        self._silence_reported = self._had_outage = False

    def start_work(self, now: float) -> None:
        """Start the clock: there is work, after a time without."""
        self._progress_at = now
        self._outage_since = None
        self._silence_reported = self._had_outage = False

    def record_answer(self, now: float) -> None:
        """Note that an answer came."""
        if not self._had_outage:
            self._longest_silence_s = max(self._longest_silence_s, now - self._progress_at)
        self._progress_at = now
        self._silence_reported = self._had_outage = False

    def finish_work(self) -> None:
        """Stop the clock: there is no work any more."""
        self._outage_since = None

    def check(self, now: float, live: int) -> OutageStatus:
        """Return the state of open work.

        Args:
            now: seconds.
            live: teachers that may be given work.
        """
        stuck_at = self._progress_at + self._timeout_s + self._request_timeout_s
        if live:
            self._outage_since = None
            silent_at = self._progress_at + max(_SILENT_S, 2 * self._longest_silence_s)
            if self._silence_reported or now < silent_at:
                return OutageStatus(now >= stuck_at, stuck_at if self._silence_reported else min(silent_at, stuck_at))
            self._silence_reported = True
            return OutageStatus(now >= stuck_at, stuck_at, silent_s=now - self._progress_at)
        self._had_outage = True
        message = ""
        if self._outage_since is None:
            self._outage_since = self._reminded_at = now
            message = f": waiting up to {self._timeout_s:g} s"
        given_up_at = min(self._outage_since + self._timeout_s, stuck_at)
        if now >= given_up_at:
            return OutageStatus(True, given_up_at, message)
        if now >= self._reminded_at + _REMIND_S:
            self._reminded_at = now
            message = f" since {now - self._outage_since:.0f} s"
        return OutageStatus(False, min(given_up_at, self._reminded_at + _REMIND_S), message)
