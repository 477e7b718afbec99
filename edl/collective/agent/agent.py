"""One node's part of a job: it keeps the node's record, follows the job's, and runs this node's workers accordingly.

A single thread acts; the others only put what they learn (a record changed, a worker ended, a signal came) into its
queue. What should become of the job is decided by `world.next_world`, what ended workers mean by `failures.judge`.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from edl.collective.agent.checking import check_before_joining
from edl.collective.agent.chronicle import Chronicle
from edl.collective.agent.crew import HANGING, Crew
from edl.collective.agent.host import HostFolder
from edl.collective.agent.launch import Launch, meeting_place
from edl.collective.agent.membership import Membership, Records
from edl.collective.agent.nodecheck_run import CheckSettings
from edl.collective.agent.storing import JobRun, Storing
from edl.collective.agent.stragglers import StepTimes
from edl.collective.agent.tether import Tethers, neighbours
from edl.collective.agent.workers import Exited, ZygoteLost
from edl.collective.agent.world import Moment, Node, State, World, failed, next_world
from edl.collective.ledger.node import Doing
from edl.collective.replica.replication import JobSecret, Replication
from edl.discovery.store import Store
from edl.errors import DiscoveryError

__all__ = ["Agent", "Exit"]

_TICK_S = 0.1
_PAUSING_TICK_S = 0.01
_REREAD_S = 1.0
_STORE_LAST_S = 30.0
_WINDOW_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Exit(IntEnum):
    """How `edl run` ends; a node that left on a signal ends with 128 and the signal's number, as 143 for SIGTERM."""

    DONE = 0
    FAILED = 1
    """The script raised, or ended with another code than 0."""
    NO_QUORUM = 75
    """Too few nodes came within the deadline (EX_TEMPFAIL of sysexits.h): try again later."""
    FAULTY_NODE = 69
    """This node did not pass the check before joining (EX_UNAVAILABLE): run elsewhere."""


@dataclass(frozen=True)
class Signalled:
    """The agent got a signal."""

    number: int


@dataclass(frozen=True)
class Gone:
    """The agent of another node is gone, its process at any rate."""

    node: str


Event = Exited | ZygoteLost | Signalled | Gone | None


