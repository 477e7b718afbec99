"""Events of the API: `EventRecorder` writes what `kubectl describe` shows, `PodEvidence` reads why pods ended.

The same event again is counted, not repeated. Events of a pod that has ended or is ending tell preemption from a node's
loss where the pod does not; of one that does not start, what is wrong with a volume, a secret or the sandbox.
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
from dataclasses import dataclass
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.errors import AccessDeniedError, ConflictError, InvalidObjectError, KubernetesError, QuotaExceededError
from edl.kube.client import KubeClient
from edl.kube.objects import Object, format_time, parse_time
from edl.kube.resource_types import EVENTS, ResourceType
from edl.master.kube.observation import EventNote
from edl.master.scaling.terminations import TerminationCause, TerminationReport, find_termination_cause
from edl.quoting import clip

logger = logging.getLogger(__name__)


_COMPONENT: Final = "edl-operator"
_MOST_WAITING: Final = 2000
"""Events that wait while the API server is away; the oldest are left out beyond that. Conditions tell what holds."""
_MOST_KNOWN: Final = 10_000
"""Events of which it is remembered when they were written last."""
_QUIET_S: Final = 30.0
"""An event that comes again sooner is counted with the next: what repeats each second is not worth a write each."""
_MOST_MESSAGE: Final = 1000
"""Characters: the API takes 1,024 bytes of a note in events.k8s.io, and kubectl shows them in a line."""
_CLOSE_S: Final = 2.0
"""How long `close` writes what waits: some dozens of events, and a fraction of a pod's grace period."""


@dataclass
class _Known:
    written_s: float
    uncounted: int = 0


class EventRecorder:
    """Writes events in a thread of its own, in the order in which they came.

    An event's name follows from its content, so that a second operator, or this one after a restart, counts it
    further.

    Args:
        clock: the time by the API server's clock, which dates conditions and pods, in seconds since 1970.
    """

    def __init__(self, api: KubeClient, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._clock = clock
        self._instance = f"{_COMPONENT}-{socket.gethostname()}-{os.getpid()}"[:128]
        self._waiting: deque[tuple[str, str, Object]] = deque(maxlen=_MOST_WAITING)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._backoff = Backoff(0.5, 30.0, jitter=0.2)
        self._denied = False
        self._loop = BackgroundLoop("edl-events", self._step)

    def record(self, kind: ResourceType, resource: Mapping[str, Any], note: EventNote) -> None:
        """Have an event written. Returns at once."""
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
        """Write what waits, as far as that takes no more than seconds, and end the thread."""
        deadline = time.monotonic() + _CLOSE_S
        while self._waiting and time.monotonic() < deadline and not self._backoff.failures:
            self._loop.wake()
            time.sleep(0.02)
        self._loop.close()

    def _step(self) -> float | None:
        while self._waiting and not self._loop_closing():
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
                # The namespace is being deleted or full, or another client changed the event at the same moment.
                logger.debug("event %s is left out: %s", event["reason"], exc)
            self._backoff.reset()
            if self._waiting and self._waiting[0][2] is event:
                self._waiting.popleft()
        return 60.0

    def _loop_closing(self) -> bool:
        loop = getattr(self, "_loop", None)  # the first step may come before the constructor has it
        return loop is not None and loop.closing

    def _write(self, name: str, namespace: str, event: Object) -> None:
        known = self._known.get(f"{namespace}/{name}")
        now_s = time.monotonic()
        if known is not None and now_s - known.written_s < _QUIET_S:
            known.uncounted += 1
            return
        more = 1 + (known.uncounted if known is not None else 0)
        try:
            if known is not None:
                raise ConflictError(name)  # it is there: count it, without an attempt to make it
            self._api.create(EVENTS, event, namespace)
        except ConflictError:
            self._count(name, namespace, event, more)
        self._known[f"{namespace}/{name}"] = _Known(now_s)
        self._known.move_to_end(f"{namespace}/{name}")
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _count(self, name: str, namespace: str, event: Object, more: int) -> None:
        there = self._api.get(EVENTS, name, namespace)
        if there is None:  # the API server forgets events after an hour
            self._api.create(EVENTS, event, namespace)
            return
        count = there.get("count")
        self._api.patch(
            EVENTS,
            name,
            {
                "metadata": {"resourceVersion": there["metadata"]["resourceVersion"]},
                "count": (count if isinstance(count, int) else 1) + more,
                "lastTimestamp": event["lastTimestamp"],
            },
            namespace,
        )


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
