"""Replicates an agent's states: sends its workers' states to a peer, and receives another agent's states.

The peer is the next member in the world's order that takes replicas. If the peer does not answer, earlier replicas stay
as they are, and the workers keep no newer state until the peer answers. Only sharded states are kept.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edl.background import BackgroundLoop
from edl.collective.checkpoint.memory.replica_slots import NO_VERSION, ReplicaFolder, newest_common_state
from edl.collective.checkpoint.memory.slots import CompleteSlot, StateVersion, find_slots, kept_prefix
from edl.collective.job_records import Member, World, create_once, prefix
from edl.collective.replica.peers import ReplicaServer, send_states
from edl.discovery.store import Store
from edl.errors import EDLError, SettingsError
from edl.settings import positive_float, read

if TYPE_CHECKING:
    from edl.protocol.tls import PeerTLS  # imported only if TLS is used


class ReplicaAction(Enum):
    """What to do now."""

    WAIT = "wait"
    SEND = "send"  # the newest state that all workers have kept
    WANT = "want"  # have the workers keep a newer state than any of them has


@dataclass
class ReplicationSchedule:
    """Tracks what a node has sent to its current peer, and decides what to do next. All times are from one clock."""

    interval_s: float = 10.0  # least seconds from the start of one transfer to the start of the next
    share: float = 0.5  # of the time that transfers may take: transfers of T seconds begin T / share apart
    retry_s: float = 10.0  # seconds to wait before trying a peer again that did not take a state
    patience_s: float = 30.0  # for workers that have not kept a state that others have: they died, or saved elsewhere
    _sent: StateVersion = NO_VERSION
    _due: float = -math.inf
    _retry: float = -math.inf
    _passed_over: tuple[StateVersion, float] = (NO_VERSION, -math.inf)

    @classmethod
    def from_env(cls) -> ReplicationSchedule:
        share = read("EDL_REPLICA_SHARE", positive_float) or cls.share
        if share > 1:
            raise SettingsError(f"EDL_REPLICA_SHARE={share:g}: expected a share of the time, above 0 and up to 1")
        return cls(share=share)

    def start_world(self, *, same_peer: bool) -> None:
        """Start another world, whose first state is kept at once. A new peer first gets the newest that all kept."""
        if not same_peer:
            self._sent = NO_VERSION
        self._due = -math.inf
        self._retry = -math.inf

    def next_action(self, now: float, common: StateVersion, newest: StateVersion) -> ReplicaAction:
        """Return what to do, given the newest states kept by all workers (`common`) and by any worker (`newest`)."""
        if common > self._sent:
            return ReplicaAction.SEND if now >= self._retry else ReplicaAction.WAIT
        if newest > max(common, self._sent):
            version, since = self._passed_over
            if version != newest:
                self._passed_over = (newest, now)
                return ReplicaAction.WAIT
            if now - since < self.patience_s:
                return ReplicaAction.WAIT
        return ReplicaAction.WANT if now >= self._due else ReplicaAction.WAIT

    def record_sent(self, version: StateVersion, began: float, ended: float) -> None:
        self._sent = version
        self._due = max(began + self.interval_s, began + (ended - began) / self.share)

    def record_failure(self, now: float) -> None:
        self._retry = now + self.retry_s


_POLL_S: Final = 0.2  # between looks for kept states, which come about every ten seconds
_CLOSE_S: Final = 1.0  # for a transfer in progress when the node leaves; it may wait for a silent peer
_SECRET_NBYTES: Final = 32  # 256 bits, as many as the HMACs made with it


def replica_peer(world: World, node: str) -> Member | None:
    """Return the member that keeps a node's replica: the next one that takes replicas; None if no other member does."""
    place = world.position(node)
    if place is None:
        return None
    others = [*world.nodes[place + 1 :], *world.nodes[:place]]
    return next((member for member in others if member.replica_port), None)


def job_secret(store: Store, job: str) -> Callable[[], bytes]:
    """Return a function that returns the secret of a job's agents. Anyone who can read the Store knows the secret."""
    return cache(partial(create_once, store, prefix(job) + "secret", secrets.token_bytes(_SECRET_NBYTES)))


