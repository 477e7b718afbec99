"""When to reconcile a resource: `WorkQueue` hands keys to workers, and `ResourceWatches` fills the queue.

The queue is client-go's rate-limited work queue (k8s.io/client-go/util/workqueue): a key that is added while a worker
handles it is due again afterwards. Each failure doubles the wait until the key is retried, but does not delay keys
added in the meantime.

A resource is reconciled when it is new, when one of its pods has changed, and when someone other than the operator has
changed the resource. An outage of the API server hides deletions, so after an outage all resources in the namespace are
reconciled, spread over some time.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.errors import AccessDeniedError, ClosedError, ConflictError, EDLError, TemporaryError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, PODS, TEACHER_POOLS, ResourceType
from edl.kube.responses import NotServedError
from edl.kube.watch import KubeWatch
from edl.master.kube.members.pods import JOB_LABEL, MANAGED_BY, POOL_LABEL
from edl.master.kube.operator.monitoring import OperatorHealth

logger = logging.getLogger(__name__)

ALL_NAMESPACES: Final = "*"
"""Stands for the whole cluster, in place of a namespace."""

_JITTER: Final = 0.2  # so that keys that failed together are not retried together


_LOOK_S: Final = 1.0  # longest single wait of a worker, which then checks whether the queue is closed
_CLOSE_S: Final = 10.0  # for work in progress, a few requests; the next operator finishes the rest


class WorkQueue:
    """Calls a function for each key that is due, in a few threads, never concurrently for the same key.

    `work` returns the seconds after which to call it again, or None for never; if it raises an error, it is called
    again after a back-off. `on_result` receives the key, the seconds that the call took, and the error or None.
    """

    def __init__(
        self,
        work: Callable[[str], float | None],
        *,
        workers: int = 4,
        on_result: Callable[[str, float, Exception | None], None] = lambda key, seconds, error: None,
        backoff_s: tuple[float, float] = (0.2, 60.0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._on_result = on_result
        self._backoff_s = backoff_s
        self._clock = clock
        self._due: dict[str, float] = {}
        self._active: dict[str, float] = {}
        self._failures: dict[str, Backoff] = {}
        self._warned: dict[str, str] = {}  # the last warning about each key that fails, which is logged once
        self._changed = threading.Condition()
        self._closed = False
        self._loops = [BackgroundLoop(f"edl-reconcile-{number}", self._step) for number in range(workers)]

    def add(self, key: str, delay_s: float = 0.0) -> None:
        """Queue a key after `delay_s`; if the key is added again within that time, there is still only one call."""
        with self._changed:
            self._add(key, self._clock() + delay_s)
            self._changed.notify()

    def __len__(self) -> int:
        with self._changed:
            return len(self._due.keys() | self._active.keys())

    def get_stuck_s(self) -> float:
        """Return for how many seconds the slowest call has been running."""
        with self._changed:
            now_s = self._clock()
            return now_s - min(self._active.values(), default=now_s)

    def close(self) -> None:
        """Start no new work, and wait a few seconds for work in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_S
        for loop in self._loops:
            loop.close(max(0.0, deadline - time.monotonic()))

    def take(self) -> str | None:
        """Return a key that is due, to be worked on until `finish` is called; None if no key is due."""
        with self._changed:
            key, due_s = self._find_next()
            if due_s > self._clock():
                return None
            del self._due[key]
            self._active[key] = self._clock()
            return key

    def finish(self, key: str, *, failed: bool = False, requeue_s: float | None = None) -> None:
        """End the work on a key. It is due again after its back-off if `failed`, else after `requeue_s`, if given."""
        with self._changed:
            now_s = self._clock()
            del self._active[key]
            if failed:
                backoff = self._failures.setdefault(key, Backoff(*self._backoff_s, jitter=_JITTER))
                self._add(key, now_s + backoff.next_wait_s())
            else:
                self._failures.pop(key, None)
                self._warned.pop(key, None)
            if requeue_s is not None:
                self._add(key, now_s + requeue_s)
            self._changed.notify()

    def _step(self) -> float | None:
        key = self._wait_due()
        if key is None:
            return None if self._closed else 0.0
        begun_s = self._clock()
        requeue_s: float | None = None
        error: Exception | None = None
        try:
            requeue_s = self._work(key)
        except ClosedError as exc:
            error = exc
            if self._closed:
                return None
            raise
        except (EDLError, TimeoutError) as exc:
            error = exc
            self._log(key, exc)
        except Exception as exc:
            error = exc
            raise  # the loop logs it with its traceback
        finally:
            self.finish(key, failed=error is not None, requeue_s=requeue_s)
            self._on_result(key, self._clock() - begun_s, error)
        return 0.0

    def _log(self, key: str, exc: Exception) -> None:
        is_known = isinstance(exc, (ConflictError, TemporaryError)) or self._warned.get(key) == str(exc)
        if not is_known:
            self._warned[key] = str(exc)
        logger.log(logging.DEBUG if is_known else logging.WARNING, "%s: %s", key, exc)

    def _wait_due(self) -> str | None:
        with self._changed:
            if self._closed:
                return None
            wait_s = min(_LOOK_S, self._find_next()[1] - self._clock())
            if wait_s > 0:
                self._changed.wait(wait_s)
            return None if self._closed else self.take()

    def _add(self, key: str, due_s: float) -> None:
        self._due[key] = min(due_s, self._due.get(key, due_s))

    def _find_next(self) -> tuple[str, float]:
        """Return the next key, and the time when it is due (infinity without keys). Active keys wait for `finish`."""
        waiting = (item for item in self._due.items() if item[0] not in self._active)
        return min(waiting, key=lambda item: item[1], default=("", math.inf))


