"""Which job may have how many workers: arbitration among all jobs of the operator that ask for GPUs. Pure.

Jobs with a queue of Kueue, or a scheduler that starts gangs (Volcano, KAI), are theirs to arbitrate, and left out; so
are jobs that only `/scale` moves, and jobs without GPUs. What these hold is no longer there to share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from edl.master.kube.capacity import ClusterCapacity, PodClaim
from edl.master.kube.jobs import find_final_phase, shares_cluster
from edl.master.kube.members.naming import OWNER_UID_LABEL, POOL_LABEL, ROLE_LABEL
from edl.master.kube.resources import ElasticJob
from edl.master.scaling.arbitration import JobRequest, arbitrate

__all__ = ["SharingJob", "compute_shares", "read_sharing_job"]

_GPU: Final = "nvidia.com/gpu"
_THOUSANDTHS: Final = 1000
"""In which capacity counts amounts."""
_MOST_ROUNDS: Final = 8
"""Arbitrations in a row, each of which goes on where the steps of the one before were used up."""


@dataclass(frozen=True)
class SharingJob:
    """A job among which GPUs are shared.

    Attributes:
        key: of the resource.
        uid: of the resource.
        least: workers that it starts with.
        most: workers that are of use to it.
        gpus: of a worker.
        submitted_s: when it was made, in seconds since 1970.
        remaining_s: seconds that the rest of it takes with the workers that it has; None if unknown.
    """

    key: str
    uid: str
    least: int
    most: int
    gpus: int
    submitted_s: float
    remaining_s: int | None = None


def read_sharing_job(job: ElasticJob, wanted: int | None, remaining_s: int | None) -> SharingJob | None:
    """Return a job as arbitration sees it; None if it takes no part."""
    spec = job.template.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    if job.scaling != "auto" or job.suspend or not shares_cluster(job):
        return None
    if find_final_phase(job):
        return None
    gpus = _count_gpus(spec)
    if gpus < 1:
        return None
    most = job.max_replicas if wanted is None else max(job.min_replicas, min(job.max_replicas, wanted))
    return SharingJob(job.key, job.uid, job.min_replicas, most, gpus, job.created_s, remaining_s)


def compute_shares(
    capacity: ClusterCapacity, jobs: Sequence[SharingJob], pools: Mapping[str, int] = MappingProxyType({})
) -> Mapping[str, int]:
    """Return how many workers each job may have, by its key.

    Jobs count as old ones: the arbiter would hold young ones back, and take from them what has been made and waits for
    its node, while the reallocations that this damps are not counted here.

    `pools` has the uid of each pool that lends what it has, and how many teachers it keeps for itself.
    """
    workers: dict[str, list[PodClaim]] = {job.uid: [] for job in jobs}
    for pod in capacity.pods:
        owner = pod.labels.get(OWNER_UID_LABEL, "")
        if owner in workers and pod.labels.get(ROLE_LABEL) == "worker" and not pod.ended:
            workers[owner].append(pod)
    priorities = {job.uid: max((pod.priority or 0 for pod in workers[job.uid]), default=0) for job in jobs}
    lent = _find_lent(capacity, pools, min(priorities.values(), default=0))
    nodes = capacity.list_devices(lambda pod: pod.labels.get(OWNER_UID_LABEL) in priorities or pod.uid in lent)
    requests, placements = [], {}
    for job in jobs:
        pods = workers[job.uid]
        placements[job.key] = Counter(pod.node for pod in pods if pod.node)
        there = placements[job.key].total()
        requests.append(
            JobRequest(
                name=job.key,
                min_workers=job.least,
                max_workers=job.most,
                gpus=job.gpus,
                priority=priorities[job.uid],
                submitted_s=job.submitted_s,
                remaining=None if job.remaining_s is None or not there else float(job.remaining_s * there),
            )
        )
    allocation = arbitrate(nodes, requests, placements)
    for _ in range(_MOST_ROUNDS):
        if allocation.settled:
            break
        allocation = arbitrate(nodes, requests, allocation.placements)  # its steps were used up before it was done
    return {job.key: allocation.count_workers(job.key) for job in jobs}


def _find_lent(capacity: ClusterCapacity, pools: Mapping[str, int], priority: int) -> frozenset[str]:
    """Return the uids of teachers whose places workers get: the scheduler takes only those of less priority."""
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


def _count_gpus(spec: Mapping[str, Any]) -> int:
    """Return the GPUs that a worker asks for; 0 where its template cannot be read, which admission refuses later."""
    try:
        return PodClaim.of({"spec": spec}).requests.get(_GPU, 0) // _THOUSANDTHS
    except ValueError:
        return 0
