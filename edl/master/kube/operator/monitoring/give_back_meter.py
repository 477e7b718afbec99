"""`GiveBackMeter`: how long pods of others wait for what teachers have borrowed, as a metric."""

from __future__ import annotations

import threading
import time
from typing import Final, cast

from prometheus_client import CollectorRegistry, Histogram

from edl.kube.objects import Object
from edl.master.kube.pools import GiveBackTracker
from edl.master.kube.pools.give_back import PodEvent

__all__ = ["GiveBackMeter"]

_SECONDS: Final = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)
"""The bar is 2 s in the median, and a teacher's grace period (10 s unless set otherwise) at most."""


class GiveBackMeter:
    """Counts events of pods from two sources, a namespace's watch and the cluster's. Thread-safe.

    The cluster's watch sees all pods that a teacher may make room for; without it those of the namespaces count.

    Args:
        registry: to which `edl_give_back_seconds` is added.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "edl_give_back_seconds",
            "Seconds from a pod's creation to its node, of pods for which a teacher left",
            buckets=_SECONDS,
            registry=registry,
        )
        self._lock = threading.Lock()
        self._namespaces = GiveBackTracker()
        self._cluster = GiveBackTracker()
        self._cluster_known = False

    def record_cluster(self, event: str, pod: Object | None) -> None:
        """Count an event of the cluster's watch.

        Args:
            event: `ADDED`, `MODIFIED` or `DELETED`; `LISTED` or `STALE` where events may be missing.
            pod: the Kubernetes object; None with the latter two.
        """
        with self._lock:
            if pod is None:
                self._cluster.reset()
                self._cluster_known = event == "LISTED"
            else:
                self._record(self._cluster, event, pod, self._cluster_known)

    def record_namespace(self, event: str, pod: Object) -> None:
        """Count an event of a namespace's watch.

        Args:
            event: `ADDED`, `MODIFIED` or `DELETED`; empty for a pod that was listed.
            pod: the Kubernetes object.
        """
        if event:
            with self._lock:
                self._record(self._namespaces, event, pod, not self._cluster_known)

    def _record(self, tracker: GiveBackTracker, event: str, pod: Object, counted: bool) -> None:
        found = tracker.record(cast("PodEvent", event), pod, time.monotonic())
        if found is not None and counted:
            self._seconds.observe(found.seconds)
