"""Member pods: their names and labels, their state as plain values for planners, and the evidence about their ends.

A pod's name contains the number of the attempt, so a pod on a dead node does not block its successor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from edl.errors import ProtocolError
from edl.kube.objects import read_time
from edl.master.kube.resources import ElasticJob, MemberOwner
from edl.master.scaling.terminations import (
    TerminationCause,
    TerminationReport,
    find_termination_cause,
    parse_termination_message,
)

JOB_LABEL: Final = "edl.io/job"
POOL_LABEL: Final = "edl.io/pool"
OWNER_UID_LABEL: Final = "edl.io/owner-uid"
ROLE_LABEL: Final = "edl.io/role"
INDEX_LABEL: Final = "edl.io/index"
TRY_LABEL: Final = "edl.io/try"
MANAGED_BY: Final = ("app.kubernetes.io/managed-by", "edl")

MAX_LABEL_CHARS: Final = 63
"""Maximum length of a DNS-1123 label and of a label's value. If a pod's name is longer, its host name is truncated."""
_HASH_CHARS: Final = 8  # 32 bits: with a thousand cut names in a namespace, two collide in 1 of 8,000 clusters
_NOT_IN_A_LABEL: Final = re.compile(r"[^a-z0-9-]")


def shorten_name(name: str, limit: int) -> str:
    """Return a name as a DNS-1123 label of at most `limit` characters; a hash keeps a changed name unique."""
    label = _NOT_IN_A_LABEL.sub("-", name.lower()).strip("-")
    if label == name and len(label) <= limit:
        return label
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARS]
    return f"{label[: limit - _HASH_CHARS - 1].strip('-') or 'x'}-{digest}"


def build_member_name(owner_name: str, role: str, index: int, try_number: int) -> str:
    """Return a member pod's name, `NAME-ROLE-INDEX-TRY`: a DNS-1123 label, the same in every operator."""
    suffix = f"-{role}-{index}-{try_number}"
    name = shorten_name(owner_name, MAX_LABEL_CHARS - len(suffix)) + suffix
    return name if name[0].isalpha() or name[0].isdigit() else f"x{name[1:]}"


def build_member_labels(owner: MemberOwner, role: str, index: int, try_number: int) -> dict[str, str]:
    return {
        JOB_LABEL if isinstance(owner, ElasticJob) else POOL_LABEL: owner.name,
        OWNER_UID_LABEL: owner.uid,
        ROLE_LABEL: role,
        INDEX_LABEL: str(index),
        TRY_LABEL: str(try_number),
        MANAGED_BY[0]: MANAGED_BY[1],
    }


def build_selector(owner: MemberOwner, role: str = "") -> dict[str, str]:
    """Return the labels by which an owner's member pods are selected."""
    return {OWNER_UID_LABEL: owner.uid, **({ROLE_LABEL: role} if role else {})}


