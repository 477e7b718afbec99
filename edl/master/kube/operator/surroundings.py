"""`LiveSurroundings` knows everything outside a resource and its pods: stores, idle capacity, and the jobs' shares.

Arbitration limits how far jobs with GPUs grow. The scheduler places the pods of the jobs' minima, but once a job has
waited too long, no other job with the same priority class starts before it. Jobs controlled by Kueue, a gang scheduler
(Volcano, KAI) or `/scale` take no part, and their GPUs are not shared.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.errors import AccessDeniedError
from edl.master.kube.capacity import GPU, ONE, ClusterCapacity, PodClaim
from edl.master.kube.jobs import find_final_phase, find_waiting_since_s, shares_cluster
from edl.master.kube.members.pods import OWNER_UID_LABEL, POOL_LABEL, ROLE_LABEL, MemberPod, get_mapping, get_text
from edl.master.kube.observation import OwnerObservation, StoreAnswer
from edl.master.kube.operator.owner_keys import OwnerKeyCleanup
from edl.master.kube.operator.stores import StoreAllowlist, StoreDirectory
from edl.master.kube.pools.pool_status import hash_place, list_places
from edl.master.kube.resources import ElasticJob, MemberOwner, TeacherPool
from edl.master.scaling.allocation_plan import JobRequest
from edl.master.scaling.arbitration import PATIENCE_S, arbitrate

logger = logging.getLogger(__name__)


_RETRY_S: Final = 60.0  # for a forbidden namespace: once it is allowed, its watch tells of the pools sooner


class ServiceHolders:
    """Finds the pool that holds a service: the oldest pool whose spec or outdated teachers use it. Thread-safe.

    The pools in each namespace are listed before the first answer. Otherwise, a new operator would assume that the
    first pool it sees is the only pool, and create teachers with the wrong model. A namespace that the operator may not
    read is retried later.
    """

    def __init__(
        self,
        on_key: Callable[[str], None],
        list_pools: Callable[[str], Sequence[TeacherPool]],
        namespaces: Sequence[str],
    ) -> None:
        self._on_key = on_key
        self._list_pools = list_pools
        self._listing = threading.Lock()
        self._unlisted = dict.fromkeys(namespaces, 0.0)
        self._lock = threading.Lock()
        self._pools: dict[str, TeacherPool] = {}

    def get_pool(self, key: str) -> TeacherPool | None:
        with self._lock:
            return self._pools.get(key)

    def get_pools(self) -> list[TeacherPool]:
        with self._lock:
            return list(self._pools.values())

    def find_holder(self, pool: TeacherPool) -> str:
        """Return the key of another pool that holds this pool's service, or ""; EDLError if pools cannot be listed."""
        self._list_unlisted()
        with self._lock:
            before = self._pools.get(pool.key)
            self._pools[pool.key] = pool
            place, others = hash_place(pool), self._list_others(pool)
            rivals = [other for other in others if place in list_places(other)]
            changed = list_places(pool) ^ (list_places(before) if before is not None else frozenset())
        self._wake(others, changed)
        holder = min((pool, *rivals), key=lambda other: (other.created_s, other.key))
        return "" if holder is pool else holder.key

    def forget(self, key: str) -> None:
        with self._lock:
            pool = self._pools.pop(key, None)
            others = self._list_others(pool) if pool is not None else []
        if pool is not None:
            self._wake(others, list_places(pool))

    def _list_unlisted(self) -> None:
        with self._listing:
            for namespace, due_s in list(self._unlisted.items()):
                if time.monotonic() < due_s:
                    continue
                try:
                    found = self._list_pools(namespace)
                except AccessDeniedError:
                    self._unlisted[namespace] = time.monotonic() + _RETRY_S
                    continue
                del self._unlisted[namespace]
                with self._lock:
                    added = [pool for pool in found if pool.key not in self._pools]
                    self._pools.update((pool.key, pool) for pool in added)
                for pool in added:
                    self._on_key(pool.key)  # which finds out whether it is gone

    def _list_others(self, pool: TeacherPool) -> list[TeacherPool]:
        return [other for other in self._pools.values() if other.namespace != pool.namespace]

    def _wake(self, others: Sequence[TeacherPool], places: frozenset[str]) -> None:
        for other in others:
            if hash_place(other) in places:
                self._on_key(other.key)


_MOST_ROUNDS: Final = 8  # successive arbitrations, each continuing where the previous one ran out of steps


