"""A node's records in the Store: its own under a lease, the job's by compare-and-set, and hosts that are left out.

A host is left out when a GPU of it failed, and refused when it comes again. It is known by its kernel's boot and by the
GPUs that it shows this process: containers have other names at every start, and a reboot, which resets the GPUs, makes
another host of it. Keys: `jobs/JOB/left-out/HOST`, without a lease.
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
from edl.collective.job_records import Exclusion, Node, World, exclusions_prefix, prefix
from edl.discovery.store import Entry, Lease, Store, StoreWatch
from edl.errors import ConflictError, DiscoveryError, LeaseLostError

__all__ = ["Exclusions", "JobRecords", "Membership", "REMEDY", "host_key"]


REMEDY: Final = "once its GPU is reset or replaced, a reboot or `edl run --readmit` lets it join again"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def host_key() -> str:
    """Return the name of this boot of this host with the GPUs that are visible here: 16 hexadecimal digits."""
    visible = [os.environ.get(name, "") for name in _VISIBLE]
    return hashlib.sha256("\0".join([_BOOT_ID.read_text().strip(), *visible]).encode()).hexdigest()[:16]


class Exclusions:
    """The hosts that a job leaves out, seen from one of its hosts."""

    def __init__(self, store: Store, job: str, host: str) -> None:
        self._store = store
        self._folder = exclusions_prefix(job)
        self._key = self._folder + host

    def own_exclusion(self) -> Exclusion | None:
        """Return why the job leaves this host out; None if it does not.

        Raises:
            DiscoveryError: the store does not answer.
            ProtocolError: the record makes no sense.
        """
        entry = self._store.get(self._key)
        return None if entry is None else Exclusion.decode(entry.value)

    def find_same_elsewhere(self, exclusion: Exclusion) -> Exclusion | None:
        """Find another host that was left out for an unclear fault which the job has not come further than since.

        Then the fault has moved from host to host, as an error in a kernel of the script does.

        Args:
            exclusion: of this host, not yet recorded.

        Returns:
            The other host's record, None if there is none.

        Raises:
            DiscoveryError: the store does not answer.
            ProtocolError: a record makes no sense.
        """
        for entry in self._store.list(self._folder):
            other = Exclusion.decode(entry.value)
            if entry.key != self._key and not other.clear and exclusion.step <= other.step:
                return other
        return None

    def remove_unclear(self) -> None:
        """Readmit all hosts that were left out for an unclear fault: it turned out to be the script's.

        Raises:
            DiscoveryError: the store does not answer.
        """
        for entry in self._store.list(self._folder):
            if not Exclusion.decode(entry.value).clear:
                self._store.delete(entry.key)

    def add(self, exclusion: Exclusion) -> None:
        """Leave this host out from now on.

        Raises:
            DiscoveryError: the store does not answer.
        """
        self._store.put(self._key, exclusion.encode())

    def remove(self) -> None:
        """Readmit this host.

        Raises:
            DiscoveryError: the store does not answer.
        """
        self._store.delete(self._key)


# --- A node's records in the Store ---


_RENEWAL_RETRY_S: Final = 2.0
"""How much later than its lease's end a member may be back once the store answers again: the longest pause between two
tries of a client. With less, members that are on their way are left out; with more, all wait longer for the dead."""
_RECORD_LOST_S: Final = 8.0
"""So long may a request take that was made while the store was away, and a store that has just started may seem empty:
only after that is a missing record of a job believed. With less, a job would begin again beside its own record."""


@dataclass(frozen=True)
class JobRecords:
    """The records of a job, as an agent read them at a moment.

    Attributes:
        world: the job's record.
        version: of that record in the Store, None if there is none.
        nodes: the records of all live nodes by id, read after `world`.
        late: members of `world` in `nodes`, as they were known last, that the store has no record of: late, or gone.
        asked_at: when the store was asked (`time.monotonic()`): what these records lack may have changed since.
    """

    world: World
    version: int | None
    nodes: dict[str, Node]
    late: frozenset[str]
    asked_at: float


class Membership:
    """This node in a job: its record under a lease, and the records of the job and of the other nodes.

    Used by the agent's thread, but for `read_world`.

    Args:
        store: shared by all nodes; stays the caller's to close.
        job: its name.
        node: this node's record.
        ttl_s: of this node's lease, in seconds: after that long without a renewal the others go on without the node.
        wake: called from threads of this object whenever a record may have changed.
        clock: monotonic, in seconds: that of the leases.
    """

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
        self._absent_until = -math.inf  # until when a member that is missing is only taken to be late
        self._last: World | None = None
        self._lost_since: float | None = None
        self.node = node
        """This node's record as it is to be."""
        self._leased_at = self._clock()
        watches = [store.watch(self._world_key), store.watch(self._nodes_prefix)]
        self._loops = [BackgroundLoop("edl-records", partial(self._follow, watch), watch.close) for watch in watches]

    @property
    def without_lease_s(self) -> float:
        """For how many seconds the others may have taken this node for dead: 0 while it has a lease."""
        self._record_lease()
        return self._clock() - self._leased_at if self._joined else 0.0

    def join(self) -> None:
        """Publish this node's record: the others see the node from now on.

        Raises:
            DiscoveryError: the store does not answer.
        """
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
        """Read all records. A node that lost its lease gets another here, under its old name.

        While the store is away, the leases of all nodes end, and afterwards some node is the first to be back. For a
        while it takes the members that it knew to be late, before it takes them to be gone. A store that answers but
        takes no renewals, such as a locked file, is like that too: then this node's own renewal is late.

        Returns:
            The records, with members that may only be late as they were known last.

        Raises:
            DiscoveryError: the store does not answer, or has lost the job's record a moment ago.
            ProtocolError: a record makes no sense.
        """
        asked_at = self._clock()
        entry = self._store.get(self._world_key)
        if self._joined and (self._lease is None or self._lease.lost or self._written != self.node):
            self._write()
        found = [Node.decode(node_entry.value) for node_entry in self._store.list(self._nodes_prefix)]
        nodes = {node.id: node for node in found}
        if self._joined and self.node.id not in nodes:  # another agent took this node for dead
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
        """Return the job's record. That it is lost counts after a while: a store that starts again may seem empty."""
        if entry is not None:
            self._last = World.decode(entry.value)
            self._lost_since = None
            return self._last
        if self._last is None:
            return World()
        if self._lost_since is None:
            self._lost_since = self._clock()
        if self._clock() - self._lost_since < _RECORD_LOST_S:
            raise DiscoveryError("it does not know the job any more")
        return World(self._last.generation, message="the store lost the job's record", forgiven=self._last.forgiven)

    def read_world(self) -> World:
        """Read the job's record alone. Unlike the other methods, for any thread.

        Returns:
            The record, `World()` if there is none.

        Raises:
            DiscoveryError: the store does not answer.
        """
        entry = self._store.get(self._world_key)
        return World() if entry is None else World.decode(entry.value)

    def propose_world(self, world: World, version: int | None) -> bool:
        """Replace the job's record, unless another agent was first.

        Returns:
            Whether it was written.

        Raises:
            DiscoveryError: the store does not answer, and may have written it or not.
        """
        return self._store.compare_and_set(self._world_key, world.encode(), version) is not None

    def delete_node(self, node: str) -> None:
        """Delete the record of another node, whose agent's process is gone for certain.

        Raises:
            DiscoveryError: the store does not answer. The record's lease ends all the same.
        """
        self._store.delete(self._nodes_prefix + node)
        self._known.pop(node, None)

    def close(self) -> None:
        """Delete this node's record, and follow the records no more."""
        for loop in self._loops:
            loop.close()
        if self._lease is not None:
            self._lease.close()

    def _record_lease(self) -> None:
        now = self._clock()  # before the lease is asked: this process may be stopped in between
        if self._lease is not None and not self._lease.lost:
            self._leased_at = now

    def _write(self) -> None:
        if self._lease is None or self._lease.lost:
            if self._lease is not None:
                self._absent_until = math.inf  # the store may have been away, and nobody else is back yet
                self._lease.close()
            self._lease = self._store.lease(self._ttl_s)
            if self._absent_until == math.inf:
                self._absent_until = self._clock() + self._ttl_s + _RENEWAL_RETRY_S
        node = self.node
        try:
            self._store.put(self._nodes_prefix + node.id, node.encode(), self._lease)
            self._written = node
        except (LeaseLostError, ConflictError) as exc:  # the next try gets another lease
            raise DiscoveryError(f"the lease of {self.node.id} ended while its record was written") from exc

    def _follow(self, watch: StoreWatch) -> None:
        """Wake the agent at every change, until the watch is closed."""
        for _ in watch:
            self._wake()
