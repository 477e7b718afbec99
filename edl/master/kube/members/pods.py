"""A member pod as it was read: plain values, on which planners decide, and the evidence of its end.

What a pod's JSON tells of its end becomes the plain report that `edl.master.scaling.terminations` weighs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from edl.errors import ProtocolError
from edl.master.kube.members.naming import INDEX_LABEL, OWNER_UID_LABEL, ROLE_LABEL, TRY_LABEL
from edl.master.scaling.terminations import (
    TerminationCause,
    TerminationReport,
    find_termination_cause,
    parse_termination_message,
)

MAIN_CONTAINER: Final = "edl"
"""A container of this name is the member's, wherever it stands among others; without it, the first is."""
_MAX_MESSAGE_CHARS: Final = 4096  # of /dev/termination-log, the kubelet keeps no more
NO_EVENTS: Final[Mapping[str, str]] = {}
STARTING: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Why a container waits that nothing keeps from starting."""


@dataclass(frozen=True)
class StartFailure:
    """Why a pod's main container does not come to its start: an init container, a volume, a secret or the sandbox.

    Attributes:
        reason: why an init container waits, as `ErrImagePull`; `InitContainerFailed` if it has ended; of an event.
        message: the init container's name and its words, or the event's.
    """

    reason: str
    message: str


def get_mapping(parent: object, key: str) -> Mapping[str, Any]:
    """Return a mapping inside a mapping of JSON; empty where there is none."""
    value = parent.get(key) if isinstance(parent, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def get_list(parent: object, key: str) -> list[Mapping[str, Any]]:
    """Return the mappings of a list inside a mapping of JSON; empty where there is no list."""
    value = parent.get(key) if isinstance(parent, Mapping) else None
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def get_text(parent: object, key: str) -> str:
    """Return a text inside a mapping of JSON; empty where there is none."""
    value = parent.get(key) if isinstance(parent, Mapping) else None
    return value if isinstance(value, str) else ""


def find_main_container(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the container of a pod's spec that is the member; empty where there is no container."""
    containers = get_list(spec, "containers")
    named = [container for container in containers if container.get("name") == MAIN_CONTAINER]
    return (named or containers or [{}])[0]


def is_node_silent(pod: Mapping[str, Any]) -> bool:
    """Whether the node controller has marked a pod as not ready since its node no longer answers.

    It writes the condition `Ready` and leaves `ContainersReady` as the kubelet wrote it; the kubelet itself writes such
    a pair only where readiness gates are set.
    """
    if get_text(get_mapping(pod, "status"), "reason") == "NodeLost":
        return True
    if get_list(get_mapping(pod, "spec"), "readinessGates"):
        return False
    found = {
        get_text(item, "type"): get_text(item, "status") for item in get_list(get_mapping(pod, "status"), "conditions")
    }
    return found.get("Ready") in ("False", "Unknown") and found.get("ContainersReady") == "True"


def find_start_failure(pod: Mapping[str, Any], events: Mapping[str, str] = NO_EVENTS) -> StartFailure | None:
    """Return what keeps a pod from starting its main container; None if nothing does, or the pod is asked to end."""
    if get_mapping(pod, "metadata").get("deletionTimestamp"):
        return None  # that ends them as well
    status = get_mapping(pod, "status")
    for container in get_list(status, "initContainerStatuses"):
        state, name = get_mapping(container, "state"), get_text(container, "name")
        terminated, waiting = get_mapping(state, "terminated"), get_mapping(state, "waiting")
        code = _read_int(terminated.get("exitCode"))
        if code and get_text(status, "phase") == "Failed":
            how = f"{get_text(terminated, 'reason') or 'Error'}, exit code {code}"
            words = f"init container {name}: {how}: {get_text(terminated, 'message')}"
            return StartFailure("InitContainerFailed", words.rstrip(": "))
        if get_text(waiting, "reason") not in STARTING:
            words = f"init container {name}: {get_text(waiting, 'message')}"
            return StartFailure(get_text(waiting, "reason"), words.rstrip(": "))
    for reason, message in events.items():
        found = find_termination_cause(TerminationReport(events=(reason,))).cause
        if get_text(status, "phase") == "Pending" and found is TerminationCause.LAUNCH_FAILED:
            return StartFailure(reason, message)
    return None


