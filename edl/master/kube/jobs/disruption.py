"""The PodDisruptionBudget of a job: a drain of nodes leaves it the workers that it needs."""

from __future__ import annotations

from edl.kube.objects import Object
from edl.kube.resource_types import POD_DISRUPTION_BUDGETS, ResourceType
from edl.master.kube.jobs.launches import WORKER
from edl.master.kube.members.naming import JOB_LABEL, MANAGED_BY, build_owner_reference, build_selector, shorten_name
from edl.master.kube.resources import ElasticJob

__all__ = ["build_disruption_budget", "build_disruption_budget_name"]

_MAX_NAME_CHARS = 63  # as all names of EDL's, though a budget's may be longer


def build_disruption_budget_name(job: ElasticJob) -> str:
    """Return the name of a job's PodDisruptionBudget."""
    return shorten_name(job.job_id, _MAX_NAME_CHARS)


def build_disruption_budget(job: ElasticJob) -> tuple[ResourceType, Object]:
    """Return a job's PodDisruptionBudget; the client fills in the API's version, which depends on the server."""
    return POD_DISRUPTION_BUDGETS, {
        "kind": POD_DISRUPTION_BUDGETS.kind,
        "metadata": {
            "name": build_disruption_budget_name(job),
            "namespace": job.namespace,
            "labels": {JOB_LABEL: job.name, MANAGED_BY[0]: MANAGED_BY[1]},
            "ownerReferences": [build_owner_reference(job)],
        },
        "spec": {"minAvailable": job.min_replicas, "selector": {"matchLabels": build_selector(job, WORKER)}},
    }
