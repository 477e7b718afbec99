"""`ResourceWatches`: says when to look at a resource.

A resource is looked at when it is new, when it has changed other than by the operator's own writes, and when a pod of
its own has changed. After an outage of the API server a kind is listed again, and what was deleted since has no event:
then all resources of the namespace are looked at, spread over a while. Events decide nothing: the reconciler reads
everything again.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.errors import AccessDeniedError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, PODS, TEACHER_POOLS, ResourceType
from edl.kube.responses import NotServedError
from edl.kube.watch import KubeWatch
from edl.master.kube.members.naming import JOB_LABEL, MANAGED_BY, POOL_LABEL
from edl.master.kube.operator.monitoring import OperatorHealth
from edl.master.kube.operator.settings import ALL_NAMESPACES

logger = logging.getLogger(__name__)

_BEAT_S: Final = 1.0
"""Between two signs of life, and two looks at how the watches are."""
_GROUP_DELAY_S: Final = 0.05
"""Events of a resource's pods that come together are a single look: thirty workers end in the same moment."""
_RELIST_RATE: Final = 20.0
"""Looks a second after a new list."""
_RELIST_MOST_S: Final = 60.0
"""Over which these looks are spread at most."""
_OWNERS: Final = {JOB_LABEL: ELASTIC_JOBS.plural, POOL_LABEL: TEACHER_POOLS.plural}


class ResourceWatches:
    """Calls `on_key` from threads of its own with a resource's key, and seconds within which more may come.

    `is_own_status` says whether a resource's status is what the operator wrote last.
    """

    def __init__(
        self,
        client: KubeClient,
        types: Sequence[ResourceType],
        namespaces: Sequence[str],
        on_key: Callable[[str, float], object],
        is_own_status: Callable[[str, Mapping[str, Any]], bool],
        health: OperatorHealth,
    ) -> None:
        self._namespaces = namespaces
        self._on_key = on_key
        self._is_own_status = is_own_status
        self._health = health
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, ...]] = {}
        self._relisted: set[tuple[ResourceType, str]] = set()
        self._denied: dict[str, str] = {}
        self._reason = "the watches have not begun"
        self._ready = threading.Event()  # a watch's thread may be faster than this constructor
        self._watches = {
            (kind, namespace): KubeWatch(
                client,
                kind,
                "" if namespace == ALL_NAMESPACES else namespace,
                label_selector="=".join(MANAGED_BY) if kind == PODS else "",
                on_change=functools.partial(self._take, kind, namespace),
            )
            for namespace in namespaces
            for kind in (*types, PODS)
        }
        self._loop = BackgroundLoop("edl-operator-watches", self._step)
        self._ready.set()

    def close(self) -> None:
        """Stop watching."""
        self._loop.close()
        for watch in self._watches.values():
            watch.close()

    def _take(self, kind: ResourceType, namespace: str, change: str, obj: Object | None) -> None:
        self._ready.wait()
        if change == "LISTED":
            with self._lock:
                self._relisted.add((kind, namespace))
            self._loop.wake()
        elif obj is not None and kind == PODS:
            for key in _list_owners([obj]):
                self._on_key(key, _GROUP_DELAY_S)
        elif obj is not None:
            self._take_resource(_key_of(kind, obj), change, obj)

    def _take_resource(self, key: str, change: str, obj: Object) -> None:
        seen = _fingerprint(obj)
        with self._lock:
            is_same = change != "DELETED" and self._seen.get(key) == seen
            self._seen[key] = seen
            if change == "DELETED":
                del self._seen[key]
        if not is_same or not self._is_own_status(key, obj.get("status") or {}):
            self._on_key(key, 0.0)

    def _step(self) -> float | None:
        self._health.beat()
        with self._lock:
            relisted, self._relisted = self._relisted, set()
        for kind, namespace in relisted:
            self._look_at_all(kind, namespace)
        reason = self._find_reason()
        self._health.set_waiting(reason)
        if reason != self._reason:
            self._reason = reason
            if reason:
                logger.warning("%s; the operator waits for it", reason)
            else:
                watched = [namespace for namespace in self._namespaces if namespace not in self._denied]
                logger.info("resources and pods are watched in %s", ", ".join(watched))
        return _BEAT_S

    def _look_at_all(self, kind: ResourceType, namespace: str) -> None:
        """Look at all resources that a new list may have changed: those that it has, and those that were there."""
        listed = self._watches[kind, namespace].objects.values()
        with self._lock:
            keys = {key for key in self._seen if namespace in (key.split("/")[1], ALL_NAMESPACES)}
            if kind == PODS:
                keys.update(_list_owners(listed))
            else:
                keys = {key for key in keys if key.startswith(f"{kind.plural}/")}
                for key in keys:
                    del self._seen[key]
                self._seen.update((_key_of(kind, obj), _fingerprint(obj)) for obj in listed)
                keys.update(_key_of(kind, obj) for obj in listed)
        spread_s = min(_RELIST_MOST_S, len(keys) / _RELIST_RATE)
        for key in keys:
            self._on_key(key, random.uniform(0.0, spread_s))

    def _find_reason(self) -> str:
        """Return for what the watches wait, in words; a namespace that may not be watched is left out."""
        denied: dict[str, str] = {}
        reason, missing = "", set()
        for (kind, namespace), watch in self._watches.items():
            error = watch.error
            if isinstance(error, AccessDeniedError):
                denied[namespace] = str(error)
            elif isinstance(error, NotServedError):
                missing.add(f"{kind.plural}.{kind.group}/{kind.version}")
            elif not watch.listed:
                reason = reason or watch.stale or "the watches have not begun"
        if len(denied) == len(self._namespaces):
            return next(iter(denied.values()))
        for namespace in denied.keys() - self._denied.keys():
            logger.warning("namespace %s is left out until this is allowed: %s", namespace, denied[namespace])
        self._denied = denied
        return f"the cluster has no resource {', '.join(sorted(missing))}: install the CRD" if missing else reason


def _key_of(kind: ResourceType, obj: Object) -> str:
    return f"{kind.plural}/{obj['metadata'].get('namespace')}/{obj['metadata'].get('name')}"


def _fingerprint(obj: Object) -> tuple[str, ...]:
    """Return what of a resource is not its status."""
    metadata = obj["metadata"]
    return tuple(
        repr(metadata.get(part)) for part in ("uid", "generation", "deletionTimestamp", "labels", "annotations")
    )


def _list_owners(pods: Iterable[Object]) -> list[str]:
    """Return the keys of the resources that pods belong to."""
    found = []
    for pod in pods:
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        found += [f"{_OWNERS[name]}/{metadata['namespace']}/{labels[name]}" for name in _OWNERS if labels.get(name)]
    return found
