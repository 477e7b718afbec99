"""`CapacityWatch`: nodes and pods of the whole cluster, followed; what is idle follows from them.

It needs the read-only ClusterRole `edl-capacity` (list and watch of nodes and pods). Without it there is no capacity,
which is said once, and asked again every few seconds, so that a role that comes later is noticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import NODES, PODS
from edl.kube.watch import KubeWatch
from edl.master.kube.capacity import ClusterCapacity, NodeCapacity, PodClaim

__all__ = ["CapacityWatch"]

logger = logging.getLogger(__name__)

_KEPT_S: Final = 60.0
"""For so long what was known last counts while the API server does not answer, which nothing can be done without
anyway. Longer, it is not allowed any more, and what is idle is not known."""


class CapacityWatch:
    """Follows nodes and pods of the cluster, until it is closed.

    Args:
        client: to ask with; it stays open when the watch is closed.
        on_change: called in a watch's thread when what is idle may have changed.
        on_pod: called in a watch's thread with each event of a pod: `ADDED`, `MODIFIED` or `DELETED` and the object,
            or `LISTED` or `STALE` and None, as `KubeWatch` has it.
    """

    def __init__(
        self,
        client: KubeClient,
        on_change: Callable[[], object] = lambda: None,
        on_pod: Callable[[str, Object | None], object] = lambda change, pod: None,
    ) -> None:
        self._on_change = on_change
        self._on_pod = on_pod
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeCapacity] = {}
        self._pods: dict[str, PodClaim] = {}
        self._nodes_known = self._pods_known = False  # taken from the watch, which has listed them a moment before
        self._built: ClusterCapacity | None = None
        self._stale_since_s: float | None = None
        self._reason = ""
        self._ready = threading.Event()  # a watch's thread may be faster than this constructor
        self._node_watch = KubeWatch(client, NODES, "", on_change=self._take_node)
        self._pod_watch = KubeWatch(client, PODS, "", on_change=self._take_pod)
        self._ready.set()

    @property
    def reason(self) -> str:
        """Why nothing is known of what is idle, or it is old; empty if it is known."""
        return self._node_watch.stale or self._pod_watch.stale

    def current(self) -> ClusterCapacity | None:
        """Return what is idle, built anew where something has changed; None where it is not known."""
        with self._lock:
            if not (self._nodes_known and self._pods_known):
                return None
            since_s = self._stale_since_s
            if since_s is not None and time.monotonic() - since_s > _KEPT_S:
                return None
            if self._built is None:
                self._built = ClusterCapacity(list(self._nodes.values()), list(self._pods.values()))
            return self._built

    def close(self) -> None:
        """Follow no more."""
        self._node_watch.close()
        self._pod_watch.close()

    def _take_node(self, change: str, node: Object | None) -> None:
        self._ready.wait()
        if change == "STALE":
            self._note_stale()
            return
        with self._lock:
            if node is None:
                self._nodes = {}
                for listed in self._node_watch.objects.values():
                    self._put_node(listed)
                self._nodes_known = True
            elif change == "DELETED":
                self._nodes.pop(_name(node), None)
            else:
                before = self._nodes.get(_name(node))
                self._put_node(node)
                if self._nodes.get(_name(node)) == before:
                    return  # a heartbeat
            self._built = None
        self._note_alive()
        self._on_change()

    def _take_pod(self, change: str, pod: Object | None) -> None:
        self._ready.wait()
        if change == "STALE":
            self._note_stale()
            self._on_pod(change, pod)
            return
        with self._lock:
            if pod is None:
                self._pods = {}
                for listed in self._pod_watch.objects.values():
                    self._put_pod(listed)
                self._pods_known = True
            elif change == "DELETED":
                self._pods.pop(_uid(pod), None)
            else:
                self._put_pod(pod)
            self._built = None
        self._note_alive()
        self._on_pod(change, pod)
        self._on_change()

    def _put_node(self, node: Object) -> None:
        try:
            self._nodes[_name(node)] = NodeCapacity.of(node)
        except ValueError as exc:
            self._nodes.pop(_name(node), None)
            logger.warning("node %s is left out: %s", _name(node), exc)

    def _put_pod(self, pod: Object) -> None:
        try:
            self._pods[_uid(pod)] = PodClaim.of(pod)
        except ValueError as exc:
            self._pods.pop(_uid(pod), None)
            logger.warning("pod %s is left out: %s", _name(pod), exc)

    def _note_stale(self) -> None:
        with self._lock:
            if self._stale_since_s is None:
                self._stale_since_s = time.monotonic()
        reason = self.reason
        if reason and reason != self._reason:
            self._reason = reason
            logger.info("what is idle in the cluster is not known: %s", reason)
        self._on_change()

    def _note_alive(self) -> None:
        with self._lock:
            if self.reason:  # looked at here: the other watch's thread may just note that it is stale
                return
            self._stale_since_s = None
        if self._reason:
            self._reason = ""
            logger.info("what is idle in the cluster is known")


def _name(obj: Object) -> str:
    return str((obj.get("metadata") or {}).get("name") or "")


def _uid(obj: Object) -> str:
    return str((obj.get("metadata") or {}).get("uid") or "")
