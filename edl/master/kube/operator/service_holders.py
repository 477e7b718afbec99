"""`ServiceHolders`: which pool a service in a store belongs to, among the pools of all namespaces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from edl.errors import AccessDeniedError
from edl.master.kube.observation import find_condition
from edl.master.kube.pools.updating import hash_place, list_places
from edl.master.kube.resources import TeacherPool

_RETRY_S: Final = 60.0
"""Between two lists of a namespace that may not be listed: as often as its watch is tried again."""


class ServiceHolders:
    """Finds the pool that a service belongs to: the oldest that has it, or whose teachers of a spec before have it.

    Thread-safe.

    The pools of each namespace are listed once before the first answer: an operator that has just started would take
    the pool that it looks at first for the only one, and make teachers of another model.

    Args:
        on_key: called with the key of a pool whose service may belong to another pool now.
        list_pools: returns the pools of a namespace; raises an EDLError.
    """

    def __init__(
        self,
        on_key: Callable[[str], None],
        list_pools: Callable[[str], Sequence[TeacherPool]],
        namespaces: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_key = on_key
        self._list_pools = list_pools
        self._clock = clock
        self._listing = threading.Lock()
        self._unlisted = dict.fromkeys(namespaces, 0.0)
        self._lock = threading.Lock()
        self._pools: dict[str, TeacherPool] = {}

    def get_pool(self, key: str) -> TeacherPool | None:
        """Return a pool as it was seen last; None if it is not known."""
        with self._lock:
            return self._pools.get(key)

    def get_pools(self) -> list[TeacherPool]:
        """Return all pools that are known."""
        with self._lock:
            return list(self._pools.values())

    def find_holder(self, pool: TeacherPool) -> str:
        """Return the key of the pool of another namespace that a pool's service belongs to; empty if it is its own.

        Raises:
            EDLError: pools cannot be listed just now.
        """
        self._list_unlisted()
        with self._lock:
            before = self._pools.get(pool.key)
            self._pools[pool.key] = pool
            rivals = self._list_rivals(pool)
            changed = list_places(pool) ^ (list_places(before) if before is not None else frozenset())
            woken = [rival.key for rival in self._list_claimants(pool, changed)]
        for key in woken:
            self._on_key(key)
        holder = min((pool, *rivals), key=lambda other: (other.created_s, other.key))
        return self._find_recorded(pool) if holder is pool else holder.key

    def forget(self, key: str) -> None:
        """Forget a pool that is gone."""
        with self._lock:
            pool = self._pools.pop(key, None)
            rivals = self._list_claimants(pool, list_places(pool)) if pool is not None else []
        for rival in rivals:
            self._on_key(rival.key)  # the service may be its own now

    def _list_unlisted(self) -> None:
        """List the namespaces that have not been listed; a namespace that may not be is tried again later."""
        with self._listing:
            for namespace, due_s in list(self._unlisted.items()):
                if self._clock() < due_s:
                    continue
                try:
                    found = self._list_pools(namespace)
                except AccessDeniedError:
                    self._unlisted[namespace] = self._clock() + _RETRY_S
                    continue
                del self._unlisted[namespace]
                with self._lock:
                    added = [pool for pool in found if pool.key not in self._pools]
                    self._pools.update((pool.key, pool) for pool in added)
                for pool in added:
                    self._on_key(pool.key)  # which finds out whether it has gone since

    def _find_recorded(self, pool: TeacherPool) -> str:
        """Return the holder that the pool's status names, if its namespace cannot be read just now."""
        accepted = find_condition(pool.status, "Accepted")
        if accepted.get("reason") != "ServiceTaken" or accepted.get("observedGeneration") != pool.generation:
            return ""
        holder = str(accepted.get("message")).partition(" ")[0]
        kind, _, place = holder.partition("/")
        namespace = place.partition("/")[0]
        with self._listing:
            return holder if kind == "teacherpools" and namespace in self._unlisted else ""

    def _list_rivals(self, pool: TeacherPool) -> list[TeacherPool]:
        """Return pools of other namespaces that may have teachers of the same service in the same store."""
        place = hash_place(pool)
        others = (other for other in self._pools.values() if other.namespace != pool.namespace)
        return [other for other in others if place in list_places(other)]

    def _list_claimants(self, pool: TeacherPool, places: frozenset[str]) -> list[TeacherPool]:
        """Return pools of other namespaces that are to have teachers at one of the places."""
        others = (other for other in self._pools.values() if other.namespace != pool.namespace)
        return [other for other in others if hash_place(other) in places]
