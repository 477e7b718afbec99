"""Which pods' logs are shown, and what they are called. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edl.master.kube.members.naming import INDEX_LABEL, ROLE_LABEL, TRY_LABEL

__all__ = ["MemberPodLog", "read_pod", "select_previous", "select_present", "sort_pods"]

_CONTAINER = "edl"


@dataclass(frozen=True)
class MemberPodLog:
    """A pod of a member, as far as its log goes.

    Attributes:
        member: such as "worker-0".
        pod: its name.
        uid: of the pod.
        container: whose log it is.
        attempt: the number of the member's pod.
        role: "worker", "teacher" or "master".
        index: of the member.
        started: the container runs or ran.
        ended: the container has ended, and no other will be started in the pod.
        detail: why it has not started, in a word.
    """

    member: str
    pod: str
    uid: str
    container: str
    attempt: int
    role: str
    index: int
    started: bool
    ended: bool
    detail: str = ""


def read_pod(pod: Mapping[str, Any]) -> MemberPodLog | None:
    """Read a pod; None for a pod that is no member's.

    Args:
        pod: as the API has it.
    """
    metadata, spec, status = (_record(pod.get(name)) for name in ("metadata", "spec", "status"))
    labels = _record(metadata.get("labels"))
    role, index = labels.get(ROLE_LABEL), str(labels.get(INDEX_LABEL))
    names = [str(_record(item).get("name")) for item in spec.get("containers") or ()]
    if not role or not index.isdigit() or not names:
        return None
    container = _CONTAINER if _CONTAINER in names else names[0]
    attempt = str(labels.get(TRY_LABEL) or 0)
    phase = status.get("phase")
    statuses = map(_record, status.get("containerStatuses") or ())
    found: Mapping[str, Any] = next((item for item in statuses if item.get("name") == container), {})
    state = _record(found.get("state"))
    waiting = _record(state.get("waiting"))
    return MemberPodLog(
        member=f"{role}-{index}",
        pod=str(metadata.get("name")),
        uid=str(metadata.get("uid")),
        container=container,
        attempt=int(attempt) if attempt.isdigit() else 0,
        role=str(role),
        index=int(index),
        started="running" in state or "terminated" in state or "terminated" in _record(found.get("lastState")),
        ended=phase in ("Succeeded", "Failed"),
        detail=str(waiting.get("reason") or status.get("reason") or phase or ""),
    )


def sort_pods(pods: Iterable[Mapping[str, Any]], role: str | None, index: int | None) -> list[MemberPodLog]:
    """Return members' pods, by role, index and attempt.

    Args:
        pods: as the API has them.
        role: only these; None for all.
        index: only this; None for all.
    """
    found = [item for item in map(read_pod, pods) if item is not None]
    kept = [item for item in found if role in (None, item.role) and index in (None, item.index)]
    return sorted(kept, key=lambda item: (item.role, item.index, item.attempt))


def select_present(pods: Iterable[MemberPodLog]) -> list[MemberPodLog]:
    """Return the newest pod of every member.

    Args:
        pods: in order.
    """
    return list({item.member: item for item in pods}.values())


def select_previous(pods: Iterable[MemberPodLog]) -> list[MemberPodLog]:
    """Return the pod before the newest, of every member that has it.

    Args:
        pods: in order.
    """
    newest: dict[str, MemberPodLog] = {}
    before: dict[str, MemberPodLog] = {}
    for item in pods:
        if item.member in newest:
            before[item.member] = newest[item.member]
        newest[item.member] = item
    return list(before.values())


def _record(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
