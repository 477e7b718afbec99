"""Reads jobs and pools in a Kubernetes cluster for the page, `edl jobs` and `edl status`.

Anyone with rights on an object may have written its fields. Each field is therefore checked and bounded; an invalid
field becomes None. Nothing here writes to a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from edl.dashboard.state.records import number, read_fields, rows, text, whole
from edl.dashboard.state.schema import (
    KubernetesCondition,
    KubernetesMember,
    KubernetesMemberEnd,
    KubernetesStatus,
    KubernetesWorkload,
)
from edl.errors import EDLError
from edl.kube.client import KubeClient
from edl.kube.objects import Object, read_time
from edl.kube.resource_types import ELASTIC_JOBS, PODS, TEACHER_POOLS, ResourceType
from edl.kube.settings import KubeSettings
from edl.master.kube.members.pods import MANAGED_BY, MemberPod, get_mapping, read_member_pods
from edl.quoting import shown

_MAX_MESSAGE: Final = 4096
"""Maximum length of a message, the same as in Kubernetes for a container's last message, such as a traceback."""
_MAX_MEMBERS: Final = 2000
"""Maximum number of a job's members on the page."""
_ENDED: Final = ("Succeeded", "Failed")

_Json = Mapping[str, Any]


def decode_workload(kind: str, found: _Json, pods: Iterable[_Json] | None = None) -> KubernetesWorkload:
    """Read an ElasticJob or a TeacherPool."""
    metadata, spec, status = (get_mapping(found, name) for name in ("metadata", "spec", "status"))
    name = text(metadata.get("name"))
    least = whole(spec.get("minReplicas"))
    own = None if pods is None else read_member_pods(pods, text(metadata.get("uid")))[0]
    return KubernetesWorkload(
        kind=kind,
        namespace=text(metadata.get("namespace")),
        name=name,
        phase="Deleting" if metadata.get("deletionTimestamp") else text(status.get("phase")),
        job_id=text(status.get("jobId")) if kind == "job" else text(spec.get("service")) or name,
        store=shown(text(status.get("store")) or text(spec.get("store"))),
        ready=whole(status.get("readyReplicas")),
        replicas=whole(status.get("replicas")),
        wanted=whole(status.get("wantedReplicas")),
        min_replicas=least,
        max_replicas=whole(spec.get("maxReplicas")) or least,
        scaling=text(spec.get("scaling")) or "auto",
        suspended=spec.get("suspend") is True,
        progress=whole(status.get("progressPercentage")),
        remaining_s=number(status.get("estimatedRemainingSeconds")),
        created=read_time(metadata.get("creationTimestamp")),
        started=read_time(status.get("startTime")),
        ended=read_time(status.get("completionTime")),
        message=text(status.get("message"), _MAX_MESSAGE),
        borrowed=whole(status.get("borrowed")),
        queue=text(spec.get("queue")),
        conditions=tuple(map(_condition, rows(status.get("conditions")))),
        members=_members(get_mapping(status, "members"), own),
    )


def sort_workloads(found: Iterable[KubernetesWorkload]) -> list[KubernetesWorkload]:
    """Return running jobs, newest first, then ended jobs, latest first, then pools by namespace and name."""

    def rank(item: KubernetesWorkload) -> tuple[bool, bool, float, str, str]:
        ended = item.phase in _ENDED
        when = 0.0 if item.kind == "pool" else -((item.ended if ended else item.created) or 0.0)
        return item.kind == "pool", ended, when, item.namespace, item.name

    return sorted(found, key=rank)


def _condition(found: _Json) -> KubernetesCondition:
    message, since = text(found.get("message"), _MAX_MESSAGE), read_time(found.get("lastTransitionTime"))
    return read_fields(KubernetesCondition, found, message=message, since=since)


def _members(recorded: _Json, pods: Sequence[MemberPod] | None) -> tuple[KubernetesMember, ...]:
    newest = {pod.key: pod for pod in pods or ()}  # `pods` are in the order of attempts
    names = sorted(recorded.keys() | newest.keys(), key=_member_rank)[:_MAX_MEMBERS]
    known = pods is not None
    return tuple(_member(text(name), get_mapping(recorded, name), newest.get(name), known) for name in names)


def _member_rank(name: str) -> tuple[str, int, str]:
    role, _, index = name.rpartition("-")
    return role, int(index) if index.isascii() and index.isdigit() and len(index) < 10 else 0, name


