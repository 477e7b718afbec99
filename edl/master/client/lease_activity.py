"""When a reader's caller last did something with each of its shards."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

__all__ = ["IdleLeases", "LeaseActivity"]


@dataclass(frozen=True)
class IdleLeases:
    """Leases that the session would renew for ever, and that are for others now.

    Attributes:
        held: of shards that the caller has taken, and neither reported nor gone on with.
        unused: of shards at hand that the caller has not taken.
    """

    held: Sequence[int]
    unused: Sequence[int]


@dataclass(slots=True)
class _Entry:
    touched_at: float
    held: bool = False
    shown: bool = False


class LeaseActivity:
    """The activity on leases that were given and not reported. Pure: the clock is the caller's.

    Locks nothing: callers and the reader's thread use single operations of a dict.

    Args:
        idle_s: a lease without activity is idle after so long.
    """

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self._entries: dict[int, _Entry] = {}

    def give(self, lease: int, now: float) -> None:
        """Note that the master gave a lease."""
        self._entries[lease] = _Entry(now)

    def touch(self, lease: int, now: float) -> None:
        """Note that the caller took a shard, or went on with it."""
        entry = self._entries.get(lease)
        if entry is not None:
            entry.touched_at = now
            entry.held = True

    def remove(self, lease: int) -> None:
        """Note that a lease was reported."""
        self._entries.pop(lease, None)

    def clear(self) -> None:
        """Forget all: the session has ended."""
        self._entries.clear()

    def idle(self, now: float) -> IdleLeases:
        """Return the leases that have been idle for too long."""
        idle = [(lease, entry) for lease, entry in list(self._entries.items()) if now > entry.touched_at + self.idle_s]
        return IdleLeases(
            [lease for lease, entry in idle if entry.held], [lease for lease, entry in idle if not entry.held]
        )

    def newly_quiet(self, now: float, quiet_s: float, shards: Container[int]) -> list[int]:
        """Return leases among `shards` that the caller has left alone for `quiet_s`, each of them once."""
        found = [
            (lease, entry)
            for lease, entry in list(self._entries.items())
            if entry.held and not entry.shown and now > entry.touched_at + quiet_s and lease in shards
        ]
        for _, entry in found:
            entry.shown = True
        return [lease for lease, _ in found]