_BEAT_S: Final = 1.0
_GROUP_DELAY_S: Final = 0.05
"""All pod events of a resource within this time cause a single reconciliation: thirty workers may end at the same
moment."""
_RELIST_RATE: Final = 20.0  # reconciliations per second after a new list
_RELIST_MOST_S: Final = 60.0
_OWNERS: Final = {JOB_LABEL: ELASTIC_JOBS.plural, POOL_LABEL: TEACHER_POOLS.plural}


class ResourceWatches:
    """Calls `on_key`, in its own threads, with a resource's key and the delay of its reconciliation.

    `is_own_status` tells whether the operator itself wrote a resource's status.
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
        self._reason = "the watches have not started"
        with self._lock:  # a watch's thread may be faster than this constructor, and waits for it with its first list
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

    def close(self) -> None:
        self._loop.close()
        for watch in self._watches.values():
            watch.close()

    def _take(self, kind: ResourceType, namespace: str, change: str, obj: Object | None) -> None:
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
                logger.warning("%s; the operator waits until this changes", reason)
            else:
                watched = [namespace for namespace in self._namespaces if namespace not in self._denied]
                logger.info("resources and pods are watched in %s", ", ".join(watched))
        return _BEAT_S

    def _look_at_all(self, kind: ResourceType, namespace: str) -> None:
        """Reconcile all resources that a new list may concern: those in the list, and those known before."""
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
        denied: dict[str, str] = {}
        reason, missing = "", set()
        for (kind, namespace), watch in self._watches.items():
            error = watch.error
            if isinstance(error, AccessDeniedError):
                denied[namespace] = str(error)
            elif isinstance(error, NotServedError):
                missing.add(f"{kind.plural}.{kind.group}/{kind.version}")
            elif not watch.listed:
                reason = reason or watch.stale or "the watches have not started"
        if len(denied) == len(self._namespaces):
            return next(iter(denied.values()))
        for namespace in denied.keys() - self._denied.keys():
            logger.warning("namespace %s is left out until this is allowed: %s", namespace, denied[namespace])
        self._denied = denied
        return f"the cluster has no resource {', '.join(sorted(missing))}: install the CRD" if missing else reason


def _key_of(kind: ResourceType, obj: Object) -> str:
    return f"{kind.plural}/{obj['metadata'].get('namespace')}/{obj['metadata'].get('name')}"


def _fingerprint(obj: Object) -> tuple[str, ...]:
    """Return the metadata that a status update does not change."""
    metadata = obj["metadata"]
    return tuple(
        repr(metadata.get(part)) for part in ("uid", "generation", "deletionTimestamp", "labels", "annotations")
    )


def _list_owners(pods: Iterable[Object]) -> list[str]:
    found = []
    for pod in pods:
        metadata = pod["metadata"]
        labels = metadata.get("labels") or {}
        found += [f"{_OWNERS[name]}/{metadata['namespace']}/{labels[name]}" for name in _OWNERS if labels.get(name)]
    return found
