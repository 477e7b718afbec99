"""Which Leases are over: a plain state machine, fed with what is seen of them and when. No clock of another machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edl.discovery.kubernetes.naming import ttl_of
from edl.kube.objects import Object

__all__ = ["ExpiredLease", "LeaseObservations"]


@dataclass(frozen=True)
class ExpiredLease:
    """A Lease that was not seen to change for its length.

    Attributes:
        name: of the Lease.
        uid: of the Lease.
        resource_version: that was seen last: who removes it requires that it still has this one.
    """

    name: str
    uid: str
    resource_version: str


@dataclass
class _Observation:
    lease: ExpiredLease
    ttl_s: float
    seen_s: float


class LeaseObservations:
    """What is known of Leases. A thread may note while another asks which are over.

    The holder's own clock begins when it asks for a renewal, and this one when the change is seen, later: the holder
    takes its Lease for lost first.
    """

    def __init__(self) -> None:
        self._observed: dict[str, _Observation] = {}

    def __len__(self) -> int:
        return len(self._observed)

    def note(self, lease: Object, now_s: float) -> bool:
        """Note a Lease as it is now; returns whether it is new. A Lease without a length that makes sense is none."""
        metadata = lease.get("metadata") or {}
        name, ttl_s = str(metadata.get("name") or ""), ttl_of(lease)
        seen = ExpiredLease(name, str(metadata.get("uid") or ""), str(metadata.get("resourceVersion") or ""))
        known = self._observed.get(name)
        if ttl_s is None:
            self._observed.pop(name, None)
        elif known is None or known.lease != seen:
            self._observed[name] = _Observation(seen, ttl_s, now_s)
        return known is None and ttl_s is not None

    def forget(self, name: str) -> None:
        """Note that a Lease is gone."""
        self._observed.pop(name, None)

    def replace(self, leases: Mapping[str, Object], now_s: float) -> None:
        """Note all Leases after a time in which no change could be seen: each has its whole length again."""
        for name in set(self._observed) - set(leases):
            self.forget(name)
        for lease in leases.values():
            self.note(lease, now_s)
        self.postpone(now_s)

    def postpone(self, now_s: float) -> None:
        """Give each Lease its whole length again: what was not seen does not count."""
        for known in list(self._observed.values()):
            known.seen_s = now_s

    def postpone_lease(self, name: str, now_s: float) -> None:
        """Give a Lease its whole length again: it was renewed, which was not seen yet."""
        if (known := self._observed.get(name)) is not None:
            known.seen_s = now_s

    def expired(self, now_s: float) -> list[ExpiredLease]:
        """Return the Leases that were not seen to change for their length."""
        return [known.lease for known in list(self._observed.values()) if now_s >= known.seen_s + known.ttl_s]

    def next_expiry_s(self) -> float | None:
        """Return when the next Lease is over unless it changes; None where there is none."""
        return min((known.seen_s + known.ttl_s for known in list(self._observed.values())), default=None)
