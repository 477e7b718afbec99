"""`OwnerKeyCleanup`: deletes the keys that deleted jobs and pools left in the cluster's store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from edl.background import BackgroundLoop
from edl.discovery import Store, open_store
from edl.errors import AccessDeniedError, DiscoveryError, KubernetesError, SettingsError
from edl.load_reporting.wanted import WantedKind, wanted_key
from edl.master.kube.resources import ElasticJob, TeacherPool
from edl.master.naming import election_key, report_key

logger = logging.getLogger(__name__)

_FIRST_S: Final = 60.0  # after the deletion: the pods of most jobs have ended by then
_RETRY_S: Final = 300.0  # if pods still exist, or the store does not answer: nobody waits for the keys to go
_PATIENCE_S: Final = 3600.0  # pods that outlive their owner for longer were kept on purpose, and so are the keys
_PACE_S: Final = 1.0  # between two jobs: hundreds may be deleted at once, and each has a few dozen keys
_MOST_TRACES: Final = 10  # stores and services per resource, in case its author keeps editing them


@dataclass(frozen=True)
class _Trace:
    """A job or pool, and a store it uses or used. `name` is the job's ID or the pool's service, as used in keys."""

    uid: str
    kind: WantedKind
    name: str
    store: str
    namespace: str

    def __str__(self) -> str:
        return f"job {self.name}" if self.kind == "workers" else f"service {self.name}"


@dataclass
class _Removal:
    """A cleanup due at `due_s`, given up at `end_s`.

    `version` is the version of the service's key at the last attempt.
    """

    trace: _Trace
    due_s: float
    end_s: float
    version: int | None = None


class OwnerKeyCleanup:
    """Tracks resources, and deletes the keys of deleted resources, if it can, while this operator runs. Thread-safe.

    Only keys in `edl://` stores are deleted: these stores have a size limit, which years of jobs would reach. In other
    stores, the keys stay as history, for `edl status`. `has_pods` is called with a namespace and an owner's uid.
    """

    def __init__(
        self,
        has_pods: Callable[[str, str], bool],
        may_open: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_pods = has_pods
        self._may_open = may_open
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[_Trace, ...]] = {}
        self._removals: list[_Removal] = []
        self._loop = BackgroundLoop("edl-operator-owner-keys", self.step)

    def note(self, owner: ElasticJob | TeacherPool) -> None:
        """Track a resource. A new resource with the same name means that the former resource is gone."""
        kind: WantedKind = "workers" if isinstance(owner, ElasticJob) else "teachers"
        name = owner.job_id if isinstance(owner, ElasticJob) else owner.service
        trace = _Trace(owner.uid, kind, name, owner.store, owner.namespace)
        with self._lock:
            before = self._known.get(owner.key, ())
            kept = [other for other in before if other.uid == trace.uid and other != trace]
            self._known[owner.key] = (*kept, trace)[-_MOST_TRACES:]
        for other in before:
            if other.uid != trace.uid:
                self._schedule(other)

    def note_gone(self, key: str) -> None:
        with self._lock:
            traces = self._known.pop(key, ())
        for trace in traces:
            self._schedule(trace)

    def close(self) -> None:
        self._loop.close()

    def step(self) -> float | None:
        """Clean up after the next resource; return the seconds until the next step."""
        now_s = self._clock()
        with self._lock:
            removal = min(self._removals, key=lambda found: found.due_s, default=None)
            if removal is None:
                return _FIRST_S
            if removal.due_s > now_s:
                return removal.due_s - now_s
            self._removals.remove(removal)
        trace = removal.trace
        try:
            if self._has_pods(trace.namespace, trace.uid):
                reason = "its pods still exist"
            elif not self._may_open(trace.store):
                return _PACE_S
            else:
                with open_store(trace.store) as store:
                    reason = _delete_keys(store, removal)
        except SettingsError as exc:
            logger.warning("keys of %s stay in %s: %s", trace, trace.store, exc)
            return _PACE_S
        except (AccessDeniedError, KubernetesError, DiscoveryError) as exc:
            reason = str(exc)
        if reason and now_s < removal.end_s:
            with self._lock:
                self._removals.append(replace(removal, due_s=now_s + _RETRY_S))
        elif reason:
            logger.warning("keys of %s stay in %s: %s", trace, trace.store, reason)
        return _PACE_S

    def _schedule(self, trace: _Trace) -> None:
        if not trace.store.startswith("edl://"):
            return
        now_s = self._clock()
        with self._lock:
            self._removals.append(_Removal(trace, now_s + _FIRST_S, now_s + _PATIENCE_S))
        self._loop.wake()


def _delete_keys(store: Store, removal: _Removal) -> str:
    """Delete the keys of a resource, or return why they are still in use; empty if they were deleted."""
    trace = removal.trace
    if trace.kind == "workers":
        return delete_job_keys(store, trace.name)
    entry = store.get(wanted_key("teachers", trace.name))
    if entry is None:
        return ""
    if removal.version != entry.version:  # shows at the next attempt whether an advisor writes it
        removal.version = entry.version
        return f"an advisor still writes how many teachers of {trace.name} are wanted, for other users of the service"
    store.delete(entry.key, entry.version)
    return ""


def delete_job_keys(store: Store, job_id: str) -> str:
    """Delete a job's keys, or return who uses them (agents or a master); DiscoveryError if the store is unreachable."""
    entries = store.list(f"jobs/{job_id}/")
    if any(entry.key.startswith(f"jobs/{job_id}/nodes/") for entry in entries):
        return "its agents are running"
    if store.get(election_key(job_id)) is not None:
        return "its master is running"
    entries += store.list(f"journals/{job_id}/")
    found = [store.get(key) for key in (report_key(job_id), wanted_key("workers", job_id))]
    for entry in (*entries, *(entry for entry in found if entry is not None)):
        store.delete(entry.key, entry.version)  # does nothing if another process has removed or written it since
    return ""
