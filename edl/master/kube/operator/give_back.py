"""`GiveBackMeter`: how long pods of others wait for what teachers have borrowed, as the metric `edl_give_back_seconds`.

It follows the events of all pods of the cluster. The API's own times have whole seconds, so the observer's clock
counts, from the event of a pod's creation to the event that gives it a node. Both come a few milliseconds late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

from edl.kube.objects import Object
from edl.master.kube.members.naming import OWNER_UID_LABEL, POOL_LABEL

_SECONDS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)
"""The bar is 2 s in the median, and a teacher's grace period (10 s unless set otherwise) at most."""
_MOST_PODS: Final = 10_000
"""Pods of which is remembered since when they wait: a megabyte. The oldest are forgotten first."""


@dataclass
class _Waiting:
    """A pod that has no node yet, and whether the scheduler has said that no node has room for it."""

    since_s: float
    refused: bool = False


class GiveBackMeter:
    """Counts pods that waited for a teacher to leave. To be called by a single thread.

    Such a pod is none of EDL's; the scheduler found no node for it at first, or nominated one; and while it waited a
    pool's teacher was leaving the node that it then got. Pods that were there before the watch began have no
    known time, and do not count.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = Histogram(
            "edl_give_back_seconds",
            "Seconds from a pod's creation to its node, of pods for which a teacher left",
            buckets=_SECONDS,
            registry=registry,
        )
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._left: dict[str, float] = {}  # node -> when a teacher was last seen to leave it

    def record(self, event: str, pod: Object | None) -> None:
        """Take note of an event of `KubeWatch`."""
        if pod is None:  # the watch was interrupted, and events are missing
            self._waiting.clear()
            self._left.clear()
            return
        metadata, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
        labels, uid, node = metadata.get("labels") or {}, metadata.get("uid", ""), spec.get("nodeName") or ""
        now_s = self._clock()
        if POOL_LABEL in labels and node and (metadata.get("deletionTimestamp") or event == "DELETED"):
            self._left[node] = now_s
        if OWNER_UID_LABEL in labels:
            return
        if event == "ADDED" and not node:
            self._waiting[uid] = _Waiting(now_s)
            if len(self._waiting) > _MOST_PODS:
                del self._waiting[next(iter(self._waiting))]
        waiting = self._waiting.get(uid)
        if waiting is None:
            return
        waiting.refused = waiting.refused or bool(status.get("nominatedNodeName")) or _is_unschedulable(status)
        if node or event == "DELETED":
            del self._waiting[uid]
        if event != "DELETED" and node and waiting.refused and self._left.get(node, -math.inf) >= waiting.since_s:
            self._seconds.observe(now_s - waiting.since_s)


def _is_unschedulable(status: Object) -> bool:
    conditions = status.get("conditions") or ()
    return any(item.get("type") == "PodScheduled" and item.get("reason") == "Unschedulable" for item in conditions)
