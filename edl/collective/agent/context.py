"""The resources that an agent holds while it takes part in a job: opened in order, closed in reverse order."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import socket
import time
import uuid
from concurrent.futures import wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from edl.background import start_call
from edl.collective.agent.ending import ExitCode, StopSignals, TerminationMessage
from edl.collective.agent.health.failures import ExitCause
from edl.collective.agent.health.peer_monitor import PeerConnections
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.launch_spec import LaunchSpec, open_master_endpoint
from edl.collective.agent.node_records import Membership
from edl.collective.agent.processes.pool import WorkerExit, ZygoteLost
from edl.collective.agent.status_publisher import StatusPublisher
from edl.collective.agent.worker_group import WorkerGroup
from edl.collective.checkpoint.storage.folder import new_run_id, run_name
from edl.collective.checkpoint.storage.writer import POLL_S, CheckpointPersister
from edl.collective.job_records import JobState, Node, create_once, prefix
from edl.collective.replica.replicator import Replicator, job_secret
from edl.discovery.store import Store
from edl.errors import ClosedError, ProtocolError

logger = logging.getLogger(__name__)


class JobRun:
    """Returns the run's name for checkpoints: the same while the Store has the records that count generations."""

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._key = prefix(job) + "run"
        self._known = ""

    def __call__(self) -> str:
        name = self._known or run_name(new_run_id())  # known, but lost by the store: it is restored
        found = create_once(self._store, self._key, name.encode())
        if re.fullmatch(rb"[0-9a-f]{16}", found) is None:
            raise ProtocolError(f"{self._key} in the store is not the name of a run: remove it")
        self._known = found.decode()
        return self._known


# --- States that are not stored yet, and the folder in memory, when an agent ends ---


_STORE_TIMEOUT_S = 30.0  # for a last state, at a job's end without progress. Kubernetes kills 30 s after SIGTERM
_POLL_S = 0.05  # how soon a second signal ends the wait; a person does not notice it
_SILENT_S = 1.0  # most states are stored sooner, which needs no message


@dataclass
class ShutdownState:
    """The state that decides how an agent releases its resources."""

    code: int | None = None  # the exit code; None while there is none
    joined: bool = False  # whether the other nodes have seen this node
    is_last_node: bool = True  # whether no other node was going to stay, when last checked
    stored: bool = True  # whether nothing is left to be stored
    end: TerminationMessage = field(default_factory=TerminationMessage)  # why this node left, without the exit code

    @property
    def exit_code(self) -> int | None:
        """The process's exit code. A finished job has not succeeded until its result is in storage."""
        return ExitCode.NOT_STORED if self.code == ExitCode.DONE and not self.stored else self.code

    @property
    def termination(self) -> TerminationMessage:
        code = self.exit_code
        message = "the job is done; its last state is not stored" if code == ExitCode.NOT_STORED else self.end.message
        return replace(self.end, exit_code=int(code if code is not None else ExitCode.FAILED), message=message)


def store_last_state(
    persister: CheckpointPersister, signals: StopSignals, shutdown: ShutdownState, *, resumable: bool
) -> None:
    """Wait until the last checkpoint is stored, a time limit passes or a second signal arrives. Closes `persister`."""
    done = shutdown.code == ExitCode.DONE
    # Slurm itself ends the wait, by its KillWait or GraceTime, which were chosen for what the storage needs. A job that
    # waits for a teacher loses nothing by waiting for the storage.
    waits = shutdown.end.cause == ExitCause.NO_TEACHER.value
    patient = done or waits or (signals.slurm and signals.stopping)
    if done:
        persister.store_newest()
    # In a thread, because a hanging storage call cannot be cancelled. The thread ends with the process. A checkpoint
    # that it has not completed by then stays incomplete, which readers recognize.
    closing = start_call("edl-store-last", lambda: persister.close(_STORE_TIMEOUT_S, patient=patient))
    began = time.monotonic()
    announced = False
    while not closing.done() and not signals.urgent:
        wait([closing], _POLL_S)
        if signals.stopping and not announced and time.monotonic() - began > _SILENT_S and not closing.done():
            announced = True
            until = (
                "Slurm waits for this up to its KillWait"
                if signals.slurm
                else "if asked again, this node leaves without storing it"
            )
            logger.info("storing the last checkpoint; %s", until)
    shutdown.stored = closing.done() and closing.result()
    if not closing.done():
        logger.warning("the last checkpoint was not stored; earlier checkpoints are unchanged")
    if shutdown.exit_code == ExitCode.NOT_STORED:
        code = int(ExitCode.NOT_STORED)
        fields = {"exit_code": code}
        logger.error("the job is done, but its last state is not stored: exit code %d", code, extra=fields)
        if resumable:
            logger.info(
                "the state stays in this host's memory for an hour: run the same command again when the storage works"
            )