def _member(name: str, record: _Json, pod: MemberPod | None, known: bool) -> KubernetesMember:
    state, detail = ("waiting" if known else "unknown", "") if pod is None else _pod_state(pod)
    end = record.get("lastEnd")
    tries = [whole(record.get("try")), pod.try_number if pod is not None else None]
    return KubernetesMember(
        name=name,
        pod=text(pod.name) if pod is not None else "",
        state=state,
        detail=text(detail),
        node=text(pod.node) if pod is not None else "",
        attempt=max((count for count in tries if count is not None), default=None),
        failures={text(key): count for key, count in get_mapping(record, "failures").items() if whole(count)},
        memory_factor=number(record.get("memoryFactor")),
        not_before=read_time(record.get("notBefore")),
        last_end=_end(end) if isinstance(end, Mapping) else None,
    )


def _end(found: _Json) -> KubernetesMemberEnd:
    message, code = text(found.get("message"), _MAX_MESSAGE), whole(found.get("exitCode"))
    moment = read_time(found.get("time"))
    return read_fields(KubernetesMemberEnd, found, message=message, exit_code=code, time=moment)


def _pod_state(pod: MemberPod) -> tuple[str, str]:
    if pod.phase in _ENDED:
        return pod.phase.lower(), pod.termination.pod_reason or pod.termination.message
    if pod.deleting:
        return "ending", ""
    waits = ": ".join(filter(None, (pod.waiting, pod.waiting_message)))
    if pod.phase == "Running":
        return ("ready", "") if pod.ready else ("running", waits)
    return ("starting", waits) if pod.scheduled else ("unscheduled", pod.no_node)


_MAX_JOBS: Final = 500
"""Maximum number of jobs in `edl jobs`: a cluster keeps ended jobs until they are deleted."""
_PODS: Final = "=".join(MANAGED_BY)


def read_cluster(
    client: KubeClient, namespaces: Sequence[str], *, members: bool = False, max_jobs: int = _MAX_JOBS
) -> KubernetesStatus:
    """Read the jobs and pools in some namespaces, or in all namespaces if none is named.

    Raises:
        EDLError: The API server does not respond, or refuses the request.
    """

    def read(kind: ResourceType, labels: str = "") -> list[Object]:
        return [item for place in namespaces or ("",) for item in client.list(kind, place, label_selector=labels).items]

    jobs, pools = read(ELASTIC_JOBS), read(TEACHER_POOLS)
    pods = read(PODS, _PODS) if members else None
    found = sort_workloads(decode_workload("job", job, pods) for job in jobs)
    return KubernetesStatus(
        namespaces=tuple(namespaces),
        looked=time.time(),
        jobs=tuple(found[:max_jobs]),
        pools=tuple(sort_workloads(decode_workload("pool", pool, pods) for pool in pools)),
        more_jobs=max(0, len(found) - max_jobs),
    )


_MAX_SHOWN: Final = 100
"""Maximum number of jobs on the page, the same as for a Store."""
_EVERY_S: Final = 2.0
"""Poll interval; a poll sends three lists per namespace. The operator changes a status about equally often."""
_AWAY_S: Final = 10.0
"""Pause after a failed poll, which may have taken the full timeout and delayed the rest of the page."""
_SHARE: Final = 0.2
"""Maximum share of time spent on polls: a cluster with thousands of jobs is polled less often."""


class ClusterView:
    """Reads jobs and pools as often as a page needs them. Not thread-safe. SettingsError if no cluster is usable."""

    def __init__(self, settings: KubeSettings, namespaces: Sequence[str] = ()) -> None:
        self._client = KubeClient(settings)
        places = dict.fromkeys(name or self._client.namespace for name in namespaces or ("",))
        self._last = KubernetesStatus(tuple(places))
        self._every_s = min(_EVERY_S * len(places), _AWAY_S)
        self._next = 0.0

    def latest(self) -> KubernetesStatus:
        """Return the current state, refreshed if due; if it is old, `stale` says why."""
        began = time.monotonic()
        if began >= self._next:
            try:
                self._last = read_cluster(self._client, self._last.namespaces, members=True, max_jobs=_MAX_SHOWN)
            except EDLError as exc:
                self._last = replace(self._last, stale=f"last known state: {shown(exc)}")
            took_s = time.monotonic() - began
            every_s = _AWAY_S if self._last.stale else self._every_s
            self._next = began + took_s + max(every_s - took_s, took_s * (1.0 / _SHARE - 1.0))
        return self._last

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
