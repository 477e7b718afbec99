"""The objects of a job: pods of workers (`edl run`) and of its master, its PodDisruptionBudget, and its PodGroup.

Labels, annotations and the PodGroup tell other schedulers to start all workers of the job's minimum at once:

- Kueue: https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/ (labels of plain pods and of pod groups)
- Volcano: https://volcano.sh/en/docs/podgroup/
- KAI: https://github.com/NVIDIA/KAI-Scheduler (`pkg/common/constants`, PodGroup of scheduling.run.ai/v2alpha2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edl.kube.objects import Object
from edl.kube.resource_types import POD_DISRUPTION_BUDGETS, ResourceType
from edl.master.kube.members.pod_template import POD_ADDRESS, build_member_pod
from edl.master.kube.members.pods import (
    JOB_LABEL,
    MANAGED_BY,
    build_owner_reference,
    build_selector,
    get_mapping,
    get_text,
    shorten_name,
)
from edl.master.kube.members.records import MemberRecord
from edl.master.kube.resources import ElasticJob

GROWTH_CLASS: Final = "edl-growth"
"""The WorkloadPriorityClass of workers above the minimum. It is below the class of groups, so Kueue serves groups
first."""
_MAX_NAME_CHARS: Final = 63  # a label value, as which Kueue uses a group's name; a budget's name may be longer


@dataclass(frozen=True)
class _GangScheduler:
    resource: ResourceType
    group_annotation: str
    queue_label: str = ""
    annotations: tuple[tuple[str, str], ...] = ()


_SCHEDULERS: Final[Mapping[str, _GangScheduler]] = {
    "volcano": _GangScheduler(
        ResourceType("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup"),
        group_annotation="scheduling.k8s.io/group-name",
    ),
    "kai-scheduler": _GangScheduler(
        ResourceType("scheduling.run.ai", "v2alpha2", "podgroups", "PodGroup"),
        group_annotation="pod-group-name",
        queue_label="kai.scheduler/queue",
        # The operator creates the group: KAI's own grouper would create one per pod.
        annotations=(("kai.scheduler/skip-podgrouper", "true"),),
    ),
}


def shares_cluster(job: ElasticJob) -> bool:
    """Whether the default scheduler places a job's workers, so that EDL's arbiter may share GPUs."""
    return not job.queue and _get_scheduler_name(job) in ("", "default-scheduler")


def starts_as_gang(job: ElasticJob) -> bool:
    """Whether Kueue, Volcano or KAI starts all workers of a job's minimum at once."""
    return bool(job.queue) or _get_scheduler_name(job) in _SCHEDULERS


def build_gang_labels(job: ElasticJob, index: int | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and annotations that assign a pod to its group."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    scheduler = _SCHEDULERS.get(_get_scheduler_name(job))
    if scheduler is not None:
        if index is not None:
            annotations = {scheduler.group_annotation: build_object_name(job), **dict(scheduler.annotations)}
        if scheduler.queue_label and job.queue:
            labels[scheduler.queue_label] = job.queue
        return labels, annotations
    if not job.queue:
        return labels, annotations
    labels["kueue.x-k8s.io/queue-name"] = job.queue
    if index is not None and index < job.min_replicas:
        labels["kueue.x-k8s.io/pod-group-name"] = build_object_name(job)
        annotations["kueue.x-k8s.io/pod-group-total-count"] = str(job.min_replicas)
    elif index is not None:
        labels["kueue.x-k8s.io/priority-class"] = GROWTH_CLASS
    return labels, annotations


def build_pod_group(job: ElasticJob) -> tuple[ResourceType, Object] | None:
    """Return the PodGroup of a job that Volcano or KAI schedules; None for other jobs."""
    scheduler = _SCHEDULERS.get(_get_scheduler_name(job))
    if scheduler is None:
        return None
    spec: Object = {"minMember": job.min_replicas}
    if job.queue:
        spec["queue"] = job.queue
    if job.priority_class_name:
        spec["priorityClassName"] = job.priority_class_name
    metadata = {
        "name": build_object_name(job),
        "namespace": job.namespace,
        "ownerReferences": [build_owner_reference(job)],
    }
    kind = scheduler.resource
    return kind, {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}


def build_object_name(job: ElasticJob) -> str:
    """Return the name of a job's pod group and of its PodDisruptionBudget."""
    return shorten_name(job.job_id, _MAX_NAME_CHARS)


def _get_scheduler_name(job: ElasticJob) -> str:
    return get_text(get_mapping(job.template, "spec"), "schedulerName")


WORKER: Final = "worker"
MASTER: Final = "master"
_SAVING_SHARE: Final = 0.8  # of a pod's grace period, for workers to end; the agent needs the rest to report why
_MOST_NODES: Final = 10_000
"""More nodes than any job has. With `maxReplicas` instead, running workers would refuse new workers after `maxReplicas`
was raised."""
_TAKEOVER_S: Final = 45
"""Workers continue without an `edl:` store for 0.8 of this time, which is enough for the store's pod to restart on
another node (30 s). If all workers die without notice, new workers wait this long."""
_MASTER_RESOURCES: Final[dict[str, Any]] = {"requests": {"cpu": "100m", "memory": "256Mi"}}
"""A master holds the state of shards, not data. If it had the workers' resources, it would take a GPU."""


def build_worker_pod(job: ElasticJob, index: int, record: MemberRecord) -> Object:
    """Return a worker's pod; options in `spec.run` come last, so they take precedence."""
    args = ["run", "--rdzv-id", job.job_id, "--store", job.store, "--nnodes", f"{job.min_replicas}:{_MOST_NODES}"]
    args += ["--local-addr", POD_ADDRESS, "--leave-on-oom"]
    args += ["--grace-period", str(max(1, int(job.grace_period_s * _SAVING_SHARE)))]
    if job.store.startswith("edl:"):
        args += ["--rdzv-conf", f"takeover_timeout={_TAKEOVER_S}"]
    args += ["--checkpoint", job.checkpoint] if job.checkpoint else []
    labels, annotations = build_gang_labels(job, index)
    return build_member_pod(job, WORKER, index, record, [*args, *job.run], labels=labels, annotations=annotations)


def build_master_pod(job: ElasticJob, record: MemberRecord) -> Object:
    """Return the master's pod. Its journal is in the store, so a successor can continue on any node."""
    args = ["master", job.job_id, "--store", job.store, "--journal", "store:", "--host", POD_ADDRESS, *job.master.args]
    labels, annotations = build_gang_labels(job, None)
    return build_member_pod(
        job, MASTER, 0, record, args, labels=labels, annotations=annotations, resources=_MASTER_RESOURCES
    )


def build_disruption_budget(job: ElasticJob) -> tuple[ResourceType, Object]:
    """Return a job's PodDisruptionBudget; the client fills in the API version, which depends on the server."""
    return POD_DISRUPTION_BUDGETS, {
        "kind": POD_DISRUPTION_BUDGETS.kind,
        "metadata": {
            "name": build_object_name(job),
            "namespace": job.namespace,
            "labels": {JOB_LABEL: job.name, MANAGED_BY[0]: MANAGED_BY[1]},
            "ownerReferences": [build_owner_reference(job)],
        },
        "spec": {"minAvailable": job.min_replicas, "selector": {"matchLabels": build_selector(job, WORKER)}},
    }
