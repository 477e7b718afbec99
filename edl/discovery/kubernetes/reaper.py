"""Removing Leases that are renewed no more, and what belongs to them: a single process does it, the others stand by.

That two do it at once, or that a paused process goes on with it, does no harm: everything is removed under the
condition that it is as it was seen. Hence the Lease of the reaper needs no more than to keep most processes from
watching all renewals.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery.common.resource import Resource
from edl.discovery.kubernetes.api import KubernetesApi
from edl.discovery.kubernetes.expiry import ExpiredLease, LeaseObservations
from edl.discovery.kubernetes.naming import (
    LABEL_LAPSED,
    LABEL_LEASE,
    LEASE_OBJECTS,
    LEASED,
    LeaseRef,
    build_lease,
    is_instance,
    lease_ref_of,
    renewal_patch,
)
from edl.errors import ClosedError, ConflictError, DiscoveryError
from edl.kube.objects import Object
from edl.kube.resource_types import CONFIG_MAPS, LEASES
from edl.kube.watch import KubeWatch

__all__ = ["LeaseReaper"]

logger = logging.getLogger(__name__)

REAPER: Final = "edl-lease-reaper"
REAPER_TTL_S: Final = 3.0
"""How long the reaper may be silent before another takes over: a process that dies with it is missed so much later."""
REAPER_RENEWAL_S: Final = 1.0
"""Three in the length. Every process that stands by sees each of them."""
SWEEP_S: Final = 15.0
"""How often what belongs to no Lease is looked for: what a reaper left that died in the middle."""
REMEMBERED_S: Final = 60.0
"""How long an instance whose lease has run out is listed as lapsed: as long as Consul keeps it."""
_LATE_S: Final = 1.0
"""A step that comes so much too late missed renewals: this process was paused, and each Lease has its length again."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.2, 10.0
"""Waits after the first failure and after many: a process that may not remove anything asks six times a minute."""
_IDLE_S: Final = 30.0
"""The longest wait: changes wake."""


class LeaseReaper(Resource):
    """Campaigns for removing the Leases of a namespace that are over, and removes them while it leads.

    Args:
        api: of the store or registry; closed after this.
    """

    def __init__(self, api: KubernetesApi) -> None:
        super().__init__()
        self._api = api
        self._identity = secrets.token_hex(8)
        self._seen_s = time.monotonic()  # when the reaper's Lease was seen to change
        self._term: _Term | None = None
        self._backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S, jitter=0.5)
        self._loop: BackgroundLoop | None = None
        self._watch = self._own(
            KubeWatch(
                *(api.client, LEASES),
                field_selector=f"metadata.name={REAPER}",
                on_change=self._notice,
                length_s=60.0,
            )
        )
        self._loop = self._own(BackgroundLoop("edl-reaper", self._step))

    def _notice(self, change: str, obj: Object | None) -> None:
        self._seen_s = time.monotonic()
        if self._loop is not None and (change in ("DELETED", "LISTED") or (obj is not None and not _holder(obj))):
            self._loop.wake()

    def _step(self) -> float | None:
        try:
            wait_s = self._term.step() if self._term is not None else self._campaign()
        except ClosedError:
            return None
        except _DeposedError:
            self._end_term()
            return REAPER_RENEWAL_S
        except DiscoveryError as exc:
            logger.debug("the reaper of %s: %s", self._api.target, exc)
            if self._term is not None:
                self._term.excuse()
                if self._term.over:
                    self._end_term()
            return self._backoff.next_wait_s()
        self._backoff.reset()
        return wait_s

    def _campaign(self) -> float:
        if not self._watch.listed or self._watch.stale:
            return 0.2
        reaper = next(iter(self._watch.objects.values()), None)
        left_s = self._seen_s + REAPER_TTL_S - time.monotonic()
        if reaper is not None and _holder(reaper) and left_s > 0:
            return left_s + random.uniform(0.0, 0.5)  # not all at the same moment
        resource_version = self._take(reaper)
        if resource_version is None:
            return REAPER_RENEWAL_S
        logger.debug("removing what is over in %s", self._api.target)
        self._term = _Term(self._api, self._identity, resource_version, self._wake)
        return 0.0

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def _take(self, seen: Object | None) -> str | None:
        """Write this process into the reaper's Lease as it was seen; its new version, None where another was faster."""
        try:
            if seen is None:
                lease = build_lease(REAPER, "reaper", self._identity, REAPER_TTL_S, None)
                taken: Object | None = self._api.create(LEASES, lease)
            else:
                version = str(seen["metadata"]["resourceVersion"])
                patch = renewal_patch(secrets.randbelow(10**9), version, self._identity)
                taken = self._api.patch(LEASES, REAPER, patch)
        except ConflictError:
            return None
        return None if taken is None else str(taken["metadata"]["resourceVersion"])

    def _end_term(self) -> None:
        if self._term is not None:
            self._term.close()
            self._term = None

    def _release(self) -> None:
        """Let another take over at once."""
        term = self._term
        self._end_term()
        if term is not None:
            with contextlib.suppress(DiscoveryError, ConflictError, ClosedError):
                self._api.delete(LEASES, REAPER, resource_version=term.resource_version)


class _DeposedError(Exception):
    """Another process has taken over."""


