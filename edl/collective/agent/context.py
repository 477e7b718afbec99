"""What an agent holds while it takes part in a job: acquired in order, and given back in the opposite order."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edl.collective.agent.exit_codes import ExitCode
from edl.collective.agent.health.peer_monitor import PeerConnections
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.job_run import JobRun
from edl.collective.agent.launch_spec import LaunchSpec, MasterEndpoint, open_master_endpoint
from edl.collective.agent.membership.node_records import Membership
from edl.collective.agent.processes.pool import WorkerExit, ZygoteLost
from edl.collective.agent.signals import StopSignals
from edl.collective.agent.status_publisher import StatusPublisher
from edl.collective.agent.worker_group import WorkerGroup
from edl.collective.checkpoint.storage.persister import POLL_S, CheckpointPersister
from edl.collective.job_records import JobState, Node, World
from edl.collective.replica.replicator import JobSecret, Replicator
from edl.discovery.store import Store
from edl.errors import ClosedError

__all__ = ["ShutdownState", "AgentEvent", "EventQueue", "PeerLost", "AgentContext", "is_member", "open_agent_context"]

_STORE_LAST_S = 30.0
_TELL_LAST_S = 5.0
_HURRIED_S = 0.5
_LOOK_S = 0.05


@dataclass(frozen=True)
class PeerLost:
    """The agent of another node is gone, its process at any rate."""

    node: str


AgentEvent = WorkerExit | ZygoteLost | PeerLost | None
"""None: something changed that has to be looked at."""
EventQueue = queue.SimpleQueue[AgentEvent]


@dataclass
class ShutdownState:
    """What has to be known when everything is given back.

    Attributes:
        code: the exit code, None while there is none.
        joined: the others have seen this node.
        alone: no other node was there last that was to stay.
        stored: nothing was left that had to be taken to storage.
    """

    code: int | None = None
    joined: bool = False
    alone: bool = True
    stored: bool = True

    @property
    def exit_code(self) -> int | None:
        """What the process is to end with: a job that is done is not a success while its result is in no storage."""
        return ExitCode.NOT_STORED if self.code == ExitCode.DONE and not self.stored else self.code

    @property
    def job_over(self) -> bool:
        """The job has ended, and this node was there."""
        return self.joined and self.code in (ExitCode.DONE, ExitCode.FAILED)


@dataclass
class AgentContext:
    """One node's part in a job; `spare` is where the next world that this node is first in will meet."""

    spec: LaunchSpec
    store: Store
    say: Callable[[str], None]
    signals: StopSignals
    events: EventQueue
    host: HostFolder
    membership: Membership
    status: StatusPublisher
    persister: CheckpointPersister
    replicas: Replicator
    peer_connections: PeerConnections
    worker_group: WorkerGroup
    spare: MasterEndpoint
    shutdown: ShutdownState = field(default_factory=ShutdownState)

    @property
    def id(self) -> str:
        """The node's name in the job."""
        return self.membership.node.id


