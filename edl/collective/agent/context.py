"""The resources that an agent holds while it takes part in a job: opened in order, and closed in the opposite order."""

from __future__ import annotations

import logging
import os
import queue
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edl.collective.agent.health.peer_monitor import PeerConnections
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.job_run import JobRun
from edl.collective.agent.launch_spec import LaunchSpec, MasterEndpoint, open_master_endpoint
from edl.collective.agent.membership.node_records import Membership
from edl.collective.agent.processes.pool import WorkerExit, ZygoteLost
from edl.collective.agent.shutdown import (
    ShutdownState,
    note_unstored_state,
    release_host_folder,
    store_last_state,
)
from edl.collective.agent.signals import StopSignals
from edl.collective.agent.status_publisher import StatusPublisher
from edl.collective.agent.workers.worker_group import WorkerGroup
from edl.collective.checkpoint.storage.persister import POLL_S, CheckpointPersister
from edl.collective.job_records import JobState, Node, World
from edl.collective.replica.replicator import JobSecret, Replicator
from edl.discovery.store import Store
from edl.errors import ClosedError

__all__ = ["AgentContext", "AgentEvent", "EventQueue", "PeerLost", "is_member", "open_agent_context"]

logger = logging.getLogger(__name__)

_PUBLISH_TIMEOUT_S = 5.0  # a store that does not answer at the end must not keep the agent; an election takes 3 s
_URGENT_PUBLISH_TIMEOUT_S = 0.5  # of a node that was asked a second time: a store that is well answers within it


@dataclass(frozen=True)
class PeerLost:
    """The end of another node's agent, its process at any rate.

    Attributes:
        node: its name.
    """

    node: str


AgentEvent = WorkerExit | ZygoteLost | PeerLost | None
"""An event that wakes an agent; None: something changed that has to be looked at."""
EventQueue = queue.SimpleQueue[AgentEvent]


@dataclass
class AgentContext:
    """The resources of a node's agent.

    Attributes:
        spec: this node's part of the job.
        store: shared by all nodes.
        signals: that ask this node to leave.
        events: to be acted on.
        host: the folder in this host's memory.
        membership: this node's and the job's records in the store.
        status: publishes where the time goes.
        persister: takes states to storage.
        replicas: keeps copies of states on other nodes.
        peer_connections: by which the end of other nodes' agents is known at once.
        worker_group: this node's workers.
        next_master: where the ranks of the next world meet that this node is first in.
        shutdown: how this node's part ends.
    """

    spec: LaunchSpec
    store: Store
    signals: StopSignals
    events: EventQueue
    host: HostFolder
    membership: Membership
    status: StatusPublisher
    persister: CheckpointPersister
    replicas: Replicator
    peer_connections: PeerConnections
    worker_group: WorkerGroup
    next_master: MasterEndpoint
    shutdown: ShutdownState

    @property
    def id(self) -> str:
        """The node's name in the job."""
        return self.membership.node.id


@contextmanager
def open_agent_context(
    spec: LaunchSpec, store: Store, signals: StopSignals, events: EventQueue
) -> Iterator[AgentContext]:
    """Open everything that a node needs for its part in a job, and close it after the block.

    The block records in `AgentContext.shutdown` how it ended. Whatever happens, nothing is left behind but a state in
    memory that a later start may go on from.

    Args:
        spec: this node's part of the job.
        store: shared by all nodes; stays the caller's to close.
        signals: that ask this node to leave.
        events: where everything that happens is put.

    Yields:
        What is open.

    Raises:
        SettingsError: checkpoints cannot be stored where they shall be.
        DiscoveryError: the store cannot be reached.
    """
    shutdown = ShutdownState()
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    with ExitStack() as stack:
        host = HostFolder(f"{spec.store} {spec.job}", name)
        stack.callback(release_host_folder, host, spec, shutdown)
        next_master = open_master_endpoint(spec)
        node = Node(name, spec.addr, next_master.port, spec.workers)
        membership = Membership(store, spec.job, node, spec.ttl_s, partial(events.put, None))
        stack.callback(membership.close)
        status = StatusPublisher(store, spec.job, name, spec.workers)
        stack.callback(_close_status, status, signals)
        slots = [Path(host.slots(rank)) for rank in range(spec.workers)]
        persister = CheckpointPersister(
            spec.checkpoint,
            slots,
            logger.warning,
            report_stored=logger.info,
            run=JobRun(store, spec.job),
            fence=partial(_may_complete_checkpoint, membership, signals),
            interval_s=spec.checkpoint_interval_s,
            poll_s=POLL_S,
        )
        stack.callback(store_last_state, persister, signals, shutdown, resumable=spec.resumable)
        stack.callback(note_unstored_state, host, spec, shutdown)
        secret = JobSecret(store, spec.job)
        replicas = stack.enter_context(
            closing(Replicator(name, host.replicas, slots, secret, logger.info, tls=spec.tls))
        )
        # Closed after the workers are gone: other nodes go on as soon as a connection breaks.
        peer_connections = stack.enter_context(
            closing(PeerConnections(name, lambda peer: events.put(PeerLost(peer)), spec.tls))
        )
        membership.update_node(replica_port=replicas.port, tether_port=peer_connections.port)
        worker_group = stack.enter_context(closing(WorkerGroup(spec, host, events.put, signals.raise_if_stopping)))
        yield AgentContext(
            spec=spec,
            store=store,
            signals=signals,
            events=events,
            host=host,
            membership=membership,
            status=status,
            persister=persister,
            replicas=replicas,
            peer_connections=peer_connections,
            worker_group=worker_group,
            next_master=next_master,
            shutdown=shutdown,
        )


def is_member(world: World, node: str) -> bool:
    """Return whether a node is in a world."""
    return world.position(node) is not None


def _close_status(status: StatusPublisher, signals: StopSignals) -> None:
    status.close(timeout_s=_URGENT_PUBLISH_TIMEOUT_S if signals.urgent else _PUBLISH_TIMEOUT_S)


def _may_complete_checkpoint(membership: Membership, signals: StopSignals) -> bool:
    """Return whether a state of this node still counts: the others have not gone on without it. For any thread.

    Raises:
        DiscoveryError: the store does not answer, so it is not known.
    """
    try:
        world = membership.read_world()
    except ClosedError:
        return False
    return signals.stopping or world.state is not JobState.RUNNING or is_member(world, membership.node.id)
