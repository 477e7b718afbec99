"""When sessions and leases end: a clock that stands still while the process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["LeaseClock", "SessionLimits"]

TICK_S: Final = 0.25
"""How often the server looks for what is over."""
PAUSE_S: Final = 1.0
"""A look that comes so late says that the process stood still. What workers sent meanwhile was not read, so a pause
counts for no more than this."""


@dataclass(frozen=True)
class SessionLimits:
    """How long a session may be silent.

    Attributes:
        lease_s: after so long its leases end.
        session_s: after so long it ends itself.
    """

    lease_s: float
    session_s: float


class LeaseClock:
    """Knows when each session was heard last, and which of them have been silent for too long.

    Args:
        monotonic: a clock in seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._seen = monotonic()
        self._now = 0.0
        self._heard: dict[str, float] = {}
        self._limits: dict[str, SessionLimits] = {}
        self._lease_ended: set[str] = set()

    def watch(self, session: str, limits: SessionLimits) -> None:
        """Begin to count for a session, as heard at this moment."""
        self._limits[session] = limits
        self.hear(session)

    def is_watched(self, session: str) -> bool:
        """Return whether the clock counts for a session."""
        return session in self._limits

    def forget(self, session: str) -> None:
        """Count no longer for a session."""
        self._limits.pop(session, None)
        self._heard.pop(session, None)
        self._lease_ended.discard(session)

    def hear(self, session: str) -> None:
        """Note a sign of life of a session. Of one that is not watched nothing is kept."""
        if session in self._limits:
            self._heard[session] = self._now
        if self._lease_ended:
            self._lease_ended.discard(session)

    def silence_s(self, session: str) -> float:
        """Return for how long a session was silent, as of the last look."""
        return self._now - self._heard.get(session, self._now)

    def due(self) -> tuple[list[str], list[str]]:
        """Advance the clock.

        Returns:
            Sessions whose leases have ended since the last look, and sessions that have ended.
        """
        at = self._monotonic()
        self._now += min(at - self._seen, PAUSE_S)
        self._seen = at
        silent: list[str] = []
        over: list[str] = []
        for session, limits in self._limits.items():
            silence_s = self.silence_s(session)
            if silence_s > limits.session_s:
                over.append(session)
            elif silence_s > limits.lease_s and session not in self._lease_ended:
                silent.append(session)
        self._lease_ended.update(silent)
        return silent, over
