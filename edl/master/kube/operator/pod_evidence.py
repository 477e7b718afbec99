"""Events of pods that have ended or are ending: they tell preemption from a node's loss where the pod does not.

Also of pods that do not start: only events tell what is wrong with a volume, a secret or the sandbox.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from edl.errors import AccessDeniedError
from edl.kube.client import KubeClient
from edl.kube.objects import parse_time
from edl.kube.resource_types import EVENTS
from edl.master.scaling.terminations import TerminationCause, TerminationReport, find_termination_cause

_KEPT_S: Final = 5.0
"""How long events of a pod are not read again: the next look may be of the same moment, and events come late."""
_STARTING_S: Final = 30.0
"""A pod that has a node and has not started after so long may be kept from it; its events are read that seldom."""
_MOST_STARTING: Final = 5
"""Of pods that do not start, the oldest are looked at: a thousand pull their image, or miss their secret, alike."""
_MOST_PODS: Final = 2000
"""Of which events are kept: some hundred bytes each."""


class PodEvidence:
    """Reads the reasons of pods' events, of each pod once in a while at most. Thread-safe."""

    def __init__(self, api: KubeClient) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, dict[str, str]]] = OrderedDict()

    def collect(self, pods: Iterable[Mapping[str, Any]], namespace: str, now_s: float) -> dict[str, dict[str, str]]:
        """Return reasons of events and their messages by uid, of the pods that are ending or have ended.

        Of pods that do not start, only an event by which they cannot, and only while none follows it.

        An operator that may not read events goes by what the pods say themselves.
        """
        found = {}
        starting: list[tuple[float, str]] = []
        for pod in pods:
            metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
            if metadata.get("deletionTimestamp") or status.get("phase") == "Failed":
                found[str(metadata.get("uid"))] = self._read(str(metadata.get("uid")), namespace, _KEPT_S)
            elif status.get("phase") == "Pending" and (pod.get("spec") or {}).get("nodeName"):
                starting.append((_find_placed_s(pod), str(metadata.get("uid"))))
        for placed_s, uid in sorted(starting)[:_MOST_STARTING]:
            if now_s - placed_s < _STARTING_S:
                continue
            last = dict(list(self._read(uid, namespace, _STARTING_S).items())[-1:])
            if find_termination_cause(TerminationReport(events=tuple(last))).cause is TerminationCause.LAUNCH_FAILED:
                found[uid] = last
        return found

    def _read(self, uid: str, namespace: str, kept_s: float) -> dict[str, str]:
        """Return reasons and messages of a pod's events, the newest last."""
        now_s = time.monotonic()
        with self._lock:
            read_s, reasons = self._known.get(uid, (-kept_s, {}))
        if now_s - read_s < kept_s:
            return reasons
        try:
            events = self._api.list(EVENTS, namespace, field_selector=f"involvedObject.uid={uid}").items
        except AccessDeniedError:
            events = []
        reasons = {}
        for event in sorted(events, key=_get_time):
            if reason := str(event.get("reason") or ""):
                reasons.pop(reason, None)
                reasons[reason] = str(event.get("message") or "")
        with self._lock:
            self._known[uid] = now_s, reasons
            self._known.move_to_end(uid)
            while len(self._known) > _MOST_PODS:
                self._known.popitem(last=False)
        return reasons


def _get_time(event: Mapping[str, Any]) -> str:
    """Return when an event was last seen, as the API writes it: such times are in the order of their texts."""
    metadata = event.get("metadata") or {}
    return str(event.get("lastTimestamp") or event.get("eventTime") or metadata.get("creationTimestamp") or "")


def _find_placed_s(pod: Mapping[str, Any]) -> float:
    """Return when a pod got its node, or was made; 0 where it does not say."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    times = [item.get("lastTransitionTime") for item in conditions if item.get("type") == "PodScheduled"]
    for text in (*times, (pod.get("metadata") or {}).get("creationTimestamp")):
        try:
            return parse_time(str(text))
        except (ValueError, OverflowError):
            continue
    return 0.0
