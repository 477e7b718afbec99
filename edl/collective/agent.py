"""One node's part of a job: it keeps the node's record, follows the job's, and runs this node's workers accordingly.

A single thread acts; the others only put what they learn (a record changed, a worker ended, a signal came) into its
queue. What should become of the job is decided by `world.next_world`, what ended workers mean by `failures.judge`.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import socket
import statistics
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from edl.collective import failures, launch
from edl.collective.board import Board
from edl.collective.host import HostFolder
from edl.collective.launch import Launch
from edl.collective.membership import Membership, Records
from edl.collective.workers import Exited, Workers, ZygoteLost
from edl.collective.world import Moment, Node, State, World, failed, next_world
from edl.discovery.store import Store
from edl.errors import DiscoveryError, EDLError

__all__ = ["Agent", "Exit"]

_TICK_S = 0.1
_PAUSING_TICK_S = 0.01
_REREAD_S = 1.0
_ECHO_S = 0.5
_STOPPED_S = 1.0
_FRUITLESS_RESTARTS = 10
_PAUSE_MARGIN_S = 0.3
_REGROUP_S = 2.0


class Exit(IntEnum):
    """How `edl run` ends."""

    DONE = 0
    FAILED = 1
    """The script raised, or ended with another code than 0."""
    NO_QUORUM = 75
    """Too few nodes came within the deadline (EX_TEMPFAIL of sysexits.h): try again later."""
    LEFT = 143
    """This node was asked to leave by SIGTERM, and did; the job may go on elsewhere."""


@dataclass(frozen=True)
class Signalled:
    """The agent got a signal."""

    number: int


Event = Exited | ZygoteLost | Signalled | None


class Agent:
    """Runs one node of a job until the job has ended or this node shall leave.

    Args:
        told: this node's part.
        store: shared by all nodes; stays the caller's to close.
        say: called with each line that a person should see.
    """

    def __init__(self, told: Launch, store: Store, say: Callable[[str], None]) -> None:
        self._told = told
        self._say = say
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._workers = Workers(told.warm, self._events.put)
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
        self._host = HostFolder(told.job, name)
        self._boards = {rank: Board.create(self._host.board(rank)) for rank in range(told.workers)}
        self._meeting = self._spare = _new_store()
        node = Node(name, told.addr, self._spare.port, told.workers)
        self._membership = Membership(store, told.job, node, told.ttl_s, lambda: self._events.put(None))
        self._generation = -1
        """Of the workers that run here, -1 for none."""
        self._running = False
        self._errors: dict[int, Path] = {}
        self._tails: list[Any] = []
        self._failures: list[failures.Failure] = []
        self._failed_at = 0.0
        self._first_rank = 0
        self._ended_well: set[int] = set()
        self._restarts = self._fruitless = 0
        self._best_step = -1
        self._seen_nodes: frozenset[str] = frozenset()
        self._seen_nodes_at = time.monotonic()
        self._seen_pause: tuple[int, int | None] = (-1, None)
        self._seen_pause_at = time.monotonic()
        self._waiting_since = time.monotonic()
        self._stopped_since: dict[int, float] = {}
        self._regrouping_since: float | None = None
        self._cold = False
        self._read_at = -math.inf
        self._unreachable = False
        self._alone = True
        self._signals = 0
        self._last_signal = 0

    def run(self) -> int:
        """Take part until the end. Returns the exit code, an `Exit`.

        Call it from the main thread: signals are handled here, and workers die with the thread that started them.
        """
        handlers = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        code: int | None = None
        try:
            early = self._too_late()
            if early is None:
                self._workers.warm_up()
                if self._workers.complaint:
                    self._say(f"{self._workers.complaint}; workers will do it themselves, each time")
                self._membership.join()
            code = early
            while code is None:
                code = self._turn()
            return code
        finally:
            self._workers.close()
            self._stop_tails()
            self._membership.close()
            # Whoever leaves last keeps the state in memory for a later start on this host.
            self._host.close(keep=code not in (Exit.DONE, Exit.FAILED) and self._alone)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    # --- What comes in. ---

    def _signalled(self, number: int, frame: object) -> None:
        self._events.put(Signalled(number))

    def _too_late(self) -> int | None:
        """Whether the job has ended already: a late node has nothing to do."""
        records = self._membership.read()
        world = records.world
        if world.state is State.DONE:
            self._say(
                f"job {self._told.job} has ended already ({world.message}): nothing to do. "
                "Another --rdzv-id starts another job."
            )
            return Exit.DONE
        deadline = time.monotonic() + 4 * self._told.ttl_s
        while world.state is State.FAILED:
            if not records.nodes:
                fresh = World(world.generation, State.FORMING, (), "started again")
                self._membership.propose(fresh, records.version)
            elif time.monotonic() > deadline:
                self._say(f"job {self._told.job} has failed, and its nodes have not left yet: try again in a moment")
                return Exit.FAILED
            else:
                time.sleep(_TICK_S)
            records = self._membership.read()
            world = records.world
        return None

    def _turn(self) -> int | None:
        """Wait for something to happen, or a moment, and act on it."""
        pausing = self._running and self._seen_pause[1] is not None
        woken = self._drain(_PAUSING_TICK_S if pausing else _TICK_S)
        if self._signals > 1:
            self._say("asked a second time: leaving at once")
            return 128 + self._last_signal
        self._look_for_stopped()
        self._look_for_regrouped()
        due = time.monotonic() - self._read_at >= (_TICK_S if not self._running or pausing else _REREAD_S)
        paused = pausing and self._membership.node.paused != self._generation and self._all_paused()
        if not (woken or due or paused or self._failures):
            return None
        try:
            records = self._membership.read()
            self._read_at = time.monotonic()
            if self._unreachable:
                self._unreachable = False
                self._say("the store answers again")
            return self._act(records)
        except DiscoveryError as exc:
            return self._without_store(exc)

    def _drain(self, timeout_s: float) -> bool:
        """Take in all events. Returns whether the records may have changed."""
        woken = False
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                woken = self._take(event) or woken
                event = self._events.get_nowait()
        except queue.Empty:
            return woken

    def _take(self, event: Event) -> bool:
        if isinstance(event, Signalled):
            self._signals += 1
            self._last_signal = event.number
            if self._signals == 1:
                self._say("asked to leave: the others are told, and this node goes after the next steps")
        elif isinstance(event, ZygoteLost):
            self._fail(failures.Failure(self._first_rank, -signal.SIGKILL, "", "the process that forks workers died"))
        elif isinstance(event, Exited) and event.generation == self._generation and self._running:
            rank = self._first_rank + event.local_rank
            if event.status == 0:
                self._ended_well.add(event.local_rank)
            else:
                text = failures.read_error(self._errors[event.local_rank])
                self._fail(failures.Failure(rank, event.status, text, f"{event} (rank {rank})"))
        return True

    def _fail(self, failure: failures.Failure) -> None:
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures.append(failure)

    # --- What follows from it. ---

    def _act(self, records: Records) -> int | None:
        world, me = records.world, self._membership.node.id
        self._note_changes(records)
        if world.ended:
            return self._end(world)
        position = world.position(me) if world.state is State.RUNNING else None
        if position is None:
            self._halt()
            if self._signals:
                self._say("left" if self._membership.node.paused < 0 else "left; every step until now is saved")
                return 128 + self._last_signal
            waited_s = time.monotonic() - self._waiting_since
            if world.state is State.FORMING and waited_s > self._told.join_timeout_s:
                return self._no_quorum(records, waited_s)
        elif world.generation != self._generation:
            self._begin(world, position)
        if self._running:
            for board in self._boards.values():
                board.ask_pause(world.pause_at)
        self._tell()
        return self._decide(records)

    def _decide(self, records: Records) -> int | None:
        """Propose what the job's record should become."""
        world = records.world
        verdict = self._verdict()
        moment = self._moment(verdict.restart if verdict else "")
        proposal = failed(world, verdict.fatal) if verdict and verdict.fatal else None
        if proposal is None:
            proposal = next_world(world, records.nodes, moment, self._told.rules)
        if proposal is None or proposal == world:
            return None
        if self._membership.propose(proposal, records.version):
            # The others learn of it by their watches; this node need not wait for its own.
            return self._act(self._membership.read())
        self._events.put(None)
        return None

    def _verdict(self) -> failures.Verdict | None:
        if not self._failures or not self._running:
            return None
        waited_s = time.monotonic() - self._failed_at
        verdict = failures.judge(self._failures, waited_s, echo_s=_ECHO_S, contact_s=self._told.ttl_s + 1.0)
        if verdict is None:
            return None
        if verdict.fatal and self._restarts < self._told.max_restarts:
            self._restarts += 1
            return failures.Verdict(restart=verdict.fatal.split("\n", 1)[0])
        step = max((board.read().step for board in self._boards.values()), default=-1)
        self._fruitless = 0 if step > self._best_step else self._fruitless + 1
        self._best_step = max(self._best_step, step)
        if verdict.restart and self._fruitless > _FRUITLESS_RESTARTS:
            reason = f"{_FRUITLESS_RESTARTS} restarts in a row finished no step; the last because {verdict.restart}"
            return failures.Verdict(fatal=reason)
        return verdict

    def _moment(self, restart: str) -> Moment:
        now = time.monotonic()
        return Moment(
            quiet_s=now - self._seen_nodes_at,
            pausing_s=now - self._seen_pause_at if self._seen_pause[1] is not None else 0.0,
            pause_step=self._pause_step() if self._running else None,
            restart=restart,
            cold=self._cold,
            dead=frozenset({self._host.heir_of}),
        )

    def _note_changes(self, records: Records) -> None:
        """Remember since when the nodes and the wish to pause are what they are."""
        now = time.monotonic()
        nodes = frozenset(records.nodes)
        self._alone = nodes <= {self._membership.node.id}
        if nodes != self._seen_nodes:
            self._seen_nodes, self._seen_nodes_at = nodes, now
        pause = (records.world.generation, records.world.pause_at)
        if pause != self._seen_pause:
            self._seen_pause, self._seen_pause_at = pause, now

    def _pause_step(self) -> int | None:
        """A step that no worker here has finished and that all can still be told of; None if they report no steps."""
        readings = [board.read() for board in self._boards.values()]
        if any(reading.step < 0 or reading.generation != self._generation for reading in readings):
            return None
        durations = [one for reading in readings for one in reading.durations_s]
        step_s = statistics.median(durations) if durations else _PAUSE_MARGIN_S
        return max(reading.step for reading in readings) + max(2, math.ceil(_PAUSE_MARGIN_S / max(step_s, 1e-6)))

    def _all_paused(self) -> bool:
        readings = [board.read() for board in self._boards.values()]
        return all(reading.paused >= 0 and reading.generation == self._generation for reading in readings)

    def _tell(self) -> None:
        """Bring this node's record up to date."""
        node = self._membership.node
        changes: dict[str, Any] = {}
        if self._signals and not node.leaving:
            changes["leaving"] = True
        if self._running and node.paused != self._generation and self._all_paused():
            changes["paused"] = self._generation
        if self._running and len(self._ended_well) == self._told.workers and node.finished != self._generation:
            changes["finished"] = self._generation
        if node.port != self._spare.port:
            changes["port"] = self._spare.port
        if changes:
            self._membership.update(**changes)

    def _begin(self, world: World, position: int) -> None:
        """Stop the workers of the last generation and start those of this one."""
        member = world.nodes[position]
        staying = set() if world.cold else self._staying()
        self._halt(but=staying)
        self._generation = world.generation
        self._first_rank = member.first_rank
        if position == 0:
            self._meeting, self._spare = self._spare, _new_store()
        last = member.first_rank + member.local_world_size - 1
        ranks = f"rank {last}" if last == member.first_rank else f"ranks {member.first_rank}-{last}"
        self._say(f"generation {world.generation} ({world.message}): {world.size} ranks, {ranks} here")
        forks, logs = launch.forks(self._told, world, member, self._host)
        self._errors = launch.errors_of(logs)
        self._workers.keep(world.generation)
        staying = {rank for rank in staying if _send(self._host.control(rank), forks[rank].environ)}
        self._workers.stop(but=staying)
        self._regrouping_since = time.monotonic() if staying else None
        try:
            self._workers.start(world.generation, {rank: one for rank, one in forks.items() if rank not in staying})
        except EDLError:
            self._workers.close()
            self._workers = Workers(self._told.warm, self._events.put)
            self._workers.warm_up()
            self._workers.start(world.generation, forks)
        self._running = True
        self._start_tails(logs)

    def _staying(self) -> set[int]:
        """The local ranks that go on in the next generation in the same process."""
        if not self._running or self._regrouping_since is not None:
            return set()
        return {rank for rank in self._workers.running if self._boards[rank].read().stays}

    def _look_for_regrouped(self) -> None:
        """Workers that stayed and have not joined the next generation in time make way for new ones."""
        if self._regrouping_since is None or not self._running:
            return
        if all(board.read().generation == self._generation for board in self._boards.values()):
            self._regrouping_since = None
        elif time.monotonic() - self._regrouping_since > _REGROUP_S:
            self._cold = True
            what = f"going on in process took more than {_REGROUP_S:g} s"
            self._fail(failures.Failure(self._first_rank, -signal.SIGKILL, "", what))

    def _halt(self, but: Collection[int] = ()) -> None:
        """Stop the workers, all but those of some local ranks; their boards and slots stay."""
        if self._running:
            self._running = False
            self._workers.stop(but=but)
            self._stop_tails()
            self._waiting_since = time.monotonic()
        self._failures.clear()
        self._ended_well.clear()
        self._stopped_since.clear()
        self._cold = False

    def _end(self, world: World) -> int:
        self._halt()
        if world.state is State.DONE:
            self._say(f"job {self._told.job} has ended: {world.message}")
            return Exit.DONE
        self._say(f"job {self._told.job} has failed: {world.message}")
        return Exit.FAILED

    def _no_quorum(self, records: Records, waited_s: float) -> int:
        self._say(
            f"only {len(records.nodes)} of at least {self._told.rules.min_nodes} nodes came within {waited_s:.0f} s "
            "(--rdzv-conf join_timeout=SECONDS waits longer): giving up, exit code 75"
        )
        return Exit.NO_QUORUM

    def _without_store(self, exc: DiscoveryError) -> int | None:
        """The store does not answer. Workers go on, but not so long that others may have taken the job over."""
        if not self._unreachable:
            self._unreachable = True
            self._say(f"the store does not answer ({exc}): going on without it for a while")
        if self._running and self._membership.cut_s > 0.8 * self._told.rules.takeover_s:
            self._say(
                f"the store has not answered for {self._membership.cut_s:.0f} s: workers are stopped until it does"
            )
            self._halt()
            self._generation = -1
        return 128 + self._last_signal if self._signals and not self._running else None

    def _look_for_stopped(self) -> None:
        """A worker that somebody stopped (SIGSTOP) holds up all others: after a moment it is killed."""
        now = time.monotonic()
        for local_rank, pid in self._workers.running.items():
            if _is_stopped(pid):
                if now - self._stopped_since.setdefault(pid, now) > _STOPPED_S:
                    rank = self._first_rank + local_rank
                    self._fail(
                        failures.Failure(rank, -signal.SIGSTOP, "", f"worker {local_rank} (rank {rank}) was stopped")
                    )
            else:
                self._stopped_since.pop(pid, None)

    # --- Output of workers that goes to files and to the console. ---

    def _start_tails(self, logs: Any) -> None:
        import sys

        from torch.distributed.elastic.multiprocessing.tail_log import TailLog

        for name, files, stream in (("stdout", logs.tee_stdouts, sys.stdout), ("stderr", logs.tee_stderrs, sys.stderr)):
            if files:
                prefixes = {rank: f"[{self._told.role}{self._first_rank + rank}]:" for rank in files}
                self._tails.append(TailLog(name, files, stream, log_line_prefixes=prefixes).start())

    def _stop_tails(self) -> None:
        for tail in self._tails:
            tail.stop()
        self._tails.clear()


def _new_store() -> TCPStore:
    """A store in which the ranks of one generation meet. Each gets a new one: old addresses must not be found."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def _send(control: Path, environ: Mapping[str, str]) -> bool:
    """Tell a worker that stays of the generation that it belongs to from now on. False if it does not listen."""
    try:
        pipe = os.open(control, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.write(pipe, json.dumps(dict(environ)).encode() + b"\n") > 0
    except OSError:
        return False
    finally:
        os.close(pipe)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False
