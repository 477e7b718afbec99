"""Jobs and pools of a Kubernetes cluster, as the page, `edl jobs` and `edl status` show them.

Anyone with rights on an object may have written its fields: each is checked and bounded, or None. Nothing here writes
to a cluster.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
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
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, PODS, TEACHER_POOLS, ResourceType
from edl.kube.settings import KubeSettings
from edl.master.kube.members.naming import JOB_LABEL, MANAGED_BY, OWNER_UID_LABEL, POOL_LABEL, TRY_LABEL
from edl.quoting import shown

_MAX_MESSAGE: Final = 4096
"""Characters: as many as Kubernetes keeps of what ended a container, so a traceback is shown as far as there is one."""
_MAX_MEMBERS: Final = 2000
"""Members of a job on the page."""
_ENDED: Final = ("Succeeded", "Failed")
_TRIED_AGAIN: Final = ("ObjectRefused", "AccessDenied", "QuotaExceeded")
"""Reasons of Accepted=False that are of the API server's, and not of the spec: the operator tries again."""

_Json = Mapping[str, Any]


def decode_workload(kind: str, found: _Json, pods: Iterable[_Json] | None = None) -> KubernetesWorkload:
    """Read an ElasticJob or a TeacherPool."""
    metadata, spec, status = (_record(found.get(name)) for name in ("metadata", "spec", "status"))
    name = text(metadata.get("name"))
    least = whole(spec.get("minReplicas"))
    conditions = tuple(map(_condition, rows(status.get("conditions"))))
    own = None if pods is None else [pod for pod in pods if _is_pod_of(pod, kind, metadata)]
    return KubernetesWorkload(
        kind=kind,
        namespace=text(metadata.get("namespace")),
        name=name,
        phase=_phase(metadata, status, conditions),
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
        created=decode_time(metadata.get("creationTimestamp")),
        started=decode_time(status.get("startTime")),
        ended=decode_time(status.get("completionTime")),
        message=text(status.get("message"), _MAX_MESSAGE),
        borrowed=whole(status.get("borrowed")),
        queue=text(spec.get("queue")),
        conditions=conditions,
        members=_members(_record(status.get("members")), own),
    )


def sort_workloads(found: Iterable[KubernetesWorkload]) -> list[KubernetesWorkload]:
    """Return jobs that go on first, newest first, then those that ended last, first; pools by namespace and name."""

    def rank(item: KubernetesWorkload) -> tuple[bool, bool, float, str, str]:
        ended = item.phase in _ENDED
        when = 0.0 if item.kind == "pool" else -((item.ended if ended else item.created) or 0.0)
        return item.kind == "pool", ended, when, item.namespace, item.name

    return sorted(found, key=rank)


def decode_time(value: Any) -> float | None:
    """Return a time of the API (RFC 3339) in seconds since 1970; None for anything else."""
    if not isinstance(value, str) or not 19 <= len(value) <= 40:
        return None
    spelled = re.sub(r"(\.\d{1,6})\d*", lambda match: match[1].ljust(7, "0"), value.replace("Z", "+00:00"))
    try:
        moment = datetime.fromisoformat(spelled)
        return moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _phase(metadata: _Json, status: _Json, conditions: Sequence[KubernetesCondition]) -> str:
    if metadata.get("deletionTimestamp"):
        return "Deleting"
    phase = text(status.get("phase"))
    # Members of a job that runs stay as they were, whatever is written into its spec, or refused to one of them.
    works = phase == "Running" or phase in _ENDED or bool(whole(status.get("readyReplicas")))
    refused = [item.reason for item in conditions if item.type == "Accepted" and item.status == "False"]
    if refused and not works and refused[0] not in _TRIED_AGAIN:
        return "Rejected"
    if phase or not conditions:
        return phase
    states = {item.type: item.status for item in conditions}
    if states.get("Suspended") == "True":
        return "Suspended"
    return "Running" if states.get("Ready") == "True" or states.get("Running") == "True" else "Pending"


