"""What the pods of a job run: workers `edl run`, a master `edl master`."""

from __future__ import annotations

from typing import Any, Final

from edl.master.kube.jobs.gangs import build_gang_labels
from edl.master.kube.members import MemberLaunch, MemberRecord
from edl.master.kube.members.pod_template import POD_ADDRESS
from edl.master.kube.resources import ElasticJob

__all__ = ["MASTER", "WORKER", "build_master_launch", "build_worker_launch"]

WORKER: Final = "worker"
MASTER: Final = "master"
_SAVING_SHARE: Final = 0.8
"""Of a pod's grace period, what workers have to end: with all of it, the agent could not say why it ended."""
_MOST_NODES: Final = 10_000
"""More than any job has. The operator alone makes workers, so each of them has its place; with `maxReplicas` here,
workers that run would leave those out that come after it was raised. The first world waits a second for more."""
_TAKEOVER_S: Final = 45
"""Where the store is a pod of the cluster: workers go on without it for 0.8 of that, which covers a pod that takes 30 s
to start again elsewhere. In return, new workers wait that long if all workers of the job died without a word."""
_MASTER_RESOURCES: Final[dict[str, Any]] = {"requests": {"cpu": "100m", "memory": "256Mi"}}
"""A master holds the state of shards, not data: with the workers' resources it would take a GPU."""


def build_worker_launch(job: ElasticJob, index: int, record: MemberRecord) -> MemberLaunch:
    """Return what a worker's pod runs; options in `spec.run` come last, so that they win."""
    args = ["run", "--rdzv-id", job.job_id, "--store", job.store, "--nnodes", f"{job.min_replicas}:{_MOST_NODES}"]
    args += ["--local-addr", POD_ADDRESS, "--leave-on-oom"]
    args += ["--grace-period", str(max(1, int(job.grace_period_s * _SAVING_SHARE)))]
    if job.store.startswith("edl:"):
        args += ["--rdzv-conf", f"takeover_timeout={_TAKEOVER_S}"]
    args += ["--checkpoint", job.checkpoint] if job.checkpoint else []
    labels, annotations = build_gang_labels(job, index)
    return MemberLaunch(
        role=WORKER,
        index=index,
        try_number=record.try_number,
        args=[*args, *job.run],
        labels=labels,
        annotations=annotations,
        memory_factor=record.memory_factor,
        excluded_nodes=[item.node for item in record.excluded_nodes],
    )


def build_master_launch(job: ElasticJob, record: MemberRecord) -> MemberLaunch:
    """Return what the master's pod runs. Its journal is in the store, so that its successor goes on anywhere."""
    args = ["master", job.job_id, "--store", job.store, "--journal", "store:", "--host", POD_ADDRESS]
    labels, annotations = build_gang_labels(job, None)
    return MemberLaunch(
        role=MASTER,
        index=0,
        try_number=record.try_number,
        args=[*args, *job.master.args],
        labels=labels,
        annotations=annotations,
        memory_factor=record.memory_factor,
        excluded_nodes=[item.node for item in record.excluded_nodes],
        resources=_MASTER_RESOURCES,
    )
