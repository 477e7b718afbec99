"""`WaitingOwners`: the resources that want more members than there are, and for which of them there is room now."""

from __future__ import annotations

import math
import threading
from typing import Final

from edl.master.kube.capacity import ClusterCapacity, PodClaim
from edl.master.kube.resources import MemberOwner

__all__ = ["WaitingOwners"]

_QUIET_S: Final = 10.0
"""Between two looks at a resource for this reason: room that comes and goes is not worth a look each."""


class WaitingOwners:
    """Finds those that should be looked at as room comes for a pod of theirs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[str, PodClaim] = {}
        self._room: dict[str, int] = {}
        self._told_s: dict[str, float] = {}

    def observe(self, owner: MemberOwner, capacity: ClusterCapacity | None) -> None:
        """Note what a resource is planned by now: of more room than that it is to hear."""
        claim = _read_claim(owner)
        room = 0 if capacity is None or claim is None else _count_room(claim, capacity)
        with self._lock:
            self._room[owner.key] = room

    def note(self, owner: MemberOwner, waits: bool) -> None:
        """Note whether a resource wants more members than it has."""
        claim = _read_claim(owner) if waits else None
        with self._lock:
            if claim is not None:
                self._claims[owner.key] = claim
            else:
                self._claims.pop(owner.key, None)

    def forget(self, key: str) -> None:
        """Drop a resource."""
        with self._lock:
            self._claims.pop(key, None)
            self._room.pop(key, None)
            self._told_s.pop(key, None)

    def find_due(self, capacity: ClusterCapacity, now_s: float) -> tuple[list[str], float | None]:
        """Find whom to look at, since there is room for more of its pods.

        Returns:
            Keys; and seconds until the next may be looked at for which there is more room, None for no such.
        """
        with self._lock:
            claims = dict(self._claims)
        rooms: dict[str, int] = {}  # by shape: many resources have the same template
        due, waits_s = [], []
        for key, claim in claims.items():
            if claim.shape not in rooms:
                rooms[claim.shape] = _count_room(claim, capacity)
            room = rooms[claim.shape]
            with self._lock:
                before = self._room.get(key, 0)
                if room < before:
                    self._room[key] = room
                elif room > before and key in self._claims:
                    left_s = self._told_s.get(key, -math.inf) + _QUIET_S - now_s
                    if left_s > 0:
                        waits_s.append(left_s)
                        continue
                    self._room[key], self._told_s[key] = room, now_s
                    due.append(key)
        return due, min(waits_s, default=None)


def _read_claim(owner: MemberOwner) -> PodClaim | None:
    """Return what a pod of a resource asks for; None of a template that the API server refuses in its own words.

    The planner, which knows of nodes left out and of memory that was raised, may find less room.
    """
    try:
        return PodClaim.of(owner.template)
    except ValueError:
        return None


def _count_room(claim: PodClaim, capacity: ClusterCapacity) -> int:
    try:
        return capacity.count_fitting(claim)
    except ValueError:
        return 0