def note_unstored_state(host: HostFolder, spec: LaunchSpec, shutdown: ShutdownState) -> None:
    """Mark the folder as holding an unstored last state of a finished job, in case the agent is killed first."""
    if shutdown.joined and shutdown.code == ExitCode.DONE and spec.checkpoint and spec.resumable:
        with contextlib.suppress(OSError):  # no room: the state is still stored, unless the agent is killed
            host.unstored = True


def release_host_folder(host: HostFolder, spec: LaunchSpec, shutdown: ShutdownState) -> None:
    """Release the folder. Its state stays for a later start if this node left last or could not store the state."""
    if shutdown.exit_code == ExitCode.NOT_STORED:
        host.unstored = True
        host.close(keep=spec.resumable)
        return
    keep = shutdown.code not in (ExitCode.DONE, ExitCode.FAILED) and shutdown.is_last_node and spec.resumable
    ended = shutdown.joined and shutdown.code in (ExitCode.DONE, ExitCode.FAILED)
    host.close(keep, used=shutdown.joined, ended=ended)


# --- Opening and closing everything ---


_PUBLISH_TIMEOUT_S = 5.0  # a store that does not answer must not delay the end for longer; an election takes 3 s
_URGENT_PUBLISH_TIMEOUT_S = 0.5  # for a node asked a second time to leave: a healthy store answers within it


@dataclass(frozen=True)
class PeerLost:
    """Reports that another node's agent has ended."""

    node: str


AgentEvent = WorkerExit | ZygoteLost | PeerLost | None  # None: something changed and must be looked at
EventQueue = queue.SimpleQueue[AgentEvent]


class AgentContext:
    """The resources of a node's agent, which `stack` closes in reverse order, in the way that `shutdown` says."""

    def __init__(
        self, spec: LaunchSpec, store: Store, signals: StopSignals, events: EventQueue, stack: ExitStack
    ) -> None:
        self.spec = spec
        self.store = store
        self.signals = signals
        self.events = events
        self.shutdown = ShutdownState()
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"  # the node's name in the job
        self.host = HostFolder(f"{spec.store} {spec.job}", self.id)
        stack.callback(release_host_folder, self.host, spec, self.shutdown)
        self.next_master = open_master_endpoint(spec)
        node = Node(self.id, spec.addr, self.next_master.port, spec.workers)
        self.membership = Membership(store, spec.job, node, spec.ttl_s, partial(events.put, None))
        stack.callback(self.membership.close)
        self.status = StatusPublisher(store, spec.job, self.id, spec.workers)
        stack.callback(lambda: self.status.close(_URGENT_PUBLISH_TIMEOUT_S if signals.urgent else _PUBLISH_TIMEOUT_S))
        slots = [Path(self.host.slots(rank)) for rank in range(spec.workers)]
        self.persister = CheckpointPersister(
            spec.checkpoint,
            slots,
            logger.warning,
            report_stored=logger.info,
            run=JobRun(store, spec.job),
            fence=partial(_may_complete_checkpoint, self.membership, signals),
            interval_s=spec.checkpoint_interval_s,
            poll_s=POLL_S,
        )
        stack.callback(store_last_state, self.persister, signals, self.shutdown, resumable=spec.resumable)
        stack.callback(note_unstored_state, self.host, spec, self.shutdown)
        secret = job_secret(store, spec.job)
        self.replicas = stack.enter_context(
            closing(Replicator(self.id, self.host.replicas, slots, secret, logger.info, tls=spec.tls))
        )
        # Closed after the workers are gone, since other nodes continue as soon as a connection breaks.
        self.peer_connections = stack.enter_context(
            closing(PeerConnections(self.id, lambda peer: events.put(PeerLost(peer)), spec.tls))
        )
        self.membership.update_node(replica_port=self.replicas.port, tether_port=self.peer_connections.port)
        self.worker_group = stack.enter_context(
            closing(WorkerGroup(spec, self.host, events.put, signals.raise_if_stopping))
        )


def _may_complete_checkpoint(membership: Membership, signals: StopSignals) -> bool:
    """Return whether this node's state still counts: the node is leaving, or others have not continued without it.

    Any thread may call this.

    Raises:
        DiscoveryError: The store does not answer, so whether the state counts is unknown.
    """
    try:
        world = membership.read_world()
    except ClosedError:
        return False
    return signals.stopping or world.state is not JobState.RUNNING or world.position(membership.node.id) is not None
