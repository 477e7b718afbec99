"""The records that a node uses in the Store: its own (with a lease), the job's (by compare-and-set), exclusions.

A host whose GPU failed is excluded by a record under the key `jobs/JOB/left-out/HOST`. A host is identified by the boot
id of its kernel and the GPUs visible to this process. Names are not used because containers get new names at every
start. A reboot, which resets the GPUs, makes the host count as a new host.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from edl.background import BackgroundLoop
from edl.collective.job_records import Exclusion, Node, World, prefix
from edl.discovery.store import Entry, Lease, Store, StoreWatch
from edl.errors import ConflictError, DiscoveryError, LeaseLostError

REMEDY: Final = "once its GPU is reset or replaced, a reboot or `edl run --readmit` lets it join again"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def host_key() -> str:
    """Return 16 hexadecimal digits that identify this boot of this host with the GPUs visible here."""
    visible = [os.environ.get(name, "") for name in _VISIBLE]
    return hashlib.sha256("\0".join([_BOOT_ID.read_text().strip(), *visible]).encode()).hexdigest()[:16]


class Exclusions:
    """The hosts that a job excludes, from one host's point of view. All methods ask the Store, which may not answer."""

    def __init__(self, store: Store, job: str, host: str) -> None:
        self._store = store
        self._folder = f"{prefix(job)}left-out/"
        self._key = self._folder + host

    def own_exclusion(self) -> Exclusion | None:
        entry = self._store.get(self._key)
        return None if entry is None else Exclusion.decode(entry.value)

    def find_same_elsewhere(self, exclusion: Exclusion) -> Exclusion | None:
        """Find another host with an unclear fault at this step or later: a script's error shows up on several hosts."""
        for entry in self._store.list(self._folder):
            other = Exclusion.decode(entry.value)
            if entry.key != self._key and not other.clear and exclusion.step <= other.step:
                return other
        return None

    def remove_unclear(self) -> None:
        """Readmit all hosts that were excluded for an unclear fault, because the script turned out to be at fault."""
        for entry in self._store.list(self._folder):
            if not Exclusion.decode(entry.value).clear:
                self._store.delete(entry.key)

    def add(self, exclusion: Exclusion) -> None:
        self._store.put(self._key, exclusion.encode())

    def remove(self) -> None:
        self._store.delete(self._key)


_RENEWAL_RETRY_S: Final = 2.0  # in which members return after the store does: a client's longest pause between tries
_RECORD_LOST_S: Final = 8.0  # before a missing record is believed: a store that has just started may seem empty


@dataclass(frozen=True)
class JobRecords:
    """The records of a job as an agent read them at one moment."""

    world: World  # the job's record
    version: int | None  # version of that record in the Store; None if there is none
    nodes: dict[str, Node]  # records of all live nodes by id, read after `world`
    late: frozenset[str]  # members without a record, so `nodes` has their last known one: they are late, or gone
    asked_at: float  # when the store was asked (`time.monotonic()`); changes since then are not included