@dataclass(frozen=True)
class SharingJob:
    """A job for arbitration. `claim` is the claim of one worker; `most` is how many workers the job can use.

    `remaining_s` is the remaining time with the present number of workers. `waiting_since_s` is the Unix time since
    which the job has waited for GPUs for its minimum.
    """

    key: str
    uid: str
    least: int
    most: int
    claim: PodClaim
    submitted_s: float
    remaining_s: int | None = None
    priority_class: str = ""
    waiting_since_s: float | None = None

    @property
    def gpus(self) -> int:
        return self.claim.requests.get(GPU, 0) // ONE


@dataclass(frozen=True)
class JobShare:
    """How many workers a job may have, and which job must start first after waiting too long; empty for none."""

    workers: int
    starts_after: str = ""


def read_sharing_job(
    job: ElasticJob, wanted: int | None = None, remaining_s: int | None = None, pods: Iterable[MemberPod] = ()
) -> SharingJob | None:
    """Return a job for arbitration; None if it takes no part."""
    if job.scaling != "auto" or job.suspend or not shares_cluster(job):
        return None
    if find_final_phase(job):
        return None
    claim = _read_claim(job)
    if claim is None or claim.requests.get(GPU, 0) < ONE:
        return None
    most = job.max_replicas if wanted is None else max(job.min_replicas, min(job.max_replicas, wanted))
    return SharingJob(
        job.key,
        job.uid,
        job.min_replicas,
        most,
        claim,
        job.created_s,
        remaining_s,
        job.priority_class_name or get_text(get_mapping(job.template, "spec"), "priorityClassName"),
        find_waiting_since_s(job, pods),
    )


def compute_shares(
    capacity: ClusterCapacity,
    jobs: Sequence[SharingJob],
    pools: Mapping[str, int] = MappingProxyType({}),
    now_s: float = 0.0,
) -> Mapping[str, JobShare]:
    """Return how many workers each job may have, by its key.

    All jobs count as old, because the arbiter would take pods that wait for a node away from young jobs. `pools` maps
    the uid of each pool that lends teachers to the number of teachers that the pool keeps. A job that waits for its
    minimum holds other jobs back only if its workers could start on an empty cluster (the arbiter does not know which
    nodes these workers may use). It holds back only jobs with its own priority class (the scheduler orders the classes
    itself).
    """
    workers: dict[str, list[PodClaim]] = {job.uid: [] for job in jobs}
    for pod in capacity.pods:
        owner = pod.labels.get(OWNER_UID_LABEL, "")
        if owner in workers and pod.labels.get(ROLE_LABEL) == "worker" and not pod.ended:
            workers[owner].append(pod)
    classes = {job.priority_class: pod.priority or 0 for job in jobs for pod in workers[job.uid]}
    priorities = {
        job.uid: max((pod.priority or 0 for pod in workers[job.uid]), default=classes.get(job.priority_class, 0))
        for job in jobs
    }
    lent = _find_lent(capacity, pools, min(priorities.values(), default=0))
    own = {pod.uid for pods in workers.values() for pod in pods}
    lent |= own
    nodes = capacity.list_gpus(lambda pod: pod.uid in lent, lambda pod: pod.uid in own)
    emptied = capacity.without(lent) if any(job.waiting_since_s is not None for job in jobs) else capacity
    requests, placements = [], {}
    for job in jobs:
        pods = workers[job.uid]
        placements[job.key] = Counter(pod.node for pod in pods if pod.node)
        there = placements[job.key].total()
        waited_s = 0.0 if job.waiting_since_s is None else max(0.0, now_s - job.waiting_since_s)
        if waited_s and (emptied.count_fitting(job.claim) or 0) < job.least:
            waited_s = 0.0
        requests.append(
            JobRequest(
                name=job.key,
                min_workers=job.least,
                max_workers=job.most,
                gpus=job.gpus,
                priority=priorities[job.uid],
                submitted_s=job.submitted_s,
                remaining=None if job.remaining_s is None or not there else float(job.remaining_s * there),
                waited_s=waited_s,
            )
        )
    allocation = arbitrate(nodes, requests, placements)
    first_of = allocation.held_back
    for _ in range(_MOST_ROUNDS):
        if allocation.settled:
            break
        allocation = arbitrate(nodes, requests, allocation.placements)  # it ran out of steps before it was done
    known = {job.key: job for job in jobs}
    held_back = {
        key: first
        for key, first in first_of.items()
        if known[key].priority_class == known[first].priority_class and not allocation.count_workers(key)
    }
    return {key: JobShare(allocation.count_workers(key), held_back.get(key, "")) for key in known}