@contextmanager
def open_agent_context(
    spec: LaunchSpec, store: Store, say: Callable[[str], None], signals: StopSignals, events: EventQueue
) -> Iterator[AgentContext]:
    """Everything that one node needs for its part in a job. The block says in `AgentContext.shutdown` how it ended.

    Whatever happens, nothing of it is left behind but a state in memory that somebody may go on from.

    Raises:
        SettingsError: checkpoints cannot be stored where they shall be.
        DiscoveryError: the store cannot be reached.
    """
    shutdown = ShutdownState()
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    with ExitStack() as stack:
        host = HostFolder(f"{spec.store} {spec.job}", name)
        stack.callback(lambda: _give_up(host, spec, shutdown))
        spare = open_master_endpoint(spec)
        node = Node(name, spec.addr, spare.port, spec.workers)
        membership = Membership(store, spec.job, node, spec.ttl_s, lambda: events.put(None))
        stack.callback(membership.close)
        status = StatusPublisher(store, spec.job, name, spec.workers, say)
        stack.callback(
            lambda: status.close(
                worker_group if shutdown.joined else None, timeout_s=_HURRIED_S if signals.urgent else _TELL_LAST_S
            )
        )
        slots = [Path(host.slots(rank)) for rank in range(spec.workers)]
        fence = partial(_may_store, membership, signals)
        persister = CheckpointPersister(
            spec.checkpoint, slots, say, report_stored=say, run=JobRun(store, spec.job), fence=fence,
            interval_s=spec.checkpoint_interval_s, poll_s=POLL_S,
        )  # fmt: skip
        stack.callback(lambda: _store_last(persister, signals, say, shutdown, resumable=spec.resumable))
        secret = JobSecret(store, spec.job)
        replicas = Replicator(name, host.replicas, slots, secret, say, tls=spec.tls)
        stack.callback(replicas.close)
        peer_connections = PeerConnections(name, lambda node: events.put(PeerLost(node)), spec.tls)
        stack.callback(peer_connections.close)  # not before the workers are gone: others go on at once
        membership.update_node(replica_port=replicas.port, tether_port=peer_connections.port)
        worker_group = WorkerGroup(spec, host, events.put, say, signals.raise_if_stopping)
        stack.callback(worker_group.close)
        yield AgentContext(
            spec, store, say, signals, events, host, membership, status, persister, replicas, peer_connections,
            worker_group, spare, shutdown,
        )  # fmt: skip


def is_member(world: World, node: str) -> bool:
    """Whether a node is in a world."""
    return world.position(node) is not None


def _may_store(membership: Membership, signals: StopSignals) -> bool:
    """Whether a state of this node's still counts: the others have not gone on without it. Asked by a thread.

    Raises:
        DiscoveryError: the store does not answer, so nobody knows.
    """
    try:
        world = membership.read_world()
    except ClosedError:
        return False
    return signals.stopping or world.state is not JobState.RUNNING or is_member(world, membership.node.id)


def _give_up(host: HostFolder, spec: LaunchSpec, shutdown: ShutdownState) -> None:
    """Whoever leaves last, or could not store what it had to, keeps the state in memory for a later start here."""
    if shutdown.exit_code == ExitCode.NOT_STORED:
        host.unstored = True
        host.close(keep=spec.resumable)
        return
    keep = shutdown.code not in (ExitCode.DONE, ExitCode.FAILED) and shutdown.alone and spec.resumable
    host.close(keep, used=shutdown.joined, ended=shutdown.job_over)


def _store_last(
    persister: CheckpointPersister,
    signals: StopSignals,
    say: Callable[[str], None],
    shutdown: ShutdownState,
    *,
    resumable: bool,
) -> None:
    """Wait until the last checkpoint is stored, for a while, or until somebody does not want to wait any more."""
    done = shutdown.code == ExitCode.DONE
    # Slurm ends the wait itself: by its KillWait or GraceTime, which were chosen for what the storage needs.
    patient = done or (signals.slurm and signals.stopping)
    if done:
        persister.store_newest()
    # In a thread, since a storage that hangs cannot be called back. That one ends with the process; what it has not
    # completed by then is left incomplete, which readers know.
    shutdown.stored = False

    def close() -> None:
        shutdown.stored = persister.close(_STORE_LAST_S, patient=patient)

    closing = threading.Thread(target=close, name="edl-store-last", daemon=True)
    closing.start()
    began, warned = time.monotonic(), False
    while closing.is_alive() and not signals.urgent:
        closing.join(_LOOK_S)
        if signals.stopping and not warned and time.monotonic() - began > 1.0 and closing.is_alive():
            warned = True
            until = (
                "Slurm waits for it as long as its KillWait"
                if signals.slurm
                else "asked once more, this node leaves without it"
            )
            say(f"the last checkpoint is being stored; {until}")
    if closing.is_alive():
        say("the last checkpoint was not stored; what was stored before is as it was")
    if shutdown.exit_code == ExitCode.NOT_STORED:
        say(f"the job is done, its last state is not stored: exit code {ExitCode.NOT_STORED:d}")
        if resumable:
            say("it stays in this host's memory for an hour: the same command stores it, once the storage takes it")
