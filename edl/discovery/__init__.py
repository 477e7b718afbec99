"""Provides a `Registry` of services, and a `Store` for small shared state, in which a registry keeps its services.

One URL gives the location: a SQLite file (one machine, no server to install), a store that another process serves
(`edl://`), Consul or etcd. Code outside this package does not depend on which of these is used.

- `store` contains the contract of a store, and the code that all stores share. `registry` keeps services in any store,
  and `records` defines an instance of a service.
- Each backend is a module or a subpackage: `sqlite`, `etcd`, `consul` (with `consul_client`), and `served` for
  `edl://`.
- `balance` computes which teachers a student talks to. `group` lets students agree on the result.

To add another store, write a module with a subclass of `Store` that implements the seven abstract methods. Use `etcd`
as an example; the docstring of `watching.Follower` describes what a watch needs. Add the store's scheme to `urls`, and
run the tests in `tests/fast/discovery/conformance` on the store. The new store then also serves as a registry.
"""

from __future__ import annotations

from edl.discovery.records import Instance, Snapshot
from edl.discovery.registry import Registry
from edl.discovery.store import Store
from edl.discovery.urls import open_registry, open_store

__all__ = ["Instance", "Registry", "Snapshot", "Store", "open_registry", "open_store"]
