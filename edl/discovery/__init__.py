"""Who is live: services in a `Registry`, small shared state in a `Store`, which is what a registry lies in.

One URL says where: a SQLite file (one machine, no server to install), a store that another process serves (`edl://`),
Consul or etcd. Nothing else in EDL knows which. `balance` decides, purely, which teachers a student talks to.

What does not belong here: connections to teachers, anything about models or tensors, and job logic.
"""

from __future__ import annotations

from edl.discovery.registry import Instance, Registry, Snapshot
from edl.discovery.store import Store
from edl.discovery.urls import open_registry, open_store

__all__ = ["Instance", "Registry", "Snapshot", "Store", "open_registry", "open_store"]