class _Term:
    """What the reaper does while it leads: watches the Leases, and removes those that are over."""

    def __init__(self, api: KubernetesApi, identity: str, resource_version: str, wake: Callable[[], None]) -> None:
        self._api = api
        self._identity = identity
        self.resource_version = resource_version
        self._renewals = 0
        self._renewed_s = time.monotonic()
        self._wake = wake
        self._sweep_s = 0.0
        self._due_s = time.monotonic()
        self._lapsed: dict[str, float] = {}  # uid of a lapsed instance -> when it was first seen
        self._leases = LeaseObservations()
        self._relisted = False
        self._watch = KubeWatch(
            *(api.client, LEASES), label_selector=LEASE_OBJECTS, on_change=self._notice, length_s=60.0
        )

    @property
    def over(self) -> bool:
        """Whether another may have taken over."""
        return time.monotonic() >= self._renewed_s + REAPER_TTL_S

    def close(self) -> None:
        self._watch.close()

    def excuse(self) -> None:
        """Give each Lease its whole length again: who cannot be reached from here may be unable to renew as well."""
        self._leases.postpone(time.monotonic())

    def step(self) -> float:
        """Renew, remove what is over, and return how long nothing needs to be done."""
        now = time.monotonic()
        if now > self._due_s + _LATE_S:
            self._leases.postpone(now)
        if now >= self._renewed_s + REAPER_RENEWAL_S:
            self._renew()
        if self._relisted:
            self._relisted = False
            self._leases.replace({name: lease for (_, name), lease in self._watch.objects.items()}, now)
        if self._watch.listed and not self._watch.stale:
            for lease in self._leases.expired(now):
                self._remove(lease)
            if now >= self._sweep_s:
                self._sweep()
                self._sweep_s = time.monotonic() + SWEEP_S
        now = time.monotonic()
        next_s = self._leases.next_expiry_s()
        self._due_s = min(now + _IDLE_S if next_s is None else max(next_s, now), self._renewed_s + REAPER_RENEWAL_S)
        self._due_s = max(self._due_s, now)
        return self._due_s - now

    def _notice(self, change: str, obj: Object | None) -> None:
        now = time.monotonic()
        if change == "LISTED":
            self._relisted = True
            self._wake()
        elif change == "DELETED" and obj is not None:
            self._leases.forget(str(obj["metadata"]["name"]))
        elif obj is not None and self._leases.note(obj, now):
            self._wake()  # it may be shorter than the wait under way

    def _renew(self) -> None:
        self._renewals += 1
        asked = time.monotonic()
        try:
            renewed = self._api.patch(LEASES, REAPER, renewal_patch(self._renewals, self.resource_version))
        except ConflictError as exc:
            raise _DeposedError from exc
        if renewed is None:
            raise _DeposedError
        self.resource_version = str(renewed["metadata"]["resourceVersion"])
        self._renewed_s = asked

    def _remove(self, lease: ExpiredLease) -> None:
        try:
            self._api.delete(LEASES, lease.name, resource_version=lease.resource_version)
        except ConflictError:  # it was renewed, and the watch is behind
            self._leases.postpone_lease(lease.name, time.monotonic())
            return
        self._leases.forget(lease.name)
        logger.debug("lease %s of %s is over", lease.name, self._api.target)
        self._end(LeaseRef(lease.name, lease.uid))

    def _end(self, lease: LeaseRef) -> None:
        """Delete the keys of a Lease that is gone, and mark its instances."""
        selector = f"{LABEL_LEASE}={lease.name}"
        for obj in self._api.list(CONFIG_MAPS, selector, metadata_only=True):
            if lease_ref_of(obj) == lease:
                self._end_object(obj)

    def _end_object(self, obj: Object) -> None:
        metadata = obj["metadata"]
        name, version = str(metadata["name"]), str(metadata["resourceVersion"])
        labels = metadata.get("labels") or {}
        try:
            if is_instance(obj):
                if LABEL_LAPSED not in labels:
                    mark = {"resourceVersion": version, "labels": {LABEL_LAPSED: "true"}}
                    self._api.patch(CONFIG_MAPS, name, {"metadata": mark})
            else:
                self._api.delete(CONFIG_MAPS, name, resource_version=version)
        except ConflictError:
            logger.debug("%s was written meanwhile", name)  # under another lease; if not, the next sweep sees it

    def _sweep(self) -> None:
        """End what belongs to no Lease that is there, and remove instances that lapsed a while ago."""
        found = self._api.list(CONFIG_MAPS, LEASED, metadata_only=True)
        gone: dict[LeaseRef, bool] = {}
        now = time.monotonic()
        lapsed = {str(obj["metadata"]["uid"]): obj for obj in found if LABEL_LAPSED in obj["metadata"]["labels"]}
        self._lapsed = {uid: self._lapsed.get(uid, now) for uid in lapsed}
        for uid, obj in lapsed.items():
            if now >= self._lapsed[uid] + REMEMBERED_S:
                version = str(obj["metadata"]["resourceVersion"])
                with contextlib.suppress(ConflictError):
                    self._api.delete(CONFIG_MAPS, str(obj["metadata"]["name"]), resource_version=version)
        for obj in found:
            lease = lease_ref_of(obj)
            if lease is not None and str(obj["metadata"]["uid"]) not in lapsed:
                if lease not in gone:
                    gone[lease] = not self._is_there(lease)
                if gone[lease]:
                    self._end_object(obj)

    def _is_there(self, lease: LeaseRef) -> bool:
        known = self._watch.objects
        candidates: Iterator[Object] = (obj for (_, name), obj in known.items() if name == lease.name)
        if any(obj["metadata"].get("uid") == lease.uid for obj in candidates):
            return True
        found = self._api.get(LEASES, lease.name)  # the watch may be behind
        return found is not None and found["metadata"].get("uid") == lease.uid


def _holder(lease: Object | None) -> str:
    return str(((lease or {}).get("spec") or {}).get("holderIdentity") or "")
