"""`CapacityWatch`: follows nodes and pods of the whole cluster, and tells its idle capacity.

It needs the read-only ClusterRole `edl-capacity` (list and watch of nodes and pods). Without it
capacity is unknown. The log says so once, and the watch retries every few seconds, so a role added later is noticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import NODES, PODS
from edl.kube.watch import KubeWatch
from edl.master.kube.capacity import ClusterCapacity, NodeCapacity, PodClaim

logger = logging.getLogger(__name__)

_KEPT_S: Final = 60.0
"""How long the last capacity counts while the API server does not answer. After that, access was probably withdrawn,
and capacity is unknown."""

T = TypeVar("T")


class CapacityWatch:
    """Follows nodes and pods of the cluster, until it is closed.

    In a watch's thread, `on_change` is called when capacity may have changed, and `on_pod` with each event of a pod, as
    `KubeWatch` has it.
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
        self._nodes = _Parsed(NodeCapacity.of)
        self._pods = _Parsed(PodClaim.of)
        self._built: ClusterCapacity | None = None
        self._stale_since_s: float | None = None
        self._reason = ""
        self._ready = threading.Event()  # a watch's thread may be faster than this constructor
        self._node_watch = KubeWatch(client, NODES, "", on_change=self._take_node)
        self._pod_watch = KubeWatch(client, PODS, "", on_change=self._take_pod)
        self._ready.set()

    @property
    def reason(self) -> str:
        """Why capacity is unknown or old; empty if it is known."""
        return self._node_watch.stale or self._pod_watch.stale

    def current(self) -> ClusterCapacity | None:
        """Return the capacity, rebuilt if something has changed; None if it is unknown."""
        with self._lock:
            if not (self._nodes.known and self._pods.known):
                return None
            since_s = self._stale_since_s
            if since_s is not None and time.monotonic() - since_s > _KEPT_S:
                return None
            if self._built is None:
                self._built = ClusterCapacity(list(self._nodes.found.values()), list(self._pods.found.values()))
            return self._built

    def close(self) -> None:
        """Stop following."""
        self._node_watch.close()
        self._pod_watch.close()

    def _take_node(self, change: str, node: Object | None) -> None:
        self._ready.wait()
        self._take(self._nodes, self._node_watch, change, node)

    def _take_pod(self, change: str, pod: Object | None) -> None:
        self._ready.wait()
        self._on_pod(change, pod)
        self._take(self._pods, self._pod_watch, change, pod)

    def _take(self, parsed: _Parsed[Any], watch: KubeWatch, change: str, obj: Object | None) -> None:
        with self._lock:
            if change != "STALE":
                if not parsed.take(change, obj, watch):
                    return
                self._built = None
            if not self.reason:
                self._stale_since_s = None
            elif self._stale_since_s is None:
                self._stale_since_s = time.monotonic()
            before, self._reason = self._reason, self.reason
        if self._reason != before:
            what = f"is not known: {self._reason}" if self._reason else "is known"
            logger.info("what is idle in the cluster %s", what)
        self._on_change()


class _Parsed(Generic[T]):
    """Objects of a watch, each read once: what cannot be read is left out."""

    def __init__(self, parse: Callable[[Object], T]) -> None:
        self._parse = parse
        self.found: dict[str, T] = {}
        self.known = False  # taken from the watch, which has listed them a moment before

    def take(self, change: str, obj: Object | None, watch: KubeWatch) -> bool:
        """Take an event; return whether it changes anything, which a node's heartbeat does not."""
        if obj is None:
            self.known = True
            self.found = {}
            for listed in watch.objects.values():
                self._put(listed)
            return True
        uid = _uid(obj)
        before = self.found.pop(uid, None)
        if change != "DELETED":
            self._put(obj)
        return self.found.get(uid) != before

    def _put(self, obj: Object) -> None:
        try:
            self.found[_uid(obj)] = self._parse(obj)
        except ValueError as exc:
            logger.warning("%s is left out: %s", (obj.get("metadata") or {}).get("name"), exc)


def _uid(obj: Object) -> str:
    metadata = obj.get("metadata") or {}
    return str(metadata.get("uid") or metadata.get("name") or "")