class Membership:
    """This node's record under a lease, and all its job's records. Threads call `wake` if a record may have changed."""

    def __init__(
        self,
        store: Store,
        job: str,
        node: Node,
        ttl_s: float,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._world_key = prefix(job) + "world"
        self._nodes_prefix = prefix(job) + "nodes/"
        self._ttl_s = ttl_s
        self._wake = wake
        self._clock = clock
        self._lease: Lease | None = None
        self._joined = False
        self._written: Node | None = None
        self._known: dict[str, Node] = {}
        self._absent_until = -math.inf  # until then, a missing member only counts as late
        self._last: World | None = None
        self._lost_since: float | None = None
        self.node = node  # this node's record as it should be in the store
        self._leased_at = self._clock()
        watches = [store.watch(self._world_key), store.watch(self._nodes_prefix)]
        self._loops = [BackgroundLoop("edl-records", partial(self._follow, watch), watch.close) for watch in watches]

    @property
    def without_lease_s(self) -> float:
        """For how many seconds other nodes may have considered this node dead: 0 while this node has a lease."""
        self._record_lease()
        return self._clock() - self._leased_at if self._joined else 0.0

    def join(self) -> None:
        self._joined = True
        self._write()

    def update_node(self, **changes: Any) -> None:
        """Change this node's record. If the store does not accept the change now, the next `read_records` writes it."""
        self.node = replace(self.node, **changes)
        if self._joined:
            self._write()

    def read_records(self) -> JobRecords:
        """Read all records. A node that lost its lease gets a new lease here, under its old name.

        While the store is down, all leases expire. So for a while after this node's lease was lost or renewed late, a
        member that this node knew and that has no record counts as late, and not as gone.

        Raises:
            DiscoveryError: The store does not answer, or lost the job's record a moment ago.
            ProtocolError: A record is invalid.
        """
        asked_at = self._clock()
        entry = self._store.get(self._world_key)
        if self._joined and (self._lease is None or self._lease.lost or self._written != self.node):
            self._write()
        found = [Node.decode(node_entry.value) for node_entry in self._store.list(self._nodes_prefix)]
        nodes = {node.id: node for node in found}
        if self._joined and self.node.id not in nodes:  # another agent considered this node dead
            self._write()
            nodes[self.node.id] = self.node
        world = self._checked_world(entry)
        if self._lease is not None:
            self._absent_until = max(self._absent_until, self._lease.late_at + self._ttl_s + _RENEWAL_RETRY_S)
        late: frozenset[str] = frozenset()
        if self._clock() < self._absent_until:
            members = {member.id for member in world.nodes}
            known = {name: node for name, node in self._known.items() if name in members}
            late = frozenset(known.keys() - nodes.keys())
            nodes = known | nodes
        self._known = nodes
        self._record_lease()
        return JobRecords(world, entry.version if entry is not None else None, nodes, late, asked_at)

    def _checked_world(self, entry: Entry | None) -> World:
        """Return the job's record. A missing record counts as lost only after a while."""
        if entry is not None:
            self._last = World.decode(entry.value)
            self._lost_since = None
            return self._last
        if self._last is None:
            return World()
        if self._lost_since is None:
            self._lost_since = self._clock()
        if self._clock() - self._lost_since < _RECORD_LOST_S:
            raise DiscoveryError("the store no longer knows the job")
        return World(self._last.generation, message="the store lost the job's record", forgiven=self._last.forgiven)

    def read_world(self) -> World:
        """Read the job's record alone. Unlike the other methods, this may be called from any thread."""
        entry = self._store.get(self._world_key)
        return World() if entry is None else World.decode(entry.value)

    def propose_world(self, world: World, version: int | None) -> bool:
        """Replace the job's record, unless another agent changed it since `version`. Returns whether it was replaced.

        Raises:
            DiscoveryError: The store does not answer, and may or may not have written the record.
        """
        return self._store.compare_and_set(self._world_key, world.encode(), version) is not None

    def delete_node(self, node: str) -> None:
        """Delete the record of another node whose agent's process is certainly gone."""
        self._store.delete(self._nodes_prefix + node)
        self._known.pop(node, None)

    def close(self) -> None:
        for loop in self._loops:
            loop.close()
        if self._lease is not None:
            self._lease.close()

    def _record_lease(self) -> None:
        now = self._clock()  # read before the lease: this process may be stopped in between
        if self._lease is not None and not self._lease.lost:
            self._leased_at = now

    def _write(self) -> None:
        if self._lease is None or self._lease.lost:
            if self._lease is not None:
                self._absent_until = math.inf  # the store may have been down, and no other node is back yet
                self._lease.close()
            self._lease = self._store.lease(self._ttl_s)
            if self._absent_until == math.inf:
                self._absent_until = self._clock() + self._ttl_s + _RENEWAL_RETRY_S
        node = self.node
        try:
            self._store.put(self._nodes_prefix + node.id, node.encode(), self._lease)
            self._written = node
        except (LeaseLostError, ConflictError) as exc:  # the next attempt gets another lease
            raise DiscoveryError(f"the lease of {self.node.id} ended while its record was written") from exc

    def _follow(self, watch: StoreWatch) -> None:
        for _ in watch:
            self._wake()
