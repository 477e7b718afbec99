"""`AcceptedSpecs`: the specs that were worked on last, for resources whose spec has become one that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from edl.kube.objects import Object

__all__ = ["AcceptedSpecs"]


class AcceptedSpecs:
    """Remembers a spec of each resource. Thread-safe; a new operator knows none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._specs: dict[str, tuple[str, Mapping[str, Any]]] = {}

    def note(self, key: str, resource: Object) -> None:
        """Remember a resource's spec."""
        with self._lock:
            self._specs[key] = resource["metadata"].get("uid", ""), resource["spec"]

    def restore(self, key: str, resource: Object) -> Object | None:
        """Return a resource with the spec that was accepted last; None if none was. `suspend` counts as it is now."""
        with self._lock:
            uid, spec = self._specs.get(key, ("", {}))
        if not spec or uid != resource["metadata"].get("uid"):
            return None
        now = resource.get("spec")
        suspend = now.get("suspend", False) if isinstance(now, Mapping) else None
        if isinstance(suspend, bool):
            spec = {**spec, "suspend": suspend}
        return {**resource, "spec": spec}

    def forget(self, key: str) -> None:
        """Drop a resource that is gone."""
        with self._lock:
            self._specs.pop(key, None)