def build_owner_reference(owner: MemberOwner) -> dict[str, Any]:
    """Return the owner reference of an owner's objects: they are deleted with it, and never block its deletion."""
    return {
        "apiVersion": owner.resource_type.api_version,
        "kind": owner.resource_type.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


MAIN_CONTAINER: Final = "edl"  # the member's container, at any position; without it, the first is
_MAX_MESSAGE_CHARS: Final = 4096  # the kubelet's limit of /dev/termination-log
_MAX_LINE_CHARS: Final = 400  # of a container's last line in a status, which conditions and events repeat
STARTING: Final = frozenset({"", "ContainerCreating", "PodInitializing"})  # reasons to wait in a normal start


def get_mapping(parent: object, key: str) -> Mapping[str, Any]:
    """Return a mapping in a JSON mapping; empty if it is missing."""
    value = parent.get(key) if isinstance(parent, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def get_list(parent: object, key: str) -> list[Mapping[str, Any]]:
    """Return the mappings of a list in a JSON mapping; empty if it is missing."""
    value = parent.get(key) if isinstance(parent, Mapping) else None
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def get_text(parent: object, key: str) -> str:
    """Return a string in a JSON mapping; empty if it is missing."""
    value = parent.get(key) if isinstance(parent, Mapping) else None
    return value if isinstance(value, str) else ""


def find_main_container(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the member's container in a pod's spec; empty if it has none."""
    containers = get_list(spec, "containers")
    named = [container for container in containers if container.get("name") == MAIN_CONTAINER]
    return (named or containers or [{}])[0]


def is_node_silent(pod: Mapping[str, Any]) -> bool:
    """Whether the node controller has marked a pod as not ready because its node no longer answers.

    The node controller changes `Ready` and leaves `ContainersReady` as it is; the kubelet writes such a combination
    only if readiness gates are set.
    """
    if get_text(get_mapping(pod, "status"), "reason") == "NodeLost":
        return True
    if get_list(get_mapping(pod, "spec"), "readinessGates"):
        return False
    found = {
        get_text(item, "type"): get_text(item, "status") for item in get_list(get_mapping(pod, "status"), "conditions")
    }
    return found.get("Ready") in ("False", "Unknown") and found.get("ContainersReady") == "True"


def _find_start_failure(pod: Mapping[str, Any], events: Mapping[str, str]) -> tuple[str, str]:
    """Return why a pod cannot start its main container, as (reason, message); both are empty if it can or is ending."""
    if get_mapping(pod, "metadata").get("deletionTimestamp"):
        return "", ""
    status = get_mapping(pod, "status")
    for container in get_list(status, "initContainerStatuses"):
        state, name = get_mapping(container, "state"), get_text(container, "name")
        terminated, waiting = get_mapping(state, "terminated"), get_mapping(state, "waiting")
        code = _read_int(terminated.get("exitCode"))
        if code and get_text(status, "phase") == "Failed":
            how = f"{get_text(terminated, 'reason') or 'Error'}, exit code {code}"
            words = f"init container {name}: {how}: {get_text(terminated, 'message')}"
            return "InitContainerFailed", words.rstrip(": ")
        if get_text(waiting, "reason") not in STARTING:
            words = f"init container {name}: {get_text(waiting, 'message')}"
            return get_text(waiting, "reason"), words.rstrip(": ")
    for reason, message in events.items():
        found = find_termination_cause(TerminationReport(events=(reason,))).cause
        if get_text(status, "phase") == "Pending" and found is TerminationCause.LAUNCH_FAILED:
            return reason, message
    return "", ""


def _read_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_MAX_NUMBER = 10**9  # of an index or attempt: no operator reaches it, and every JSON parser represents it exactly
_FIRST_TIME_S = 86_400.0
"""Earlier Unix times stand for the zero time of Unix or Go. Containerd writes such a time for a container that never
started."""


@dataclass(frozen=True)
class MemberPod:
    """A pod of an ElasticJob or a TeacherPool. Times are Unix times; None if unknown or not reached.

    Attributes:
        try_number: number of the attempt among the member's pods, from 0.
        container: name of its main container.
        phase: `status.phase`; `Pending` before a phase is written.
        ready_s: since when it has been ready.
        no_node: why the pod has no node: the scheduler's message, or that of a gate, such as Kueue's.
        unschedulable: the scheduler's message about why the pod has no node; empty if `no_node` has a different source.
        delete_by_s: when its grace period is over.
        started_s: when its main container started.
        finished: its main container has ended, or the pod was given up before it started.
        emptied: the pod was asked to end and all containers have ended: its resources are free, even if the API server
            still lists the pod.
        waiting: why its main container does not start, such as `ImagePullBackOff`; the reason may be that of an init
            container.
        container_end: how its main container last ended, even if the container was restarted since then; empty if it
            never ended.
        termination: the evidence about why the pod ended; for a running pod, the evidence that there would be if it
            ended now.
    """

    name: str
    role: str
    index: int
    try_number: int
    uid: str
    container: str = ""
    phase: str = "Pending"
    ready: bool = False
    scheduled: bool = False
    no_node: str = ""
    unschedulable: str = ""
    node: str = ""
    node_silent: bool = False
    deleting: bool = False
    delete_by_s: float | None = None
    created_s: float = 0.0
    scheduled_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None
    finished: bool = False
    emptied: bool = False
    waiting: str = ""
    waiting_message: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    termination: TerminationReport = field(default_factory=TerminationReport)
    ready_s: float | None = None
    restarts: int = 0
    container_end: str = ""

    @property
    def live(self) -> bool:
        """Whether the pod takes part, or will take part: it has neither ended nor been asked to end."""
        return not self.deleting and not self.finished

    @property
    def occupying(self) -> bool:
        """Whether the pod holds its resources and was not asked to end: a sidecar may outlive its main container."""
        return not self.deleting and self.phase not in ("Succeeded", "Failed")

    @property
    def starting(self) -> bool:
        """Whether the pod has a node and its containers are starting, or wait for a volume: the status is the same."""
        return self.live and self.scheduled and self.phase == "Pending" and self.waiting in STARTING

    @property
    def failing(self) -> bool:
        """Whether the pod's main container cannot start, or waits to be restarted: `waiting` says why."""
        return self.waiting not in STARTING

    @property
    def placed_s(self) -> float:
        """When the pod got a node, Unix time: it may have waited for hours. If unknown, when the pod was created."""
        return self.created_s if self.scheduled_s is None else self.scheduled_s

    @property
    def pending(self) -> bool:
        return self.live and not self.scheduled

    @property
    def key(self) -> str:
        """The member's key in `status.members`, such as `worker-0`."""
        return f"{self.role}-{self.index}"


def read_member_pods(
    pods: Iterable[Mapping[str, Any]], owner_uid: str, events: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[tuple[MemberPod, ...], tuple[str, ...]]:
    """Return an owner's member pods by role, index and try, and why other pods with the owner's label do not count."""
    found: list[MemberPod] = []
    reasons: list[str] = []
    for pod in pods:
        if get_text(get_mapping(get_mapping(pod, "metadata"), "labels"), OWNER_UID_LABEL) != owner_uid:
            continue
        try:
            found.append(read_member_pod(pod, (events or {}).get(get_text(get_mapping(pod, "metadata"), "uid"), {})))
        except ProtocolError as error:
            reasons.append(str(error))
    return tuple(sorted(found, key=lambda pod: (pod.role, pod.index, pod.try_number))), tuple(sorted(reasons))


def read_member_pod(pod: Mapping[str, Any], events: Mapping[str, str] | None = None) -> MemberPod:
    """Parse a member pod; if it is not a member, raise a ProtocolError that says what is missing."""
    events = events or {}
    metadata, spec, status = (get_mapping(pod, key) for key in ("metadata", "spec", "status"))
    labels = {key: value for key, value in get_mapping(metadata, "labels").items() if isinstance(value, str)}
    name, uid, owner_uid = get_text(metadata, "name"), get_text(metadata, "uid"), labels.get(OWNER_UID_LABEL, "")
    index, try_number = _read_number(labels.get(INDEX_LABEL)), _read_number(labels.get(TRY_LABEL))
    role = labels.get(ROLE_LABEL, "")
    if not name or not uid:
        raise ProtocolError("a pod without name or uid")
    if index is None or try_number is None or not role:
        raise ProtocolError(f"pod {name}: not a member: its labels lack role, index or try")
    controllers = [get_text(item, "uid") for item in get_list(metadata, "ownerReferences") if item.get("controller")]
    if controllers != [owner_uid]:
        raise ProtocolError(f"pod {name}: not a member: it has a member's labels, but is not controlled by its owner")
    conditions = {get_text(item, "type"): item for item in get_list(status, "conditions")}
    scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    is_ready = get_text(ready, "status") == "True"
    main, node = get_text(find_main_container(spec), "name"), get_text(spec, "nodeName")
    statuses = [item for item in get_list(status, "containerStatuses") if item.get("name") == main]
    container: Mapping[str, Any] = statuses[-1] if statuses else {}
    state = get_mapping(container, "state")
    running, terminated, waiting = (get_mapping(state, key) for key in ("running", "terminated", "waiting"))
    phase = get_text(status, "phase") or "Pending"
    reason, words = ("", "") if "running" in state or terminated else _find_start_failure(pod, events)
    reason, words = (reason, words) if reason else (get_text(waiting, "reason"), get_text(waiting, "message"))
    node_silent = is_node_silent(pod)
    no_node = get_text(scheduled, "message") or get_text(scheduled, "reason")
    no_node = "" if node or scheduled.get("status") == "True" else no_node
    last = terminated or get_mapping(get_mapping(container, "lastState"), "terminated")
    agent = parse_termination_message(get_text(terminated, "message"))
    return MemberPod(
        name=name,
        role=role,
        index=index,
        try_number=try_number,
        uid=uid,
        container=main,
        phase=phase,
        ready=is_ready,
        ready_s=_read_time(ready.get("lastTransitionTime")) if is_ready else None,
        restarts=_read_int(container.get("restartCount")) or 0,
        scheduled=bool(node),
        no_node=no_node,
        unschedulable=no_node if scheduled.get("reason") == "Unschedulable" else "",
        node=node,
        node_silent=node_silent,
        deleting=bool(metadata.get("deletionTimestamp")),
        delete_by_s=_read_time(metadata.get("deletionTimestamp")),
        created_s=_read_time(metadata.get("creationTimestamp")) or 0.0,
        scheduled_s=_read_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        started_s=_read_time(running.get("startedAt") or terminated.get("startedAt")),
        finished_s=_read_time(terminated.get("finishedAt")),
        finished=phase in ("Succeeded", "Failed") or "exitCode" in terminated,
        emptied=_is_emptied(pod),
        waiting=reason,
        waiting_message=words,
        container_end=_describe_end(last),
        labels=labels,
        termination=replace(
            agent,
            exit_code=_read_int(terminated.get("exitCode")),  # from the kubelet: the agent may have been killed later
            signal=_read_int(terminated.get("signal")) or 0,
            pod_phase=get_text(status, "phase"),
            pod_reason=get_text(status, "reason"),
            container_reason=get_text(terminated, "reason") or reason,
            conditions=tuple(
                get_text(item, "reason")
                for item in get_list(status, "conditions")
                if item.get("status") == "True" and get_text(item, "reason")
            ),
            events=tuple(events),
            node_ready=False if node_silent else None,
            message=(agent.message or words or get_text(status, "message"))[-_MAX_MESSAGE_CHARS:],
        ),
    )


def _describe_end(terminated: Mapping[str, Any]) -> str:
    """Return how a container ended: its exit code, and the last line that it wrote; empty if it has not ended."""
    code = _read_int(terminated.get("exitCode"))
    if code is None:
        return ""
    reason = get_text(terminated, "reason")
    words = f"exit code {code}" + (f" ({reason})" if reason not in ("", "Error", "Completed") else "")
    lines = parse_termination_message(get_text(terminated, "message")).message.strip().splitlines()
    return f"{words}: {lines[-1].strip()[-_MAX_LINE_CHARS:]}" if lines else words


def _is_emptied(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod that was asked to end has no running container left, according to its kubelet.

    Kubelets up to version 1.21 delete a pod up to 10 s after its containers ended, and may report `ContainerCreating`
    for removed containers. A container that ended before the pod was asked to end may have been restarted.
    """
    metadata, spec, status = (get_mapping(pod, key) for key in ("metadata", "spec", "status"))
    delete_by_s = _read_time(metadata.get("deletionTimestamp"))
    statuses = get_list(status, "containerStatuses")
    if delete_by_s is None or not statuses or len(statuses) != len(get_list(spec, "containers")):
        return False
    grace_s = metadata.get("deletionGracePeriodSeconds")
    asked_s = delete_by_s - (grace_s if isinstance(grace_s, int) else 0)
    for container in statuses:
        state = get_mapping(container, "state")
        ended_s = _read_time(get_mapping(state, "terminated").get("finishedAt"))
        removed = get_text(get_mapping(state, "waiting"), "reason") == "ContainerCreating"
        if not (removed and status.get("phase") == "Running") and (ended_s is None or ended_s < asked_s):
            return False
    return not any("running" in get_mapping(init, "state") for init in get_list(status, "initContainerStatuses"))


def _read_time(value: object) -> float | None:
    """Return the Unix time in a field; None for the zero that a runtime writes for an unknown time."""
    time_s = read_time(value)
    return time_s if time_s is not None and time_s >= _FIRST_TIME_S else None


def _read_number(text: str | None) -> int | None:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > _MAX_NUMBER:
        return None
    return int(text)
