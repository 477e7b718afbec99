"""The operator's metrics and health, with the reason if the operator is not live or not ready."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from edl.kube.objects import Object
from edl.master.kube.members.pods import OWNER_UID_LABEL, POOL_LABEL

_BEAT_LIMIT_S: Final = 60.0  # a heartbeat is due each second; a machine that swaps is late by seconds, not by a minute
_WORK_LIMIT_S: Final = 300.0  # of about ten requests, each with a deadline of 30 s: a longer reconciliation hangs
_AWAY_LIMIT_S: Final = 60.0  # then not ready: an API server that is being replaced is unreachable for seconds


class OperatorHealth:
    """Collects heartbeats; `get_stuck_s` returns how long the slowest reconciliation has been running. Thread-safe.

    While the API server is unreachable, the operator is not ready, but live: a restart would not help.
    """

    def __init__(self, get_stuck_s: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._get_stuck_s = get_stuck_s
        self._clock = clock
        self._lock = threading.Lock()
        self._beat_s = self._clock()
        self._waiting = "the watches have not started"
        self._failing_since_s: float | None = None

    def beat(self) -> None:
        self._beat_s = self._clock()

    def set_waiting(self, reason: str) -> None:
        """Record why the watches wait; `reason` is empty if they do not wait."""
        self._waiting = reason

    def note_request(self, code: int) -> bool:
        """Record a request to the API server; return whether the server has just come back or gone away."""
        away = code == 0 or code >= 500
        with self._lock:
            changed = away != (self._failing_since_s is not None)
            if not away:
                self._failing_since_s = None
            elif self._failing_since_s is None:
                self._failing_since_s = self._clock()
            return changed

    def check_live(self) -> str:
        """Return why the operator should be restarted; empty if it is healthy."""
        silent_s = self._clock() - self._beat_s
        if silent_s > _BEAT_LIMIT_S:
            return f"the watches' loop has given no sign of life for {silent_s:.0f} s"
        stuck_s = self._get_stuck_s()
        if stuck_s > _WORK_LIMIT_S:
            return f"the work on a resource has taken {stuck_s:.0f} s"
        return ""

    def check_ready(self) -> str:
        """Return why the operator is not working now; empty if it is working."""
        if self._waiting:
            return self._waiting
        since_s = self._failing_since_s
        if since_s is not None and self._clock() - since_s > _AWAY_LIMIT_S:
            return f"the API server has been unreachable for {self._clock() - since_s:.0f} s"
        return ""


_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Reconciling a resource at rest takes two requests of a few milliseconds each; a request that times out takes thirty
seconds."""


class OperatorMetrics:
    """The operator's metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        self._reconciles = Histogram(
            "edl_operator_reconcile_seconds",
            "Seconds to reconcile a resource, including all requests",
            ["kind"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._failures = Counter(
            "edl_operator_reconcile_failures",
            "Failed reconciliations, which are retried",
            ["kind", "error"],
            registry=self.registry,
        )

    def count_reconcile(self, key: str, seconds: float, error: Exception | None) -> None:
        kind = key.partition("/")[0]
        self._reconciles.labels(kind).observe(seconds)
        if error is not None:
            self._failures.labels(kind, type(error).__name__).inc()


_GIVE_BACK_S: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)
"""The targets are a median of 2 s, and a maximum of a teacher's grace period (10 s by default)."""
_MOST_PODS: Final = 10_000  # waiting pods remembered, about a megabyte; the oldest are forgotten first


class GiveBackMeter:
    """Counts pods that waited for a teacher to leave. For a single thread.

    Such a pod does not belong to EDL. At first, the scheduler found no node for it, or nominated one; while the pod
    waited, a pool's teacher left the node that the pod then got. Pods older than the watch do not count.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = Histogram(
            "edl_give_back_seconds",
            "Seconds from a pod's creation until it got a node, for pods for which a teacher left",
            buckets=_GIVE_BACK_S,
            registry=registry,
        )
        self._clock = clock
        self._waiting: dict[str, float] = {}  # pod without a node -> since when
        self._refused: set[str] = set()  # those of them for which the scheduler has found no room
        self._left: dict[str, float] = {}  # node -> when a teacher was last seen to leave it

    def record(self, event: str, pod: Object | None) -> None:
        """Process an event from `KubeWatch`."""
        if pod is None:  # the watch was interrupted, and events are missing
            self._waiting.clear()
            self._refused.clear()
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
            self._waiting[uid] = now_s
            if len(self._waiting) > _MOST_PODS:
                self._forget(next(iter(self._waiting)))
        since_s = self._waiting.get(uid)
        if since_s is None:
            return
        if status.get("nominatedNodeName") or _is_unschedulable(status):
            self._refused.add(uid)
        if event != "DELETED" and node and uid in self._refused and self._left.get(node, -math.inf) >= since_s:
            self._seconds.observe(now_s - since_s)
        if node or event == "DELETED":
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        del self._waiting[uid]
        self._refused.discard(uid)


def _is_unschedulable(status: Object) -> bool:
    conditions = status.get("conditions") or ()
    return any(item.get("type") == "PodScheduled" and item.get("reason") == "Unschedulable" for item in conditions)