class Agent:
    """Runs one node of a job until the job has ended or this node shall leave.

    Args:
        told: this node's part.
        store: shared by all nodes; stays the caller's to close.
        say: called with each line that a person should see.
    """

    def __init__(self, told: Launch, store: Store, say: Callable[[str], None]) -> None:
        self._told = told
        self._store = store
        self._say = say
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
        self._host = HostFolder(f"{told.store} {told.job}", name)
        self._crew = Crew(told, self._host, self._events.put)
        self._chronicle = Chronicle(store, told.job, name, told.workers, say)
        self._step_times = StepTimes()
        self._shared_at = time.monotonic()
        self._meeting = self._spare = meeting_place(told)
        slots = [self._host.slots(rank) for rank in range(told.workers)]
        prefixes = [Path(each) for each in slots]
        self._replicas = Replication(name, self._host.replicas, prefixes, JobSecret(store, told.job), say)
        self._tethers = Tethers(name, lambda node: self._events.put(Gone(node)))
        node = Node(name, told.addr, self._spare.port, told.workers, self._replicas.port, self._tethers.port)
        self._membership = Membership(store, told.job, node, told.ttl_s, lambda: self._events.put(None))
        self._storing = Storing(told.checkpoint, slots, JobRun(store, told.job), self._may_store, say)
        self._seen_nodes: frozenset[str] = frozenset()
        self._seen_nodes_at = time.monotonic()
        self._seen_pause: tuple[int, int | None] = (-1, None)
        self._seen_pause_at = time.monotonic()
        self._waiting_since = time.monotonic()
        self._read_at = -math.inf
        self._unreachable = False
        self._alone = True
        self._reserve = False
        self._signals: list[int] = []
        self._gone: set[str] = set()

    def run(self) -> int:
        """Take part until the end. Returns the exit code, an `Exit`.

        Call it from the main thread: signals are handled here, and workers die with the thread that started them.
        """
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's, for one
        handlers = {number: signal.signal(number, self._signalled) for number in heeded}
        code: int | None = None
        joined = False
        try:
            code = self._too_late()
            if code is None and self._told.check is not None:
                code = self._check(self._told.check)
            if code is None:
                complaint = self._crew.warm_up()
                if complaint:
                    self._say(f"{complaint}; each worker will import it by itself")
                self._membership.join()
                joined = True
                self._inherit()
                self._chronicle.tell("join", "ready")
            while code is None:
                code = self._turn()
            return code
        finally:
            self._crew.close()
            self._tethers.close()  # not before the workers are gone: others go on at once
            self._replicas.close()
            if code == Exit.DONE:
                self._storing.store_newest()
            self._storing.close(_STORE_LAST_S, patient=code == Exit.DONE)
            self._chronicle.close(self._crew, took_part=joined)
            self._membership.close()
            # Whoever leaves last keeps the state in memory for a later start on this host.
            self._host.close(keep=code not in (Exit.DONE, Exit.FAILED) and self._alone and self._told.resumable)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    # --- What comes in. ---

    def _signalled(self, number: int, frame: object) -> None:
        self._events.put(Signalled(number))

    def _too_late(self) -> int | None:
        """Whether the job has ended already: a late node has nothing to do. A failed job is started again."""
        deadline = time.monotonic() + 4 * self._told.ttl_s
        while True:
            records = self._membership.read()
            world = records.world
            if world.state is State.DONE:
                self._say(f"job {self._told.job} has ended already ({world.message}): nothing to do")
                self._say("another --rdzv-id starts another job")
                return Exit.DONE
            if world.state is not State.FAILED:
                return None
            if not records.nodes:
                self._membership.propose(World(world.generation, message="started again"), records.version)
            elif time.monotonic() > deadline:
                self._say(f"job {self._told.job} has failed, and its nodes have not left yet: try again in a moment")
                return Exit.FAILED
            else:
                time.sleep(_TICK_S)

    def _inherit(self) -> None:
        """Say whether a state in memory, which an agent of this job left when it died, is used."""
        heir_of = self._host.heir_of
        if not heir_of:
            return
        if self._membership.read().world.generation >= 0:
            self._say(f"node {heir_of} died here, and left its workers' state in memory: it is used")
        else:
            self._host.forget_slots()  # of a job that this store knows nothing of
            self._say(f"node {heir_of} left a state in memory, of a job before this one: it is removed")

    def _check(self, settings: CheckSettings) -> int | None:
        """Test this node and others that wait. Returns the exit code of one that is faulty."""
        node, told = self._membership.node, self._told
        found = check_before_joining(
            self._store, told.job, node.id, told.addr, max(1.0, told.rules.last_call_s), settings, self._say
        )
        for name, why in found.slow.items():
            self._say(f"{'this node' if name == node.id else name} is slow: {why}")
        if node.id in found.faulty:
            self._say(f"this node is faulty: {found.faulty[node.id]}; it does not join, exit code {Exit.FAULTY_NODE:d}")
            return Exit.FAULTY_NODE
        return None

    def _turn(self) -> int | None:
        """Wait for something to happen, or a moment, and act on it."""
        pausing = self._crew.running and self._seen_pause[1] is not None
        woken = self._drain(_PAUSING_TICK_S if pausing else _TICK_S)
        if len(self._signals) > 1:
            self._say("asked a second time: leaving at once")
            return self._left()
        self._crew.look()
        self._chronicle.observe(self._doing(), self._crew)
        self._share_times()
        due = time.monotonic() - self._read_at >= (_REREAD_S if self._crew.running and not pausing else _TICK_S)
        paused = pausing and self._membership.node.paused != self._crew.generation and self._crew.paused
        if not (woken or due or paused or self._crew.failing):
            return None
        try:
            while self._gone:
                self._membership.bury(self._gone.pop())
            records = self._membership.read()
            self._read_at = time.monotonic()
            if self._unreachable:
                self._unreachable = False
                self._say("the store answers again")
            return self._act(records)
        except DiscoveryError as exc:
            return self._without_store(exc)

    def _drain(self, timeout_s: float) -> bool:
        """Take in all events. Returns whether there were any."""
        woken = False
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                woken = True
                if isinstance(event, Signalled):
                    self._signals.append(event.number)
                    if len(self._signals) == 1:
                        self._say("asked to leave: the others are told, and this node goes after the next steps")
                elif isinstance(event, Gone):
                    self._gone.add(event.node)
                elif event is not None:
                    self._crew.take(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return woken

    # --- What follows from it. ---

    def _act(self, records: Records) -> int | None:
        world = records.world
        self._note_changes(records)
        if world.ended:
            return self._end(world)
        position = world.position(self._membership.node.id) if world.state is State.RUNNING else None
        self._reserve = position is None and len(world.nodes) >= self._told.rules.max_nodes
        if position is None:
            code = self._wait(records)
            if code is not None:
                return code
        elif world.generation != self._crew.generation:
            self._begin(world, position)
        if self._crew.running:
            self._crew.ask_pause(world.pause_at)
        self._tell(world)
        return self._decide(records)

    def _begin(self, world: World, position: int) -> None:
        member = world.nodes[position]
        last = member.first_rank + member.local_world_size - 1
        ranks = f"rank {last}" if last == member.first_rank else f"ranks {member.first_rank}-{last}"
        self._say(f"generation {world.generation} ({world.message}): {_count(world.size, 'rank')}, {ranks} here")
        self._chronicle.tell("generation", world.message, world.generation)
        if world.message.startswith(HANGING) and self._crew.running:
            self._say(f"what the workers of this node did:\n{self._crew.stacks()}")
            self._chronicle.tell("hang", world.message, world.generation - 1)
        if position == 0:
            self._meeting, self._spare = self._spare, meeting_place(self._told)
        if self._crew.running:
            self._chronicle.observe(Doing.RENDEZVOUS, self._crew)  # what follows is no training of the old workers
        self._replicas.world_changed(world)
        self._tethers.follow(neighbours(world, position))
        self._crew.begin(world, position)

    def _wait(self, records: Records) -> int | None:
        """This node is not a member now. Returns the exit code if it is not to wait for that."""
        if self._crew.running:
            self._crew.halt()
            self._waiting_since = time.monotonic()
            if records.world.state is State.RUNNING and not self._signals:
                self._say("the others went on without this node, which was silent: it joins them again")
                self._replicas.world_changed(records.world)
                self._host.forget_slots()  # theirs are newer, and must not be mixed up with these
        if self._signals:
            saved = self._membership.node.paused >= 0
            self._chronicle.tell("leave", "asked to", records.world.generation)
            self._say("left; every step until now is saved" if saved else "left")
            return self._left()
        waited_s = time.monotonic() - self._waiting_since
        if records.world.state is State.FORMING and waited_s > self._told.join_timeout_s:
            wanted = self._told.rules.min_nodes
            self._say(
                f"only {_count(len(records.nodes), 'node')} of at least {wanted} came within {waited_s:.0f} s "
                f"(--rdzv-conf join_timeout=SECONDS waits longer): giving up, exit code {Exit.NO_QUORUM:d}"
            )
            return Exit.NO_QUORUM
        return None

    def _decide(self, records: Records) -> int | None:
        """Propose what the job's record should become."""
        world = records.world
        ended = any(node.finished == world.generation for node in records.nodes.values())
        verdict = self._crew.verdict(others_ended=ended)
        if verdict is not None and verdict.fatal:
            proposal: World | None = failed(world, verdict.fatal)
        else:
            moment = self._moment(verdict.restart if verdict is not None else self._stopped_before(world))
            proposal = next_world(world, records.nodes, moment, self._told.rules)
        if proposal is None or proposal == world:
            return None
        if not self._membership.propose(proposal, records.version):
            self._events.put(None)  # somebody was first: look again
            return None
        if verdict is not None:
            self._crew.restarted(verdict)
            self._storing.store_newest()
            kind, text = ("error", verdict.fatal) if verdict.fatal else ("restart", verdict.restart)
            self._chronicle.tell(kind, text, world.generation)
        return self._act(self._membership.read())  # the others learn of it by their watches

    def _stopped_before(self, world: World) -> str:
        """Why this node's part of the present generation does not run any more, if it is so.

        It cannot begin again: its ranks have met, and others may have gone on.
        """
        same = world.state is State.RUNNING and world.generation == self._crew.generation
        over = self._crew.running or self._membership.node.finished == world.generation
        return (
            "its workers were stopped while the store was away" if same and self._is_member(world) and not over else ""
        )

    def _moment(self, restart: str) -> Moment:
        now = time.monotonic()
        return Moment(
            node=self._membership.node.id,
            quiet_s=now - self._seen_nodes_at,
            pausing_s=now - self._seen_pause_at if self._seen_pause[1] is not None else 0.0,
            pause_step=self._crew.pause_step(),
            pause_needs_s=self._crew.pause_needs_s(),
            restart=restart,
            dead=frozenset({self._host.heir_of}),
        )

    def _note_changes(self, records: Records) -> None:
        """Remember since when the nodes, and the wish to pause, are what they are."""
        now = time.monotonic()
        nodes = frozenset(records.nodes)
        self._alone = nodes <= {self._membership.node.id}
        if nodes != self._seen_nodes:
            self._seen_nodes, self._seen_nodes_at = nodes, now
        pause = (records.world.generation, records.world.pause_at)
        if pause != self._seen_pause:
            self._seen_pause, self._seen_pause_at = pause, now

    def _share_times(self) -> None:
        """Every window, tell the others what this node's ranks took for a step."""
        now = time.monotonic()
        if not self._crew.running or now - self._shared_at < _WINDOW_S:
            return
        self._shared_at = now
        first = self._crew.first_rank
        own_s = self._step_times.window({first + rank: one for rank, one in self._crew.readings().items()})
        if own_s:
            self._chronicle.share_times(self._crew.generation, own_s, leads=first == 0)

    def _doing(self) -> Doing:
        """What this node's time is spent on, as far as the workers' boards do not say more."""
        if self._crew.finished:
            return Doing.IDLE
        if self._crew.running:
            return Doing.RUNNING
        return Doing.IDLE if self._reserve else Doing.RENDEZVOUS

    def _tell(self, world: World) -> None:
        """Bring this node's record up to date."""
        node, crew = self._membership.node, self._crew
        changes: dict[str, Any] = {}
        if self._signals and not node.leaving:
            changes["leaving"] = True
        paused = crew.generation if crew.paused and world.pause_at is not None else -1
        if paused >= 0 and self._signals and not self._replicas.hand_over():
            paused = -1  # whoever goes on needs what only this node has
        if node.paused != paused and (paused >= 0 or not self._signals):
            changes["paused"] = paused
        if node.finished != crew.generation and crew.finished:
            changes["finished"] = crew.generation
        if node.port != self._spare.port:
            changes["port"] = self._spare.port
        if changes:
            self._membership.update(**changes)

    def _may_store(self) -> bool:
        """Whether a state of this node's still counts: the others have not gone on without it. Asked by a thread."""
        try:
            world = self._membership.world()
        except DiscoveryError:
            return False
        return bool(self._signals) or world.state is not State.RUNNING or self._is_member(world)

    def _is_member(self, world: World) -> bool:
        return world.position(self._membership.node.id) is not None

    def _end(self, world: World) -> int:
        self._crew.halt()
        if world.state is State.DONE:
            self._say(f"job {self._told.job} has ended: {world.message}")
            return Exit.DONE
        self._say(f"job {self._told.job} has failed: {world.message}")
        return Exit.FAILED

    def _without_store(self, exc: DiscoveryError) -> int | None:
        """The store does not answer. Workers go on, but not so long that others may have taken the job over."""
        if not self._unreachable:
            self._unreachable = True
            self._say(f"the store does not answer ({exc}): going on without it for a while")
        cut_s = self._membership.cut_s
        if self._crew.running and cut_s > 0.8 * self._told.rules.takeover_s:
            self._say(f"no answer for {cut_s:.0f} s: the workers are stopped until the store is back")
            self._crew.halt()
        return self._left() if self._signals and not self._crew.running else None

    def _left(self) -> int:
        return 128 + self._signals[-1]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