def _condition(found: _Json) -> KubernetesCondition:
    message, since = text(found.get("message"), _MAX_MESSAGE), decode_time(found.get("lastTransitionTime"))
    return read_fields(KubernetesCondition, found, message=message, since=since)


def _is_pod_of(pod: _Json, kind: str, owner: _Json) -> bool:
    """Whether a pod is of this very resource, and not of one before it that had the same name."""
    metadata = _record(pod.get("metadata"))
    labels = _record(metadata.get("labels"))
    if metadata.get("namespace") != owner.get("namespace"):
        return False
    if labels.get(JOB_LABEL if kind == "job" else POOL_LABEL) != owner.get("name"):
        return False
    return labels.get(OWNER_UID_LABEL) in (None, owner.get("uid"))


def _members(recorded: _Json, pods: Sequence[_Json] | None) -> tuple[KubernetesMember, ...]:
    by_member: dict[str, list[_Json]] = defaultdict(list)
    for pod in pods or ():
        labels = _record(_record(pod.get("metadata")).get("labels"))
        by_member[f"{text(labels.get('edl.io/role'))}-{text(labels.get('edl.io/index'))}"].append(pod)
    names = sorted(recorded.keys() | by_member.keys(), key=_member_rank)[:_MAX_MEMBERS]
    known = pods is not None
    return tuple(_member(text(name), _record(recorded.get(name)), by_member.get(name, []), known) for name in names)


def _member_rank(name: str) -> tuple[str, int, str]:
    role, _, index = name.rpartition("-")
    return role, int(index) if index.isascii() and index.isdigit() and len(index) < 10 else 0, name


def _member(name: str, record: _Json, pods: Sequence[_Json], known: bool) -> KubernetesMember:
    pod = max(pods, key=lambda item: _attempt(item) or 0, default=None)
    state, detail = ("waiting" if known else "unknown", "") if pod is None else _pod_state(pod)
    metadata = _record(pod.get("metadata")) if pod is not None else {}
    end = record.get("lastEnd")
    tries = [whole(record.get("try")), _attempt(pod) if pod is not None else None]
    return KubernetesMember(
        name=name,
        pod=text(metadata.get("name")),
        state=state,
        detail=detail,
        node=text(_record(pod.get("spec")).get("nodeName")) if pod is not None else "",
        attempt=max((count for count in tries if count is not None), default=None),
        failures={text(key): count for key, count in _record(record.get("failures")).items() if whole(count)},
        memory_factor=number(record.get("memoryFactor")),
        not_before=decode_time(record.get("notBefore")),
        last_end=_end(end) if isinstance(end, Mapping) else None,
    )


def _attempt(pod: _Json) -> int | None:
    label = _record(_record(pod.get("metadata")).get("labels")).get(TRY_LABEL)
    return int(label) if isinstance(label, str) and re.fullmatch(r"[0-9]{1,9}", label) else None


def _end(found: _Json) -> KubernetesMemberEnd:
    message, code = text(found.get("message"), _MAX_MESSAGE), whole(found.get("exitCode"))
    moment = decode_time(found.get("time"))
    return read_fields(KubernetesMemberEnd, found, message=message, exit_code=code, time=moment)


def _pod_state(pod: _Json) -> tuple[str, str]:
    """Return a pod's state in a word, and why."""
    status = _record(pod.get("status"))
    phase = text(status.get("phase"))
    if phase in _ENDED:
        return phase.lower(), text(status.get("reason")) or text(status.get("message"))
    if _record(pod.get("metadata")).get("deletionTimestamp"):
        return "ending", ""
    conditions = {text(item.get("type")): item for item in rows(status.get("conditions"))}
    if phase == "Running":
        ready = conditions.get("Ready", {}).get("status") == "True"
        return ("ready", "") if ready else ("running", _waiting(status))
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return "unscheduled", text(scheduled.get("message")) or text(scheduled.get("reason"))
    return "starting", _waiting(status)


