"""A node's records in the Store: its own, kept alive by a lease, and the job's, written by compare-and-set only."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edl.collective.job_records import Node, World, prefix
from edl.discovery.store import Entry, Lease, Store, StoreWatch
from edl.errors import ConflictError, DiscoveryError, LeaseLostError

__all__ = ["Membership", "JobRecords"]

_RETRY_S = 2.0
_GONE_S = 8.0
"""How long a question may take that was asked while the store was away."""


@dataclass(frozen=True)
class JobRecords:
    """The job's record, and all live nodes', read after it."""

    world: World
    version: int | None
    nodes: dict[str, Node]


class Membership:
    """This node in a job.

    Args:
        store: shared by all nodes.
        job: its name.
        node: what this one says of itself.
        ttl_s: after this long without a sign of life the others go on without it.
        wake: called from threads of this object whenever a record may have changed.
    """

    def __init__(self, store: Store, job: str, node: Node, ttl_s: float, wake: Callable[[], None]) -> None:
        self._store = store
        self._world_key = prefix(job) + "world"
        self._nodes_prefix = prefix(job) + "nodes/"
        self._ttl_s = ttl_s
        self._wake = wake
        self._lease: Lease | None = None
        self._joined = False
        self._written: Node | None = None
        self._known: dict[str, Node] = {}
        self._doubt_until = -math.inf
        self._last: World | None = None
        self._gone_since: float | None = None
        self.node = node
        self._seen_alive = time.monotonic()
        self._watches = [store.watch(self._world_key), store.watch(self._nodes_prefix)]
        self._threads = [threading.Thread(target=self._follow, args=(watch,), daemon=True) for watch in self._watches]
        for thread in self._threads:
            thread.start()

    @property
    def without_lease_s(self) -> float:
        """For how long the others may have taken this node for dead: seconds without a lease, 0 with one."""
        self._look()
        return time.monotonic() - self._seen_alive if self._joined else 0.0

    def join(self) -> None:
        """Be seen by the others from now on."""
        self._joined = True
        self._write()

    def update_node(self, **changes: Any) -> None:
        """Change this node's record. If the store does not take it now, the next `read_records` writes it.

        Raises:
            DiscoveryError: the store does not answer.
        """
        self.node = replace(self.node, **changes)
        if self._joined:
            self._write()

    def read_records(self) -> JobRecords:
        """The records as they are now. A node that lost its lease gets another one here, under its old name.

        When the store was away, nodes' leases have ended, one after another, and one node is the first to be back. For
        a while it gives the members that it knew the time to come back too, before it believes that they are gone. A
        store that still answers questions, such as a locked file, lets nobody renew either: then this node's own
        renewal is late.

        Raises:
            DiscoveryError: the store does not answer.
        """
        entry = self._store.get(self._world_key)
        if self._joined and (self._lease is None or self._lease.lost or self._written != self.node):
            self._write()
        found = [Node.decode(each.value) for each in self._store.list(self._nodes_prefix)]
        nodes = {node.id: node for node in found}
        if self._joined and self.node.id not in nodes:  # somebody took this node for dead
            self._write()
            nodes[self.node.id] = self.node
        world = self._believed(entry)
        if self._lease is not None:
            self._doubt_until = max(self._doubt_until, self._lease.late_at + self._ttl_s + _RETRY_S)
        if time.monotonic() < self._doubt_until:
            members = {member.id for member in world.nodes}
            nodes = {name: node for name, node in self._known.items() if name in members} | nodes
        self._known = nodes
        self._look()
        return JobRecords(world, entry.version if entry is not None else None, nodes)

    def _believed(self, entry: Entry | None) -> World:
        """The job's record. That it is gone is not believed for a while: a store that was started again may say so."""
        if entry is not None:
            self._last, self._gone_since = World.decode(entry.value), None
            return self._last
        if self._last is None:
            return World()
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        if time.monotonic() - self._gone_since < _GONE_S:
            raise DiscoveryError("it does not know the job any more")
        return World(self._last.generation, message="the store lost the job's record", forgiven=self._last.forgiven)

    def read_world(self) -> World:
        """The job's record alone. Unlike the other methods, for any thread.

        Raises:
            DiscoveryError: the store does not answer.
        """
        entry = self._store.get(self._world_key)
        return World() if entry is None else World.decode(entry.value)

    def propose_world(self, world: World, version: int | None) -> bool:
        """Make `world` the job's record, if it is still the one of `version`. False if somebody was first.

        Raises:
            DiscoveryError: the store does not answer, and may have written it or not.
        """
        return self._store.compare_and_set(self._world_key, world.encode(), version) is not None

    def delete_node(self, node: str) -> None:
        """Take away the record of another node, whose agent's process is gone for certain.

        Raises:
            DiscoveryError: the store does not answer. The record's lease ends all the same.
        """
        self._store.delete(self._nodes_prefix + node)
        self._known.pop(node, None)

    def close(self) -> None:
        """Take this node's record away."""
        for watch in self._watches:
            watch.close()
        for thread in self._threads:
            thread.join()
        if self._lease is not None:
            self._lease.close()

    def _look(self) -> None:
        if self._lease is not None and not self._lease.lost:
            self._seen_alive = time.monotonic()

    def _write(self) -> None:
        if self._lease is None or self._lease.lost:
            if self._lease is not None:
                self._doubt_until = math.inf
                self._lease.close()
            self._lease = self._store.lease(self._ttl_s)
            if self._doubt_until == math.inf:
                self._doubt_until = time.monotonic() + self._ttl_s + _RETRY_S
        node = self.node
        try:
            self._store.put(self._nodes_prefix + node.id, node.encode(), self._lease)
            self._written = node
        except (LeaseLostError, ConflictError) as exc:  # the next try gets another lease
            raise DiscoveryError(f"the lease of {self.node.id} ended while its record was written") from exc

    def _follow(self, watch: StoreWatch) -> None:
        for _ in watch:
            self._wake()