def build_termination_report(pod: Mapping[str, Any], events: Mapping[str, str] = NO_EVENTS) -> TerminationReport:
    """Return what is known of a pod's end, or would be if it ended now."""
    status = get_mapping(pod, "status")
    main = get_text(find_main_container(get_mapping(pod, "spec")), "name")
    state: Mapping[str, Any] = {}
    for container in get_list(status, "containerStatuses"):
        if container.get("name") == main:
            state = get_mapping(container, "state")
    terminated, waiting = get_mapping(state, "terminated"), get_mapping(state, "waiting")
    agent = parse_termination_message(get_text(terminated, "message"))
    failure = None if terminated or "running" in state else find_start_failure(pod, events)
    words = failure.message if failure is not None else get_text(waiting, "message")
    return replace(
        agent,
        exit_code=_read_int(terminated.get("exitCode")),  # as the kubelet saw it: the agent may have been killed after
        signal=_read_int(terminated.get("signal")) or 0,
        pod_phase=get_text(status, "phase"),
        pod_reason=get_text(status, "reason"),
        container_reason=failure.reason if failure is not None else get_text(terminated or waiting, "reason"),
        conditions=tuple(
            get_text(item, "reason")
            for item in get_list(status, "conditions")
            if item.get("status") == "True" and get_text(item, "reason")
        ),
        events=tuple(events),
        node_ready=False if is_node_silent(pod) else None,
        message=(agent.message or words or get_text(status, "message"))[-_MAX_MESSAGE_CHARS:],
    )


def _read_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_MAX_NUMBER = 10**9  # of an index or try: what no operator reaches, and what every JSON reader holds exactly
_FIRST_TIME_S = 86_400.0
"""Earlier times are the zero of Unix or of Go: a runtime writes it where it does not know, as containerd does for a
container that never started."""


@dataclass(frozen=True)
class MemberPod:
    """A pod of an ElasticJob or a TeacherPool.

    Attributes:
        try_number: of the member's pods, from 0.
        phase: `status.phase`; `Pending` where none is written yet.
        ready: whether its containers say that they are ready.
        ready_s: since when they do, Unix time; None if they do not, or that is not known.
        restarts: how often its main container was restarted.
        unschedulable: the scheduler's words why it has none; empty if it did not say any.
        node: on which it is; empty before.
        deleting: it was asked to end; on a dead node it stays so.
        delete_by_s: when its grace period is over, Unix time; None if it is not deleting.
        created_s: when it was created, Unix time.
        scheduled_s: when it got its node, Unix time; None before.
        started_s: when its main container started; None before.
        finished_s: when its main container ended; None before.
        finished: its main container has ended, or the pod was given up before it began.
        emptied: none of its containers runs, and it was asked to end before they ended: what it held is free
            whether the API server still has it or not.
        waiting: reason for which its main container does not start, such as `ImagePullBackOff`, which an init container
            may have; empty if there is none.
        request: what its main container asks for, as in its spec: resource -> quantity.
        priority: by which the scheduler compares it.
        termination: what is known of its end; of a pod that goes on, what would be if it ended now.
    """

    name: str
    role: str
    index: int
    try_number: int
    uid: str
    phase: str = "Pending"
    ready: bool = False
    scheduled: bool = False
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
    request: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    termination: TerminationReport = field(default_factory=TerminationReport)
    ready_s: float | None = None
    restarts: int = 0

    @property
    def live(self) -> bool:
        """Whether it takes part, or will: it has neither ended nor been asked to."""
        return not self.deleting and not self.finished

    @property
    def occupying(self) -> bool:
        """Whether it holds its requests and was not asked to end: a sidecar may run on after its main container."""
        return not self.deleting and self.phase not in ("Succeeded", "Failed")

    @property
    def starting(self) -> bool:
        """Whether it has a node, and its containers are being started, or wait for what changes no pod: a volume."""
        return self.live and self.scheduled and self.phase == "Pending" and self.waiting in STARTING

    @property
    def failing(self) -> bool:
        """Whether its main container cannot start, or waits to be restarted: `waiting` says why."""
        return self.waiting not in STARTING

    @property
    def placed_s(self) -> float:
        """Since when its containers can be started, Unix time: it may have waited for its node for hours."""
        return self.created_s if self.scheduled_s is None else self.scheduled_s

    @property
    def pending(self) -> bool:
        """Whether it waits for a node."""
        return self.live and not self.scheduled

    @property
    def key(self) -> str:
        """The member's key in `status.members`, as `worker-0`."""
        return f"{self.role}-{self.index}"