def _find_lent(capacity: ClusterCapacity, pools: Mapping[str, int], priority: int) -> frozenset[str]:
    """Return the uids of teachers whose places workers can take: the scheduler preempts only pods of lower priority."""
    teachers: dict[str, list[PodClaim]] = {uid: [] for uid in pools}
    for pod in capacity.pods:
        owner = pod.labels.get(OWNER_UID_LABEL, "")
        if owner in teachers and POOL_LABEL in pod.labels and not pod.ended:
            teachers[owner].append(pod)
    lent: set[str] = set()
    for uid, pods in teachers.items():
        pods.sort(key=lambda pod: (not pod.node, pod.deleting, pod.created, pod.name))
        lent |= {pod.uid for pod in pods[pools[uid] :] if (pod.priority or 0) < priority}
    return frozenset(lent)


_QUIET_S: Final = 10.0
"""Shortest time between two reconciliations of a resource because of new room: room may appear and vanish often."""


class WaitingOwners:
    """Finds resources that must be reconciled because there is room for more of their pods. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[str, PodClaim] = {}
        self._room: dict[str, int] = {}
        self._told_s: dict[str, float] = {}

    def observe(self, owner: MemberOwner, capacity: ClusterCapacity | None) -> None:
        """Record the capacity on which a resource's plan is based."""
        claim = _read_claim(owner)
        with self._lock:
            self._room[owner.key] = _count_room(claim, capacity)

    def note(self, owner: MemberOwner, waits: bool) -> None:
        """Record whether a resource wants more members than it has."""
        claim = _read_claim(owner) if waits else None
        with self._lock:
            self._claims.pop(owner.key, None)
            if claim is not None:
                self._claims[owner.key] = claim

    def forget(self, key: str) -> None:
        with self._lock:
            for known in (self._claims, self._room, self._told_s):
                known.pop(key, None)

    def find_due(self, capacity: ClusterCapacity, now_s: float) -> tuple[list[str], float | None]:
        """Return the keys of resources that now have room, and in how many seconds the next resource may be due."""
        with self._lock:
            claims = dict(self._claims)
        shapes = {claim.shape: claim for claim in claims.values()}  # many resources have the same template
        counts = {shape: _count_room(claim, capacity) for shape, claim in shapes.items()}
        due, waits_s = [], []
        with self._lock:
            for key in claims.keys() & self._claims.keys():
                room, before = counts[claims[key].shape], self._room.get(key, 0)
                left_s = self._told_s.get(key, -math.inf) + _QUIET_S - now_s
                if room > before and left_s > 0:
                    waits_s.append(left_s)
                    continue
                self._room[key] = room
                if room > before:
                    self._told_s[key] = now_s
                    due.append(key)
        return due, min(waits_s, default=None)


def _count_room(claim: PodClaim | None, capacity: ClusterCapacity | None) -> int:
    return 0 if claim is None or capacity is None else capacity.count_fitting(claim) or 0


def _read_claim(owner: MemberOwner) -> PodClaim | None:
    """Return the claim of a resource's pod; None if the template is invalid, which the API server will report."""
    try:
        return PodClaim.of(owner.template)
    except ValueError:
        return None


