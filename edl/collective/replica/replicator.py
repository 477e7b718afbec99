"""The agent's part in replicas: it sends what its workers keep to a peer, and takes what another agent sends.

The peer is the next member in the world's order. An agent that does not answer costs nothing but a line of the log:
what was replicated before stays as it is, and the workers keep nothing newer until it answers. Only sharded states are
kept, so in a job without any nothing of all this happens.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edl.collective.checkpoint.memory.replica_slots import (
    NO_VERSION,
    ReplicaFolder,
    kept_prefix,
    newest_common_state,
)
from edl.collective.checkpoint.memory.slots import CompleteSlot, StateVersion, find_slots
from edl.collective.job_records import Member, World, prefix
from edl.collective.replica.client import send_states
from edl.collective.replica.schedule import ReplicaAction, ReplicaPace, ReplicationSchedule
from edl.collective.replica.server import ReplicaServer
from edl.discovery.store import Store
from edl.errors import DiscoveryError, EDLError

if TYPE_CHECKING:
    from edl.protocol.tls.peers import PeerTLS  # imported where TLS is asked for only

__all__ = ["JobSecret", "Replicator", "replica_peer"]

_LOOK_EVERY_S: Final = 0.2
_CLOSE_S: Final = 1.0
_SECRET_NBYTES: Final = 32


def replica_peer(world: World, node: str) -> Member | None:
    """Who keeps the replica of a node's state: the next member that takes any, None if there is no other."""
    place = world.position(node)
    if place is None:
        return None
    others = [*world.nodes[place + 1 :], *world.nodes[:place]]
    return next((member for member in others if member.replica_port), None)


class JobSecret:
    """What all agents of a job know, and nobody who cannot read its Store. Made by whoever needs it first."""

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._key = prefix(job) + "secret"
        self._known = b""

    def __call__(self) -> bytes:
        """The secret.

        Raises:
            DiscoveryError: the store does not answer.
        """
        if not self._known:
            entry = self._store.get(self._key)
            if entry is None:
                self._store.compare_and_set(self._key, secrets.token_bytes(_SECRET_NBYTES), None)
                entry = self._store.get(self._key)
            if entry is None:
                raise DiscoveryError(f"the store forgot {self._key} as soon as it was written")
            self._known = entry.value
        return self._known


class Replicator:
    """Runs from now until `close`, in threads of its own.

    Args:
        node: this node's name.
        folder: for what concerns replicas, in memory; what a dead agent left there is used.
        slots: `EDL_SLOTS` of each worker of this node.
        secret: gives the job's secret.
        say: called with each line that a person should see.
        tls: for connections between agents, None for none.
    """

    def __init__(
        self,
        node: str,
        folder: Path,
        slots: Sequence[Path],
        secret: Callable[[], bytes],
        say: Callable[[str], None],
        pace: ReplicaPace | None = None,
        tls: PeerTLS | None = None,
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._node = node
        self._folder = ReplicaFolder(folder)
        self._folder.request_newer_than(None)
        self._slots = list(slots)
        self._secret = secret
        self._say = say
        self._course = ReplicationSchedule(pace or ReplicaPace.from_env())
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._peer: Member | None = None
        self._world = 0
        self._handing = self._handed = self._silent = self._closing = False
        self._replicated_us = 0
        self._noticed: tuple[StateVersion, int] = (NO_VERSION, 0)
        self._tls = tls
        self._server = ReplicaServer(self._folder, secret, say, tls=tls)
        self._thread = threading.Thread(target=self._run, name="edl-replication", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where other agents send their states."""
        return self._server.port

    @property
    def replicated_us(self) -> int:
        """Wall clock (microseconds since 1970) of the newest state that the peer has of all workers, 0 for none."""
        return self._replicated_us

    def change_world(self, world: World) -> None:
        """Have the peer of another world from now on. Call it before that world's workers begin."""
        peer = replica_peer(world, self._node)
        with self._lock:
            same = peer is not None and self._peer is not None and peer.id == self._peer.id
            self._peer = peer
            self._world += 1
            self._handing = self._handed = False
            self._folder.request_newer_than(None)
            self._course.start_world(same_peer=same)
            if not same:
                self._replicated_us = 0
        self._wake.set()

    def hand_over_state(self) -> bool:
        """Give the newest state of all workers to the peer, now that they have paused and this node is to leave.

        Returns at once; to be called until it returns True: the peer has it, does not take it, or needs none of it.
        """
        if not self._handing:
            self._handing = True
            self._wake.set()
        return self._handed

    def close(self) -> None:
        """Stop sending and receiving, in the middle of a state if there is one. What is complete stays."""
        self._closing = True
        self._wake.set()
        self._server.close()
        self._thread.join(_CLOSE_S)  # it may wait for a peer that does not answer

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(_LOOK_EVERY_S)
            self._wake.clear()
            with self._lock:
                peer, world = self._peer, self._world
            try:
                if self._handing and not self._handed:
                    self._hand_over(peer, world)
                elif peer is not None:
                    self._follow(peer, world)
            except OSError as exc:  # of the host's own memory
                self._complain(f"no replica of this node's state is made ({exc})")

    def _follow(self, peer: Member, world: int) -> None:
        """Do what is next."""
        held = [find_slots(kept_prefix(slots)) for slots in self._slots]
        states = newest_common_state(held)
        common = states[0].header.version if states else NO_VERSION
        if self._noticed[0] != common:
            self._noticed = (common, time.time_ns() // 1000)
        noticed_us = self._noticed[1]
        newest = max((one.header.version for found in held for one in found), default=NO_VERSION)
        with self._lock:
            if world != self._world:
                return
            act = self._course.next_action(time.monotonic(), common, newest)
            if act is ReplicaAction.WANT and self._folder.requested_version() != newest:
                self._folder.request_newer_than(newest)
        if act is ReplicaAction.SEND:
            began = time.monotonic()
            done = self._send(peer, world, states)
            with self._lock:
                if world != self._world:
                    return
                if done:
                    self._course.record_sent(common, began, time.monotonic())
                    self._replicated_us = noticed_us
                else:
                    self._course.record_failure(time.monotonic())

    def _hand_over(self, peer: Member | None, world: int) -> None:
        held = [[*find_slots(slots), *find_slots(kept_prefix(slots))] for slots in self._slots]
        states = newest_common_state(held)
        try:
            if peer is not None and states and states[0].header.sharded:
                self._send(peer, world, states)
        finally:
            with self._lock:
                self._handed = self._handing and world == self._world

    def _send(self, peer: Member, world: int, states: Sequence[CompleteSlot]) -> bool:
        """Send states of all workers. Returns whether the peer has them."""

        def stopping() -> bool:
            return self._closing or world != self._world

        try:
            address = (peer.addr, peer.replica_port)
            send_states(address, self._secret(), self._node, states, stopping=stopping, tls=self._tls)
        except EDLError as exc:
            if not stopping():
                self._complain(f"node {peer.id} did not take a replica of this node's state ({exc})")
            return False
        if self._silent:
            self._silent = False
            self._say(f"node {peer.id} takes replicas of this node's state")
        return True

    def _complain(self, what: str) -> None:
        """Say what does not work, once."""
        if not self._silent:
            self._silent = True
            self._say(f"{what}: tried again later")