def read_member_pods(
    pods: Iterable[Mapping[str, Any]], owner_uid: str, events: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[tuple[MemberPod, ...], tuple[str, ...]]:
    """Return an owner's member pods by role, index and try; and why others that have its label are none."""
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


def read_member_pod(pod: Mapping[str, Any], events: Mapping[str, str] = NO_EVENTS) -> MemberPod:
    """Read a member pod.

    Raises:
        ProtocolError: it is not a member's; the message says what is missing.
    """
    metadata, spec, status = (get_mapping(pod, key) for key in ("metadata", "spec", "status"))
    labels = {key: value for key, value in get_mapping(metadata, "labels").items() if isinstance(value, str)}
    name, uid, owner_uid = get_text(metadata, "name"), get_text(metadata, "uid"), labels.get(OWNER_UID_LABEL, "")
    index, try_number = _read_number(labels.get(INDEX_LABEL)), _read_number(labels.get(TRY_LABEL))
    role = labels.get(ROLE_LABEL, "")
    if not name or not uid:
        raise ProtocolError("a pod without name or uid")
    if index is None or try_number is None or not role:
        raise ProtocolError(f"pod {name}: no member: role, index or try is missing among its labels")
    controllers = [get_text(item, "uid") for item in get_list(metadata, "ownerReferences") if item.get("controller")]
    if controllers != [owner_uid]:
        raise ProtocolError(f"pod {name}: no member: it has the labels of a member, but is not controlled by its owner")
    conditions = {get_text(item, "type"): item for item in get_list(status, "conditions")}
    scheduled = conditions.get("PodScheduled", {})
    ready = conditions.get("Ready", {})
    is_ready = get_text(ready, "status") == "True"
    main = find_main_container(spec)
    state: Mapping[str, Any] = {}
    restarts: object = 0
    for container in get_list(status, "containerStatuses"):
        if container.get("name") == main.get("name"):
            state, restarts = get_mapping(container, "state"), container.get("restartCount")
    running, terminated, waiting = (get_mapping(state, key) for key in ("running", "terminated", "waiting"))
    phase = get_text(status, "phase") or "Pending"
    node = get_text(spec, "nodeName")
    failure = None if running or terminated else find_start_failure(pod, events)
    return MemberPod(
        name=name,
        role=role,
        index=index,
        try_number=try_number,
        uid=uid,
        phase=phase,
        ready=is_ready,
        ready_s=_read_time(ready.get("lastTransitionTime")) if is_ready else None,
        restarts=restarts if isinstance(restarts, int) else 0,
        scheduled=bool(node),
        unschedulable=get_text(scheduled, "message") if scheduled.get("reason") == "Unschedulable" and not node else "",
        node=node,
        node_silent=is_node_silent(pod),
        deleting=bool(metadata.get("deletionTimestamp")),
        delete_by_s=_read_time(metadata.get("deletionTimestamp")),
        created_s=_read_time(metadata.get("creationTimestamp")) or 0.0,
        scheduled_s=_read_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        started_s=_read_time(running.get("startedAt") or terminated.get("startedAt")),
        finished_s=_read_time(terminated.get("finishedAt")),
        finished=phase in ("Succeeded", "Failed") or "exitCode" in terminated,
        emptied=_is_emptied(pod),
        waiting=failure.reason if failure is not None else get_text(waiting, "reason"),
        waiting_message=failure.message if failure is not None else get_text(waiting, "message"),
        request=_read_request(main),
        priority=spec["priority"] if isinstance(spec.get("priority"), int) else 0,
        labels=labels,
        termination=build_termination_report(pod, events),
    )


def _is_emptied(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod that was asked to end has no running container left, as its kubelet says.

    A kubelet up to 1.21 deletes a pod up to 10 s after its containers have ended, and may say `ContainerCreating` of
    containers that it has removed. What ended before the pod was asked to may have been restarted since.
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
    """Return the Unix time that the API wrote; None for anything but a time with a zone after the clock's zero."""
    try:
        read = datetime.fromisoformat(value.replace("Z", "+00:00")) if isinstance(value, str) else None
        time_s = read.timestamp() if read is not None and read.tzinfo is not None else None
        return time_s if time_s is not None and time_s >= _FIRST_TIME_S else None
    except (ValueError, OverflowError):
        return None


def _read_number(text: str | None) -> int | None:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > _MAX_NUMBER:
        return None
    return int(text)


def _read_request(container: Mapping[str, Any]) -> dict[str, str]:
    """Return what a container asks for: a limit without a request is a request as well."""
    resources = get_mapping(container, "resources")
    asked = {**get_mapping(resources, "limits"), **get_mapping(resources, "requests")}
    return {name: str(amount) for name, amount in asked.items() if isinstance(amount, str | int)}
