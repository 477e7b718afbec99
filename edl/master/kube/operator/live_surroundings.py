"""`LiveSurroundings`: stores, idle capacity and the shares of jobs, as they are now."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.master.kube.capacity import ClusterCapacity
from edl.master.kube.jobs import find_final_phase
from edl.master.kube.observation import OwnerObservation, StoreAnswer
from edl.master.kube.operator.job_shares import SharingJob, compute_shares, read_sharing_job
from edl.master.kube.operator.service_holders import ServiceHolders
from edl.master.kube.operator.store_allowlist import StoreAllowlist
from edl.master.kube.operator.stores import OwnerKeyCleanup, StoreDirectory
from edl.master.kube.operator.waiting_owners import WaitingOwners
from edl.master.kube.resources import ElasticJob, MemberOwner, TeacherPool

__all__ = ["LiveSurroundings"]

logger = logging.getLogger(__name__)

_SPREAD_S: Final = 1.0
"""Between two looks at changed capacity: pods change many times a second, and each look may start others."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class LiveSurroundings:
    """Looks at all that is beside resources and pods. Thread-safe.

    Args:
        on_key: called with the key of a resource that should be looked at.
        allowlist: which stores may be opened.
        has_pods: whether pods of an owner are there, by namespace and uid; asks the API server.
        list_pools: returns the pools of a namespace; asks the API server.
        namespaces: that are worked on.
    """

    def __init__(
        self,
        on_key: Callable[[str], None],
        allowlist: StoreAllowlist,
        has_pods: Callable[[str, str], bool] = lambda namespace, uid: True,
        list_pools: Callable[[str], Sequence[TeacherPool]] = lambda namespace: (),
        namespaces: Sequence[str] = (),
    ) -> None:
        self._on_key = on_key
        self._cleanup = OwnerKeyCleanup(has_pods, lambda url: not allowlist.find_refusal(url))
        self._stores = StoreDirectory(on_key, allowlist)
        self._get_capacity: Callable[[], ClusterCapacity | None] = lambda: None
        self._lock = threading.Lock()
        self._sharing: dict[str, SharingJob] = {}
        self._shares: Mapping[str, int] = {}
        self._services = ServiceHolders(on_key, list_pools, namespaces)
        self._waiting = WaitingOwners()
        self._computing = threading.Lock()
        self._looked_s = 0.0
        self._changed = False
        self._loop = BackgroundLoop("edl-operator-shares", self._step)

    def set_capacity(self, get_capacity: Callable[[], ClusterCapacity | None]) -> None:
        """Take what is idle from a source, which calls `note_capacity` when it knows something new."""
        self._get_capacity = get_capacity
        self.note_capacity()

    def note_capacity(self) -> None:
        """Note that what is idle has changed. Returns at once."""
        self._changed = True
        self._loop.wake()

    def look(self, owner: MemberOwner) -> OwnerObservation:
        """Return what is known now beside the resource's pods; lists all pools before the first answer on a pool.

        Raises:
            EDLError: pools cannot be listed just now.
        """
        if isinstance(owner, ElasticJob | TeacherPool):
            self._cleanup.note(owner)
        if isinstance(owner, ElasticJob) and find_final_phase(owner):
            self.forget(owner.key)
            return OwnerObservation()
        answer = self._ask_store(owner)
        capacity = self._get_capacity()
        self._waiting.observe(owner, capacity)
        allocation = None
        if isinstance(owner, ElasticJob):
            remaining_s = answer.progress.remaining_s if answer.progress is not None else None
            allocation = self._share(owner, answer.wanted, remaining_s, capacity)
        holder = self._find_holder(owner) if isinstance(owner, TeacherPool) else ""
        return OwnerObservation(capacity=capacity, store=answer, allocation=allocation, service_holder=holder)

    def note_status(self, owner: MemberOwner, status: Mapping[str, Any]) -> None:
        """Note whether a resource waits for room, to look at it when more is idle. What has ended leaves its share."""
        if status.get("phase") in _ENDED:
            self.forget(owner.key)
            return
        wanted, there = status.get("wantedReplicas"), status.get("replicas")
        waits = isinstance(wanted, int) and isinstance(there, int) and wanted > there
        self._waiting.note(owner, waits)

    def note_gone(self, key: str) -> None:
        """Note that a resource has been deleted: what it left in its store goes when its pods have."""
        self._cleanup.note_gone(key)
        self.forget(key)

    def forget(self, key: str) -> None:
        """Look at nothing more for a resource that is gone, or has ended."""
        self._stores.forget(key)
        self._waiting.forget(key)
        with self._lock:
            shared = self._sharing.pop(key, None)
        self._services.forget(key)
        if shared is not None:
            self.note_capacity()  # what it had is the others'

    def close(self) -> None:
        """Look no more, and close all stores."""
        self._loop.close()
        self._cleanup.close()
        self._stores.close()

    def _find_holder(self, pool: TeacherPool) -> str:
        """Return the pool of another namespace whose service this is; note how many GPUs the pool lends."""
        before = self._services.get_pool(pool.key)
        holder = self._services.find_holder(pool)
        if before is None or before.min_replicas != pool.min_replicas:
            self.note_capacity()  # what it lends is shared among jobs
        return holder

    def _ask_store(self, owner: MemberOwner) -> StoreAnswer:
        if isinstance(owner, ElasticJob):
            answer = self._stores.ask(owner.key, owner.store, "workers", owner.job_id, namespace=owner.namespace)
            # Of a job whose master the operator keeps alive, what was wanted last is the best that is known.
            return answer if owner.master.enabled or not answer.silent else replace(answer, wanted=None)
        if isinstance(owner, TeacherPool):
            advised = owner.scaling == "auto" and not owner.suspend
            return self._stores.ask(
                owner.key, owner.store, "teachers", owner.service, namespace=owner.namespace, advised=advised
            )
        raise TypeError(f"{type(owner).__name__} is neither job nor pool")

    def _share(
        self, job: ElasticJob, wanted: int | None, remaining_s: int | None, capacity: ClusterCapacity | None
    ) -> int | None:
        sharing = read_sharing_job(job, wanted, remaining_s)
        with self._lock:
            before = self._sharing.pop(job.key, None)
            if sharing is None:
                return None
            self._sharing[job.key] = sharing
            known = self._shares.get(job.key)
        if capacity is None:
            return None
        if known is not None and before == sharing:
            return known
        return self._recompute(but=job.key).get(job.key)

    def _step(self) -> float | None:
        now_s = time.monotonic()
        if not self._changed:
            return 60.0
        if now_s - self._looked_s < _SPREAD_S:
            return _SPREAD_S - (now_s - self._looked_s)
        self._looked_s = now_s
        self._changed = False
        capacity = self._get_capacity()
        if capacity is None:
            with self._computing, self._lock:
                self._shares = {}
            return 0.0
        self._recompute()
        due, wait_s = self._waiting.find_due(capacity, now_s)
        for key in due:
            self._on_key(key)
        if wait_s is None:
            return 0.0
        self._changed = True
        return wait_s

    def _recompute(self, but: str = "") -> Mapping[str, int]:
        """Share anew, and have all other jobs looked at whose share has changed; return the shares.

        One thread at a time, each by what is known then: a thread that began earlier would write over newer shares.
        """
        with self._computing:
            capacity = self._get_capacity()
            found = [pool for pool in self._services.get_pools() if pool.scale_target_ref is None]
            pools = {pool.uid: pool.min_replicas for pool in found}
            with self._lock:
                jobs = list(self._sharing.values())
            shares = compute_shares(capacity, jobs, pools) if jobs and capacity is not None else {}
            with self._lock:
                before, self._shares = self._shares, shares
        for key, count in shares.items():
            if key != but and before.get(key) != count:
                self._on_key(key)
        return shares
