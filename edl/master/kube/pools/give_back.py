"""How long a pod waits for what teachers borrowed: from its creation to its node, as a watch of pods shows them.

The API's own times have whole seconds, so the observer's clock counts, from the event of the pod's creation to the
event that gives it a node. Both come a few milliseconds late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from edl.master.kube.members.naming import OWNER_UID_LABEL, POOL_LABEL

__all__ = ["GiveBack", "GiveBackTracker", "PodEvent"]

PodEvent = Literal["ADDED", "MODIFIED", "DELETED"]

_MOST_PODS: Final = 10_000
"""Pods of which is remembered since when they wait: a megabyte. The oldest are forgotten first."""


@dataclass(frozen=True)
class GiveBack:
    """A pod that got a place that a teacher had.

    Attributes:
        namespace: of the pod.
        pod: its name.
        node: on which it is.
        seconds: from its creation until it had that node.
    """

    namespace: str
    pod: str
    node: str
    seconds: float


class GiveBackTracker:
    """Finds pods that waited for a teacher to leave, in the events of a watch.

    Such a pod is none of EDL's; the scheduler found no node for it at first, or nominated one; and while it waited a
    pool's teacher was leaving the node that it then got. Pods that were there before the watch began have no
    known time, and do not count.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}
        self._left: dict[str, float] = {}  # node -> when a teacher was last seen to leave it

    def record(self, event: PodEvent, pod: Mapping[str, Any], now_s: float) -> GiveBack | None:
        """Take note of an event.

        Args:
            event: what the watch says of the pod.
            pod: the Kubernetes object.
            now_s: when the event came, in seconds of a monotonic clock.

        Returns:
            The give-back that the event completes; None if it completes none.
        """
        metadata, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
        labels, uid, node = metadata.get("labels") or {}, metadata.get("uid", ""), spec.get("nodeName") or ""
        if POOL_LABEL in labels:
            if node and (metadata.get("deletionTimestamp") or event == "DELETED"):
                self._left[node] = now_s
            return None
        if OWNER_UID_LABEL in labels:
            return None
        if event == "ADDED" and not node:
            self._waiting[uid] = _Waiting(now_s)
            if len(self._waiting) > _MOST_PODS:
                del self._waiting[next(iter(self._waiting))]
        waiting = self._waiting.get(uid)
        if waiting is None:
            return None
        if event == "DELETED":
            del self._waiting[uid]
            return None
        if not node:
            waiting.refused = waiting.refused or _is_refused(status)
            return None
        del self._waiting[uid]
        refused = waiting.refused or bool(status.get("nominatedNodeName"))
        if not refused or self._left.get(node, -math.inf) < waiting.since_s:
            return None
        return GiveBack(metadata.get("namespace", ""), metadata.get("name", ""), node, now_s - waiting.since_s)

    def reset(self) -> None:
        """Forget what waits: the watch was interrupted, and events are missing."""
        self._waiting.clear()
        self._left.clear()


@dataclass
class _Waiting:
    """A pod that has no node yet.

    Attributes:
        since_s: when it was created.
        refused: the scheduler has said that no node has room for it.
    """

    since_s: float
    refused: bool = False


def _is_refused(status: Mapping[str, Any]) -> bool:
    return bool(status.get("nominatedNodeName")) or any(
        condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable"
        for condition in status.get("conditions") or ()
    )
