"""What a watcher believes of a service: a plain state machine, fed with answers and failures."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from edl.discovery.registry import Instance, Rejected, Snapshot

__all__ = ["ServiceView", "build_snapshot"]

log = logging.getLogger("edl.discovery")


def build_snapshot(
    service: str, found: Iterable[Instance | Rejected], lapsed: Iterable[Instance | Rejected] = ()
) -> Snapshot:
    """Sort what a registry holds into a snapshot. Of two with the same id the later counts: it registered last.

    Args:
        service: its name.
        found: whose lease is kept.
        lapsed: whose lease has run out. An instance that was draining has left, and nonsense that lapsed is dropped.
    """
    newest = {entry.id: entry for entry in found}
    by_id = [newest[key] for key in sorted(newest)]
    over = {entry.id: entry for entry in lapsed if entry.id not in newest}
    over_by_id = [over[key] for key in sorted(over)]
    return Snapshot(
        service,
        tuple(entry for entry in by_id if isinstance(entry, Instance)),
        tuple(entry for entry in by_id if isinstance(entry, Rejected)),
        lapsed=tuple(entry for entry in over_by_id if isinstance(entry, Instance) and entry.state == "ready"),
    )


class ServiceView:
    """Turns a registry's answers and failures into the snapshots that a watcher hands out.

    While the registry cannot be reached the last known instances stay. A registry that comes back may have lost its
    memory, or take all leases for lapsed, until they are renewed: an instance that is missing in the first `settle_s`
    stays as well, and the snapshot is marked stale, so that a restart of the registry does not make every student drop
    its teachers.
    """

    def __init__(self, service: str, settle_s: float = 5.0) -> None:
        self._service = service
        self._settle_s = settle_s
        self._last = Snapshot(service, ())
        self._failing = False
        self._settled_at: float | None = None
        self._logged: set[Rejected] = set()

    @property
    def recheck_at(self) -> float | None:
        """When to ask again although nothing changed, None for never; the clock is that of `now` below."""
        return self._settled_at if self._last.stale else None

    def answered(self, snapshot: Snapshot, now: float) -> Snapshot:
        """Return what to hand out now that the registry has answered."""
        self._log_rejected(snapshot.rejected)
        if self._failing:
            self._failing = False
            self._settled_at = now + self._settle_s
            log.info("service %s: the registry answers again", self._service)
        if self._settled_at is not None and now >= self._settled_at:
            self._settled_at = None
        self._last = snapshot if self._settled_at is None else self._with_missing(snapshot)
        return self._last

    def failed(self, reason: str) -> Snapshot:
        """Return what to hand out now that the registry did not answer."""
        if not self._failing:
            self._failing = True
            self._settled_at = None
            known = len(self._last.instances)
            what = f"keeping the last known {known}" if known else "nobody is known yet"
            log.warning("service %s: %s: %s", self._service, what, reason)
        self._last = replace(self._last, stale=reason)
        return self._last

    def _with_missing(self, snapshot: Snapshot) -> Snapshot:
        present = {entry.id for entry in snapshot.instances} | {entry.id for entry in snapshot.rejected}
        missing = [entry for entry in self._last.instances if entry.id not in present]
        if not missing:
            return snapshot
        kept = {entry.id for entry in missing}
        return Snapshot(
            self._service,
            tuple(sorted((*snapshot.instances, *missing), key=lambda entry: entry.id)),
            snapshot.rejected,
            stale=f"the registry was away and came back without {len(missing)} instances: waiting for their return",
            lapsed=tuple(entry for entry in snapshot.lapsed if entry.id not in kept),
        )

    def _log_rejected(self, rejected: tuple[Rejected, ...]) -> None:
        for entry in rejected:
            if entry not in self._logged:
                log.warning("service %s: registration %s is left out: %s", self._service, entry.id, entry.reason)
        self._logged = set(rejected)
