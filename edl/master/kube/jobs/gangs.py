"""Jobs that another scheduler starts all at once or not at all: Kueue, Volcano and KAI.

What they are told is by their documentation:

- Kueue: https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/ (labels of plain pods and of pod groups)
- Volcano: https://volcano.sh/en/docs/podgroup/
- KAI: https://github.com/NVIDIA/KAI-Scheduler (`pkg/common/constants`, PodGroup of scheduling.run.ai/v2alpha2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from edl.kube.objects import Object
from edl.kube.resource_types import ResourceType
from edl.master.kube.members.naming import build_owner_reference, shorten_name
from edl.master.kube.resources import ElasticJob

__all__ = ["build_gang_labels", "build_pod_group", "shares_cluster", "starts_as_gang"]

GROWTH_CLASS: Final = "edl-growth"
"""The WorkloadPriorityClass of workers beyond the minimum: below that of groups, which Kueue serves first."""
_MAX_NAME_CHARS: Final = 63  # a label's value, which the group's name is for Kueue


@dataclass(frozen=True)
class _GangScheduler:
    """How a scheduler takes pod groups: its resource, and by what pods name their group and queue."""

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
        # The group is the operator's: KAI's own grouper would make one for each pod.
        annotations=(("kai.scheduler/skip-podgrouper", "true"),),
    ),
}


def shares_cluster(job: ElasticJob) -> bool:
    """Whether a job's workers are given to it by the default scheduler, so that EDL's arbiter may share GPUs."""
    return not job.queue and _get_scheduler_name(job) in ("", "default-scheduler")


def starts_as_gang(job: ElasticJob) -> bool:
    """Whether Kueue, Volcano or KAI starts a job's minimum all at once."""
    return bool(job.queue) or _get_scheduler_name(job) in _SCHEDULERS


def build_gang_labels(job: ElasticJob, index: int | None) -> tuple[dict[str, str], dict[str, str]]:
    """Return the labels and annotations by which a pod belongs to its group."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    scheduler = _SCHEDULERS.get(_get_scheduler_name(job))
    if scheduler is not None:
        if index is not None:
            annotations = {scheduler.group_annotation: _build_group_name(job), **dict(scheduler.annotations)}
        if scheduler.queue_label and job.queue:
            labels[scheduler.queue_label] = job.queue
        return labels, annotations
    if not job.queue:
        return labels, annotations
    labels["kueue.x-k8s.io/queue-name"] = job.queue
    if index is not None and index < job.min_replicas:
        labels["kueue.x-k8s.io/pod-group-name"] = _build_group_name(job)
        annotations["kueue.x-k8s.io/pod-group-total-count"] = str(job.min_replicas)
    elif index is not None:
        labels["kueue.x-k8s.io/priority-class"] = GROWTH_CLASS
    return labels, annotations


def build_pod_group(job: ElasticJob) -> tuple[ResourceType, Object] | None:
    """Return the PodGroup of a job that Volcano or KAI schedules; None for others."""
    scheduler = _SCHEDULERS.get(_get_scheduler_name(job))
    if scheduler is None:
        return None
    spec: Object = {"minMember": job.min_replicas}
    if job.queue:
        spec["queue"] = job.queue
    if job.priority_class_name:
        spec["priorityClassName"] = job.priority_class_name
    metadata = {
        "name": _build_group_name(job),
        "namespace": job.namespace,
        "ownerReferences": [build_owner_reference(job)],
    }
    kind = scheduler.resource
    return kind, {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}


def _build_group_name(job: ElasticJob) -> str:
    return shorten_name(job.job_id, _MAX_NAME_CHARS)


def _get_scheduler_name(job: ElasticJob) -> str:
    spec = job.template.get("spec")
    name = spec.get("schedulerName") if isinstance(spec, Mapping) else ""
    return name if isinstance(name, str) else ""