class Replicator:
    """Exchanges states with other nodes in threads, until `close`. `say` gets every line that a person should see."""

    def __init__(
        self,
        node: str,
        folder: Path,
        slots: Sequence[Path],
        secret: Callable[[], bytes],
        say: Callable[[str], None],
        schedule: ReplicationSchedule | None = None,
        tls: PeerTLS | None = None,
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._node = node
        self._folder = ReplicaFolder(folder)
        self._folder.request_newer_than(None)
        self._slots = list(slots)
        self._secret = secret
        self._say = say
        self._schedule = schedule or ReplicationSchedule.from_env()
        self._lock = threading.Lock()
        self._peer: Member | None = None
        self._world = 0
        self._handing_over = False
        self._handed_over = False
        self._silent = False
        self._closing = False
        self._replicated_us = 0
        self._noticed: tuple[StateVersion, int] = (NO_VERSION, 0)
        self._tls = tls
        self._server = ReplicaServer(self._folder, secret, say, tls=tls)
        self._loop = BackgroundLoop("edl-replication", self._replicate)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def replicated_us(self) -> int:
        """The time of the newest state that the peer has from all workers, in microseconds since 1970, or 0."""
        return self._replicated_us

    def change_world(self, world: World) -> None:
        """Switch to the peer of another world. Call it before that world's workers start."""
        peer = replica_peer(world, self._node)
        with self._lock:
            same = peer is not None and self._peer is not None and peer.id == self._peer.id
            self._peer = peer
            self._world += 1
            self._handing_over = False
            self._handed_over = False
            self._folder.request_newer_than(None)
            self._schedule.start_world(same_peer=same)
            if not same:
                self._replicated_us = 0
        self._loop.wake()

    def hand_over_state(self) -> bool:
        """Send the paused workers' newest state to the peer. Call until it returns True: sent, failed or not needed."""
        if not self._handing_over:
            self._handing_over = True
            self._loop.wake()
        return self._handed_over

    def close(self) -> None:
        """Stop sending and receiving, even in the middle of a state. Completely received states stay."""
        self._closing = True
        self._server.close()
        self._loop.close(_CLOSE_S)

    def _replicate(self) -> float:
        with self._lock:
            peer, world = self._peer, self._world
        try:
            if self._handing_over and not self._handed_over:
                self._hand_over(peer, world)
            elif peer is not None:
                self._follow_schedule(peer, world)
        except OSError as exc:  # from the host's own memory
            self._report_failure(f"no replica of this node's state is made ({exc})")
        return _POLL_S

    def _follow_schedule(self, peer: Member, world: int) -> None:
        held = [find_slots(kept_prefix(slots)) for slots in self._slots]
        states = newest_common_state(held)
        common = states[0].header.version if states else NO_VERSION
        if self._noticed[0] != common:
            self._noticed = (common, time.time_ns() // 1000)
        noticed_us = self._noticed[1]
        newest = max((slot.header.version for found in held for slot in found), default=NO_VERSION)
        with self._lock:
            if world != self._world:
                return
            action = self._schedule.next_action(time.monotonic(), common, newest)
            if action is ReplicaAction.WANT and self._folder.requested_version() != newest:
                self._folder.request_newer_than(newest)
        if action is ReplicaAction.SEND:
            began = time.monotonic()
            done = self._send(peer, world, states)
            with self._lock:
                if world != self._world:
                    return
                if done:
                    self._schedule.record_sent(common, began, time.monotonic())
                    self._replicated_us = noticed_us
                else:
                    self._schedule.record_failure(time.monotonic())

    def _hand_over(self, peer: Member | None, world: int) -> None:
        held = [[*find_slots(slots), *find_slots(kept_prefix(slots))] for slots in self._slots]
        states = newest_common_state(held)
        try:
            if peer is not None and states and states[0].header.sharded:
                self._send(peer, world, states)
        finally:
            with self._lock:
                self._handed_over = self._handing_over and world == self._world

    def _send(self, peer: Member, world: int, states: Sequence[CompleteSlot]) -> bool:
        """Send the states of all workers. Returns whether the peer has received them."""

        def stopping() -> bool:
            return self._closing or world != self._world

        try:
            address = (peer.addr, peer.replica_port)
            send_states(address, self._secret(), self._node, states, stopping=stopping, tls=self._tls)
        except EDLError as exc:
            if not stopping():
                self._report_failure(f"node {peer.id} did not accept a replica of this node's state ({exc})")
            return False
        if self._silent:
            self._silent = False
            self._say(f"node {peer.id} accepts replicas of this node's state")
        return True

    def _report_failure(self, what: str) -> None:
        """Report a failure, but only once until a transfer succeeds."""
        if not self._silent:
            self._silent = True
            self._say(f"{what}: retrying later")
