"""API events: `EventRecorder` writes events for `kubectl describe`; `PodEvidence` reads events to find why pods ended.

A pod's events distinguish preemption from the loss of a node where the pod's status does not. They also show why a pod
does not start, for example because of a volume, a secret or the sandbox.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.errors import AccessDeniedError, ConflictError, InvalidObjectError, KubernetesError, QuotaExceededError
from edl.kube.client import KubeClient
from edl.kube.objects import Object, format_time, read_time
from edl.kube.resource_types import EVENTS, ResourceType
from edl.master.kube.observation import EventNote
from edl.master.scaling.terminations import TerminationCause, TerminationReport, find_termination_cause
from edl.quoting import clip

logger = logging.getLogger(__name__)


_COMPONENT: Final = "edl-operator"
_MOST_WAITING: Final = 2000  # events while the API server is unreachable; conditions tell the state anyway
_MOST_MESSAGE: Final = 1000  # characters: events.k8s.io limits a note to 1,024 bytes, and kubectl shows it in one line
_CLOSE_S: Final = 2.0  # for `close` to write a few dozen events, a fraction of a pod's grace period


class EventRecorder:
    """Writes events in order, in its own thread; `clock` returns the API server's Unix time.

    An event's name is derived from its content, so a second or restarted operator continues the counts of repeats.
    """

    def __init__(self, api: KubeClient, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._clock = clock
        self._instance = f"{_COMPONENT}-{socket.gethostname()}-{os.getpid()}"[:128]
        self._waiting: deque[tuple[str, str, Object]] = deque(maxlen=_MOST_WAITING)
        self._backoff = Backoff(0.5, 30.0, jitter=0.2)
        self._denied = self._closing = False
        self._loop = BackgroundLoop("edl-events", self._step)

    def record(self, kind: ResourceType, resource: Mapping[str, Any], note: EventNote) -> None:
        """Queue an event for writing. Returns at once."""
        metadata = resource["metadata"]
        text = "\0".join((str(metadata.get("uid")), note.type, note.reason, note.message, note.pod))
        name = f"{metadata['name'][:40].rstrip('.-')}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        now = format_time(self._clock())
        event: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": kind.api_version,
                "kind": kind.kind,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata.get("uid"),
                "resourceVersion": metadata.get("resourceVersion"),
            },
            "type": note.type,
            "reason": note.reason,
            "message": clip(note.message, _MOST_MESSAGE),
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        if note.pod:
            event["related"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": note.pod,
                "namespace": metadata["namespace"],
            }
        self._waiting.append((name, metadata["namespace"], event))
        self._loop.wake()

    def close(self) -> None:
        """Write queued events for a few seconds at most, and end the thread."""
        deadline = time.monotonic() + _CLOSE_S
        while self._waiting and time.monotonic() < deadline and not self._backoff.failures:
            self._loop.wake()
            time.sleep(0.02)
        self._closing = True
        self._loop.close()

    def _step(self) -> float | None:
        while self._waiting and not self._closing:
            name, namespace, event = self._waiting[0]
            try:
                self._write(name, namespace, event)
            except KubernetesError as exc:
                logger.debug("event %s waits: %s", event["reason"], exc)
                return self._backoff.next_wait_s()
            except AccessDeniedError as exc:
                if not self._denied:
                    self._denied = True
                    logger.warning("events are not shown: %s", exc)
            except (ConflictError, InvalidObjectError, QuotaExceededError) as exc:
                # The namespace is being deleted or is full, or another client changed the event at the same moment.
                logger.debug("event %s is skipped: %s", event["reason"], exc)
            self._backoff.reset()
            if self._waiting and self._waiting[0][2] is event:
                self._waiting.popleft()
        return 60.0

    def _write(self, name: str, namespace: str, event: Object) -> None:
        try:
            self._api.create(EVENTS, event, namespace)
        except ConflictError:
            there = self._api.get(EVENTS, name, namespace)
            if there is None:  # the API server has just forgotten it, as it does after an hour
                raise
            count = there.get("count")
            patch = {
                "metadata": {"resourceVersion": there["metadata"]["resourceVersion"]},
                "count": (count if isinstance(count, int) else 1) + 1,
                "lastTimestamp": event["lastTimestamp"],
            }
            self._api.patch(EVENTS, name, patch, namespace)


_KEPT_S: Final = 5.0  # for a pod's events: two reconciliations may follow each other closely
_STARTING_S: Final = 30.0
"""How long a pod may take to start on its node before its events are read, and the interval between these reads."""
_MOST_STARTING: Final = 5  # pods examined, the oldest first: a thousand may lack the same image or secret
_MOST_PODS: Final = 2000  # whose events are cached, a few hundred bytes each


class PodEvidence:
    """Reads the reasons of pods' events, with a rate limit per pod. Thread-safe."""

    def __init__(self, api: KubeClient) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, dict[str, str]]] = OrderedDict()

    def collect(self, pods: Iterable[Mapping[str, Any]], namespace: str, now_s: float) -> dict[str, dict[str, str]]:
        """Return reasons and messages of events, by uid of pods that have failed, are being deleted, or cannot start.

        For a pod that cannot start, only its latest event is returned, and only if this event says that the pod cannot
        start. Without permission to read events, no event is returned.
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
    """Return when an event was last seen, in the API's format; strings that sort earlier are earlier times."""
    metadata = event.get("metadata") or {}
    return str(event.get("lastTimestamp") or event.get("eventTime") or metadata.get("creationTimestamp") or "")


def _find_placed_s(pod: Mapping[str, Any]) -> float:
    """Return when a pod got its node or, if unknown, when it was created; 0 if both are unknown."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    times = [item.get("lastTransitionTime") for item in conditions if item.get("type") == "PodScheduled"]
    found = (read_time(text) for text in (*times, (pod.get("metadata") or {}).get("creationTimestamp")))
    return next((time_s for time_s in found if time_s is not None), 0.0)
