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

from edl.collective.agent.checkpoint_persister import JobRun, Storing
from edl.collective.agent.exit_codes import Exit
from edl.collective.agent.health.peer_monitor import PeerConnections
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.launch_spec import Launch, MeetingPlace, meeting_place
from edl.collective.agent.membership.node_records import Membership
from edl.collective.agent.processes.pool import WorkerExit, ZygoteLost
from edl.collective.agent.signals import Signals
from edl.collective.agent.status_publisher import Chronicle
from edl.collective.agent.worker_group import Crew
from edl.collective.job_records import Node, State, World
from edl.collective.replica.replicator import JobSecret, Replication
from edl.discovery.store import Store
from edl.errors import ClosedError

__all__ = ["Ending", "Event", "Events", "Gone", "Part", "is_member", "take_part"]

_STORE_LAST_S = 30.0
_TELL_LAST_S = 5.0
_HURRIED_S = 0.5
_LOOK_S = 0.05


@dataclass(frozen=True)
class Gone:
    """The agent of another node is gone, its process at any rate."""

    node: str


Event = WorkerExit | ZygoteLost | Gone | None
"""None: something changed that has to be looked at."""
Events = queue.SimpleQueue[Event]


@dataclass
class Ending:
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
        return Exit.NOT_STORED if self.code == Exit.DONE and not self.stored else self.code

    @property
    def job_over(self) -> bool:
        """The job has ended, and this node was there."""
        return self.joined and self.code in (Exit.DONE, Exit.FAILED)


@dataclass
class Part:
    """One node's part in a job; `spare` is where the next world that this node is first in will meet."""

    told: Launch
    store: Store
    say: Callable[[str], None]
    signals: Signals
    events: Events
    host: HostFolder
    membership: Membership
    chronicle: Chronicle
    storing: Storing
    replicas: Replication
    tethers: PeerConnections
    crew: Crew
    spare: MeetingPlace
    ending: Ending = field(default_factory=Ending)

    @property
    def id(self) -> str:
        """The node's name in the job."""
        return self.membership.node.id


@contextmanager
def take_part(
    told: Launch, store: Store, say: Callable[[str], None], signals: Signals, events: Events
) -> Iterator[Part]:
    """Everything that one node needs for its part in a job. The block says in `Part.ending` how it ended.

    Whatever happens, nothing of it is left behind but a state in memory that somebody may go on from.

    Raises:
        SettingsError: checkpoints cannot be stored where they shall be.
        DiscoveryError: the store cannot be reached.
    """
    ending = Ending()
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    with ExitStack() as stack:
        host = HostFolder(f"{told.store} {told.job}", name)
        stack.callback(lambda: _give_up(host, told, ending))
        spare = meeting_place(told)
        node = Node(name, told.addr, spare.port, told.workers)
        membership = Membership(store, told.job, node, told.ttl_s, lambda: events.put(None))
        stack.callback(membership.close)
        chronicle = Chronicle(store, told.job, name, told.workers, say)
        stack.callback(
            lambda: chronicle.close(
                crew if ending.joined else None, timeout_s=_HURRIED_S if signals.urgent else _TELL_LAST_S
            )
        )
        slots = [host.slots(rank) for rank in range(told.workers)]
        fence = partial(_may_store, membership, signals)
        storing = Storing(
            told.checkpoint, slots, JobRun(store, told.job), fence, say, interval_s=told.checkpoint_interval_s
        )
        stack.callback(lambda: _store_last(storing, signals, say, ending, resumable=told.resumable))
        secret = JobSecret(store, told.job)
        replicas = Replication(name, host.replicas, [Path(each) for each in slots], secret, say, tls=told.tls)
        stack.callback(replicas.close)
        tethers = PeerConnections(name, lambda node: events.put(Gone(node)), told.tls)
        stack.callback(tethers.close)  # not before the workers are gone: others go on at once
        membership.update(replica_port=replicas.port, tether_port=tethers.port)
        crew = Crew(told, host, events.put, say, signals.heed)
        stack.callback(crew.close)
        yield Part(
            told, store, say, signals, events, host, membership, chronicle, storing, replicas, tethers, crew, spare,
            ending,
        )  # fmt: skip


def is_member(world: World, node: str) -> bool:
    """Whether a node is in a world."""
    return world.position(node) is not None


def _may_store(membership: Membership, signals: Signals) -> bool:
    """Whether a state of this node's still counts: the others have not gone on without it. Asked by a thread.

    Raises:
        DiscoveryError: the store does not answer, so nobody knows.
    """
    try:
        world = membership.world()
    except ClosedError:
        return False
    return signals.asked or world.state is not State.RUNNING or is_member(world, membership.node.id)


def _give_up(host: HostFolder, told: Launch, ending: Ending) -> None:
    """Whoever leaves last, or could not store what it had to, keeps the state in memory for a later start here."""
    if ending.exit_code == Exit.NOT_STORED:
        host.unstored = True
        host.close(keep=told.resumable)
        return
    keep = ending.code not in (Exit.DONE, Exit.FAILED) and ending.alone and told.resumable
    host.close(keep, used=ending.joined, ended=ending.job_over)


def _store_last(
    storing: Storing, signals: Signals, say: Callable[[str], None], ending: Ending, *, resumable: bool
) -> None:
    """Wait until the last checkpoint is stored, for a while, or until somebody does not want to wait any more."""
    done = ending.code == Exit.DONE
    # Slurm ends the wait itself: by its KillWait or GraceTime, which were chosen for what the storage needs.
    patient = done or (signals.slurm and signals.asked)
    if done:
        storing.store_newest()
    # In a thread, since a storage that hangs cannot be called back. That one ends with the process; what it has not
    # completed by then is left incomplete, which readers know.
    ending.stored = False

    def close() -> None:
        ending.stored = storing.close(_STORE_LAST_S, patient=patient)

    closing = threading.Thread(target=close, name="edl-store-last", daemon=True)
    closing.start()
    began, warned = time.monotonic(), False
    while closing.is_alive() and not signals.urgent:
        closing.join(_LOOK_S)
        if signals.asked and not warned and time.monotonic() - began > 1.0 and closing.is_alive():
            warned = True
            until = (
                "Slurm waits for it as long as its KillWait"
                if signals.slurm
                else "asked once more, this node leaves without it"
            )
            say(f"the last checkpoint is being stored; {until}")
    if closing.is_alive():
        say("the last checkpoint was not stored; what was stored before is as it was")
    if ending.exit_code == Exit.NOT_STORED:
        say(f"the job is done, its last state is not stored: exit code {Exit.NOT_STORED:d}")
        if resumable:
            say("it stays in this host's memory for an hour: the same command stores it, once the storage takes it")
