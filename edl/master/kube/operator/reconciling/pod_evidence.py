"""Events of pods that have ended or are ending: they tell preemption from a node's loss where the pod does not."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from edl.errors import AccessDeniedError
from edl.kube.resource_types import EVENTS
from edl.master.kube.operator.reconciling.kube_api import KubeApi

__all__ = ["PodEvidence"]

_KEPT_S: Final = 5.0
"""How long events of a pod are not read again: the next look may be of the same moment, and events come late."""
_MOST_PODS: Final = 2000
"""Of which events are kept: some hundred bytes each."""


class PodEvidence:
    """Reads the reasons of pods' events, of each pod once in a while at most. Thread-safe.

    Args:
        api: calls of the API server.
    """

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, tuple[str, ...]]] = OrderedDict()

    def collect(self, pods: Iterable[Mapping[str, Any]], namespace: str) -> dict[str, tuple[str, ...]]:
        """Return reasons of events by uid, of the pods that are ending or have ended.

        An operator that may not read events goes by what the pods say themselves.

        Args:
            pods: as the API has them.
            namespace: that they are in.
        """
        found = {}
        for pod in pods:
            metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
            if metadata.get("deletionTimestamp") or status.get("phase") == "Failed":
                found[str(metadata.get("uid"))] = self._read(str(metadata.get("uid")), namespace)
        return found

    def _read(self, uid: str, namespace: str) -> tuple[str, ...]:
        now_s = time.monotonic()
        with self._lock:
            read_s, reasons = self._known.get(uid, (-_KEPT_S, ()))
        if now_s - read_s < _KEPT_S:
            return reasons
        try:
            events = self._api.list(EVENTS, namespace, field_selector=f"involvedObject.uid={uid}").items
        except AccessDeniedError:
            events = []
        reasons = tuple(sorted({str(event.get("reason") or "") for event in events} - {""}))
        with self._lock:
            self._known[uid] = now_s, reasons
            self._known.move_to_end(uid)
            while len(self._known) > _MOST_PODS:
                self._known.popitem(last=False)
        return reasons