def _waiting(status: _Json) -> str:
    """Return what a container waits for: an image that cannot be pulled, a volume that is not there."""
    for name in ("initContainerStatuses", "containerStatuses"):
        for container in rows(status.get(name)):
            waiting = _record(_record(container.get("state")).get("waiting"))
            if waiting.get("reason"):
                return ": ".join(filter(None, [text(waiting.get("reason")), text(waiting.get("message"))]))
    return ""


def _record(value: Any) -> _Json:
    return value if isinstance(value, Mapping) else {}


MAX_JOBS: Final = 500
"""Jobs that `edl jobs` shows, those that ended last at the end: a cluster keeps them until they are deleted."""
_PODS: Final = "=".join(MANAGED_BY)


class ClusterReader:
    """Reads jobs and pools of some namespaces (all without a name), again and again. Not thread-safe."""

    def __init__(
        self, client: KubeClient, namespaces: Sequence[str], *, members: bool = False, max_jobs: int = MAX_JOBS
    ) -> None:
        self._client = client
        self._namespaces = tuple(namespaces)
        self._members = members
        self._max_jobs = max_jobs
        self._last = KubernetesStatus(self._namespaces)

    def read(self) -> KubernetesStatus:
        """Ask for all.

        Raises:
            EDLError: The API server does not answer, or refuses.
        """
        jobs = self._list(ELASTIC_JOBS)
        pools = self._list(TEACHER_POOLS)
        pods = self._list(PODS, _PODS) if self._members else None
        found = sort_workloads(decode_workload("job", job, pods) for job in jobs)
        self._last = KubernetesStatus(
            namespaces=self._namespaces,
            looked=time.time(),
            jobs=tuple(found[: self._max_jobs]),
            pools=tuple(sort_workloads(decode_workload("pool", pool, pods) for pool in pools)),
            more_jobs=max(0, len(found) - self._max_jobs),
        )
        return self._last

    def _list(self, kind: ResourceType, labels: str = "") -> list[Object]:
        places = self._namespaces or ("",)
        return [item for place in places for item in self._client.list(kind, place, label_selector=labels).items]

    def read_again(self) -> KubernetesStatus:
        """Ask for all; if that fails, return what was known last, with `stale` set."""
        try:
            return self.read()
        except EDLError as exc:
            self._last = replace(self._last, stale=f"as known last: {shown(exc)}")
            return self._last


_MAX_SHOWN: Final = 100
"""Jobs on the page, as many as of a Store."""
_EVERY_S: Final = 2.0
"""Time between two looks, of three lists per namespace: the operator changes a status about as often."""
_AWAY_S: Final = 10.0
"""Time after a failed look, which may have taken its timeout, and held up the rest of the page."""
_SHARE: Final = 0.2
"""Share of the time that looks may take: a cluster of thousands of jobs is looked at less often."""


class ClusterView(ClusterReader):
    """Jobs and pools as new as a page needs them. Not thread-safe.

    Raises:
        SettingsError: No cluster is named anywhere, or the file that names it cannot be used.
    """

    def __init__(self, settings: KubeSettings, namespaces: Sequence[str] = ()) -> None:
        client = KubeClient(settings)
        places = tuple(dict.fromkeys(name or client.namespace for name in namespaces or ("",)))
        super().__init__(client, places, members=True, max_jobs=_MAX_SHOWN)
        self._every_s = min(_EVERY_S * len(places), _AWAY_S)
        self._next = 0.0

    def latest(self) -> KubernetesStatus:
        """Return what is there, after a look if one is due; `stale` says why it is old."""
        began = time.monotonic()
        if began >= self._next:
            self.read_again()
            took_s = time.monotonic() - began
            every_s = _AWAY_S if self._last.stale else self._every_s
            self._next = began + took_s + max(every_s - took_s, took_s * (1.0 / _SHARE - 1.0))
        return self._last

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
