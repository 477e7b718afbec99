"""What a pod's JSON tells of its end, as the plain report that `edl.master.scaling.terminations` weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from edl.master.scaling.termination_messages import parse_termination_message
from edl.master.scaling.terminations import TerminationCause, TerminationReport, find_termination_cause

__all__ = [
    "NO_EVENTS",
    "STARTING",
    "StartFailure",
    "build_termination_report",
    "find_start_failure",
    "find_main_container",
    "get_list",
    "get_mapping",
    "get_text",
    "is_node_silent",
]

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