_SPREAD_S: Final = 1.0
"""Shortest time between checks of changed capacity: pods change many times a second, and a check may trigger more."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class LiveSurroundings:
    """Knows everything outside resources and their pods; calls `on_key` to request reconciliations. Thread-safe."""

    def __init__(
        self,
        on_key: Callable[[str], None],
        allowlist: StoreAllowlist,
        has_pods: Callable[[str, str], bool] = lambda namespace, uid: True,
        list_pools: Callable[[str], Sequence[TeacherPool]] = lambda namespace: (),
        namespaces: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._on_key = on_key
        self._clock = clock
        self._cleanup = OwnerKeyCleanup(has_pods, lambda url: not allowlist.find_refusal(url))
        self._stores = StoreDirectory(on_key, allowlist)
        self._get_capacity: Callable[[], ClusterCapacity | None] = lambda: None
        self._lock = threading.Lock()
        self._sharing: dict[str, SharingJob] = {}
        self._shares: Mapping[str, JobShare] = {}
        self._computed_s = 0.0
        self._services = ServiceHolders(on_key, list_pools, namespaces)
        self._waiting = WaitingOwners()
        self._computing = threading.Lock()
        self._looked_s = 0.0
        self._changed = False
        self._loop = BackgroundLoop("edl-operator-shares", self._step)

    def set_capacity(self, get_capacity: Callable[[], ClusterCapacity | None]) -> None:
        """Set the source of idle capacity, which calls `note_capacity` when it changes."""
        self._get_capacity = get_capacity
        self.note_capacity()

    def note_capacity(self) -> None:
        """Record that idle capacity has changed. Returns at once."""
        self._changed = True
        self._loop.wake()

    def look(self, owner: MemberOwner, pods: Iterable[MemberPod] = ()) -> OwnerObservation:
        """Return a resource's observation; the caller adds time and pods. EDLError if pools cannot be listed now."""
        assert isinstance(owner, ElasticJob | TeacherPool)
        self._cleanup.note(owner)
        if isinstance(owner, ElasticJob) and find_final_phase(owner):
            self.forget(owner.key)
            return OwnerObservation()
        answer = self._ask_store(owner)
        capacity = self._get_capacity()
        self._waiting.observe(owner, capacity)
        share = None
        if isinstance(owner, ElasticJob):
            remaining_s = answer.progress.remaining_s if answer.progress is not None else None
            share = self._share(owner, read_sharing_job(owner, answer.wanted, remaining_s, pods), capacity)
        holder = self._find_holder(owner) if isinstance(owner, TeacherPool) else ""
        found = OwnerObservation(capacity=capacity, store=answer, service_holder=holder)
        return found if share is None else replace(found, allocation=share.workers, starts_after=share.starts_after)

    def note_status(self, owner: MemberOwner, status: Mapping[str, Any]) -> None:
        """Record whether a resource waits for room; an ended job gives up its share."""
        if status.get("phase") in _ENDED:
            self.forget(owner.key)
            return
        wanted, there = status.get("wantedReplicas"), status.get("replicas")
        waits = isinstance(wanted, int) and isinstance(there, int) and wanted > there
        self._waiting.note(owner, waits)

    def note_gone(self, key: str) -> None:
        """Record that a resource was deleted: its keys in its store are deleted once its pods are gone."""
        self._cleanup.note_gone(key)
        self.forget(key)

    def forget(self, key: str) -> None:
        self._stores.forget(key)
        self._waiting.forget(key)
        with self._lock:
            shared = self._sharing.pop(key, None)
        self._services.forget(key)
        if shared is not None:
            self.note_capacity()  # other jobs get its share

    def close(self) -> None:
        self._loop.close()
        self._cleanup.close()
        self._stores.close()

    def _find_holder(self, pool: TeacherPool) -> str:
        """Return the pool that holds `pool`'s service in another namespace; note a change of what `pool` lends."""
        before = self._services.get_pool(pool.key)
        holder = self._services.find_holder(pool)
        if before is None or before.min_replicas != pool.min_replicas:
            self.note_capacity()  # jobs share what it lends
        return holder

    def _ask_store(self, owner: ElasticJob | TeacherPool) -> StoreAnswer:
        ask = functools.partial(self._stores.ask, owner.key, owner.store, namespace=owner.namespace)
        if isinstance(owner, TeacherPool):
            return ask("teachers", owner.service, advised=owner.scaling == "auto" and not owner.suspend)
        answer = ask("workers", owner.job_id)
        # If the operator keeps the job's master alive, the last wanted number is the best estimate.
        return answer if owner.master.enabled or not answer.silent else replace(answer, wanted=None)

    def _share(self, job: ElasticJob, sharing: SharingJob | None, capacity: ClusterCapacity | None) -> JobShare | None:
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
        self._changed = self._changed or self._has_lost_patience()
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

    def _has_lost_patience(self) -> bool:
        """Whether a job has begun to hold other jobs back since the shares were computed."""
        with self._lock:
            since = [job.waiting_since_s for job in self._sharing.values() if job.waiting_since_s is not None]
        return any(self._computed_s < since_s + PATIENCE_S <= self._clock() for since_s in since)

    def _recompute(self, but: str = "") -> Mapping[str, JobShare]:
        with self._computing:  # else a thread that started earlier would overwrite newer shares
            capacity = self._get_capacity()
            found = [pool for pool in self._services.get_pools() if pool.scale_target_ref is None]
            pools = {pool.uid: pool.min_replicas for pool in found}
            with self._lock:
                jobs = list(self._sharing.values())
            self._computed_s = self._clock()
            shares = compute_shares(capacity, jobs, pools, self._computed_s) if jobs and capacity is not None else {}
            with self._lock:
                before, self._shares = self._shares, shares
        for key, count in shares.items():
            if key != but and before.get(key) != count:
                self._on_key(key)
        return shares
