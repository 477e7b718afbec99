"""`Surroundings`: what the operator knows of a resource beside the resource and its pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.observation import WorkProgress
from edl.master.kube.resources import MemberOwner

__all__ = ["OwnerSurroundings", "Surroundings"]


@dataclass(frozen=True)
class OwnerSurroundings:
    """What is known of a resource beside itself; the attributes are those of `OwnerObservation`."""

    capacity: ClusterCapacity | None = None
    wanted: int | None = None
    allocation: int | None = None
    progress: WorkProgress | None = None
    store_stale: str = ""
    store_refused: str = ""
    service_holder: str = ""
    store_unreachable: str = ""


class Surroundings(Protocol):
    """Looks at stores, at idle capacity and at other jobs, for the `Reconciler`."""

    def look(self, owner: MemberOwner) -> OwnerSurroundings:
        """Return what is known now; raises an EDLError where that cannot be read just now."""

    def note_status(self, owner: MemberOwner, status: Mapping[str, Any]) -> None:
        """Note what a resource's status says now: of one that waits for room, what has become idle is told."""

    def note_gone(self, key: str) -> None:
        """Note that a resource has been deleted, and look at nothing more for it."""

    def forget(self, key: str) -> None:
        """Look at nothing more for a resource that is gone, or has ended."""
