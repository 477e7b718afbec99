"""How long work waits while no teacher is live, or none answers, and what is said meanwhile: decisions without I/O."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outage", "OutageStatus"]

_REMIND_S = 10.0
_SILENT_S = 5.0


@dataclass(frozen=True)
class OutageStatus:
    """What follows for the work that is open.

    Attributes:
        over: it has waited for too long, and fails.
        look_at: when to look again, if it has not.
        say: how long it waits for a live teacher, in words for a person; empty where there is nothing new to say.
        silent_s: for how long there are live teachers and none answers; 0 where it is not worth a word, or was said.
    """

    expired: bool
    check_at: float
    message: str = ""
    silent_s: float = 0.0


class Outage:
    """Keeps track of a time without teachers, or without an answer. Every method takes the time `now` in seconds.

    Args:
        timeout_s: how long work may wait while no teacher is live.
        request_timeout_s: how much longer it may wait for an answer while one is.
    """

    def __init__(self, timeout_s: float, request_timeout_s: float) -> None:
        self._timeout_s, self._request_timeout_s = timeout_s, request_timeout_s
        self._outage_since: float | None = None
        self._reminded_at = 0.0
        self._progress_at = 0.0
        self._longest_silence_s = 0.0  # silence of live teachers that was followed by an answer, and so may be usual
        self._silence_reported = self._had_outage = False

    def start_work(self, now: float) -> None:
        """There is work, after a time without."""
        self._progress_at, self._outage_since = now, None
        self._silence_reported = self._had_outage = False

    def record_answer(self, now: float) -> None:
        """An answer came."""
        if not self._had_outage:
            self._longest_silence_s = max(self._longest_silence_s, now - self._progress_at)
        self._progress_at = now
        self._silence_reported = self._had_outage = False

    def finish_work(self) -> None:
        """There is no work any more."""
        self._outage_since = None

    def check(self, now: float, live: int) -> OutageStatus:
        """What follows for open work, with so many live teachers."""
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
