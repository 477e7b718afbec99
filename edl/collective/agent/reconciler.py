"""Acts on changes in the job's records: starts, stops and pauses this node's workers, and updates the node's record.

`rendezvous.next_world` decides what the job's record should become, and `health.failures.decide_recovery` decides what
to do about workers that ended.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edl.collective.agent.context import AgentContext
from edl.collective.agent.ending import ExitCode, TerminationMessage
from edl.collective.agent.health.failures import HANGING, ExitCause, RecoveryDecision
from edl.collective.agent.health.peer_monitor import choose_peers
from edl.collective.agent.launch_spec import MasterEndpoint, open_master_endpoint
from edl.collective.agent.node_records import REMEDY, Exclusions, JobRecords, host_key
from edl.collective.agent.rendezvous import ChangeTimer, LocalObservation, failed_world, is_join_deferred, next_world
from edl.collective.agent.worker_group import pause_needs_s, pause_step
from edl.collective.checkpoint.memory.slots import slot_nbytes
from edl.collective.goodput import TimeCategory
from edl.collective.job_records import GAVE_UP, Exclusion, JobState, World
from edl.errors import DiscoveryError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Departure:
    """Why a node leaves, and what the user should do. `restart` is why the other nodes begin a new generation."""

    exit_code: ExitCode
    reason: str
    restart: str
    remedy: str


_STORE_OUTAGE_SHARE = 0.8  # of the time after which others take the job over; the rest is for agents that are delayed
_REPEAT_S = 60.0  # between two log lines that say the same


class NodeReconciler:
    """Acts for a node that has joined. Used from the agent's thread only."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._spec = context.spec
        self._worker_group = context.worker_group
        self._membership = context.membership
        self._signals = context.signals
        self._next_master: MasterEndpoint = context.next_master
        self._master: MasterEndpoint | None = None  # held open for the ranks of the current generation
        now = time.monotonic()
        self._node_ids: ChangeTimer[frozenset[str]] = ChangeTimer(frozenset(), now)
        self._pause: ChangeTimer[tuple[int, int | None]] = ChangeTimer((-1, None), now)  # generation and step
        self._store_away = ChangeTimer(False, now)
        self._too_few = ChangeTimer(False, now)  # whether the job waits for enough nodes
        self._told_nodes = ChangeTimer(-1, now)  # number of nodes here when that was last logged
        self._exclusions = Exclusions(context.store, context.spec.job, host_key())
        self._departure: Departure | None = None
        self._waits_for_place = False
        self._outage_s = _STORE_OUTAGE_SHARE * context.spec.rendezvous.takeover_s
        # A job that its user did not name belongs to this node alone: no other node knows it or could take it over.
        self._alone_s = self._outage_s if context.spec.resumable else math.inf

    @property
    def pausing(self) -> bool:
        """Whether this node's workers are asked to pause, so that the agent must react quickly."""
        return self._worker_group.running and self._pause.value[1] is not None

    @property
    def pause_unpublished(self) -> bool:
        """Whether the workers have paused and this node has not published that yet."""
        return (
            self.pausing and self._membership.node.paused != self._worker_group.generation and self._worker_group.paused
        )

    @property
    def time_category(self) -> TimeCategory:
        """What this node spends its time on. TRAIN if it has workers: their status pages give the details."""
        if self._worker_group.finished:
            return TimeCategory.IDLE
        if self._worker_group.running:
            return TimeCategory.TRAIN
        return TimeCategory.IDLE if self._waits_for_place else TimeCategory.RENDEZVOUS

    def reconcile(self, records: JobRecords) -> int | None:
        """Act on the records until nothing is left to change. Returns the exit code if this node's part is over."""
        if self._store_away.record(False, time.monotonic()):
            logger.info("the store answers again")
        while True:
            code = self._follow_records(records)
            if code is not None or not self._propose_next_world(records):
                return code
            records = self._membership.read_records()  # the others learn of it through their watches

    def _follow_records(self, records: JobRecords) -> int | None:
        """Bring this node in line with the job's record. Returns the exit code if this node's part is over."""
        world = records.world
        now = time.monotonic()
        self._node_ids.record(frozenset(records.nodes), now)
        # Wait without limit for a member that does something long between two steps.
        self._pause.record((world.generation, world.pause_at), now, restart=is_join_deferred(world, records.nodes))
        others = (node for name, node in records.nodes.items() if name != self._context.id)
        self._context.shutdown.is_last_node = all(node.leaving for node in others)
        if world.ended:
            return self._end_job(world)
        position = self._position(world)
        if world.generation != self._worker_group.generation:  # others lost contact and restarted first
            self._prepare_departure(self._worker_group.judge_failures(world.forgiven))
        if self._departure is not None:
            return self._depart(world, self._departure, member=position is not None)
        if world.state is not JobState.FORMING:
            self._end_shortage(now)
        self._note_place(position is None and len(world.nodes) >= self._spec.rendezvous.max_nodes, world)
        if position is None:
            code = self._handle_absence(records)
            if code is not None:
                return code
        elif world.generation != self._worker_group.generation:
            self._start_generation(world, position)
        self._worker_group.hangs.others_busy = any(
            name != self._context.id and node.busy == world.generation for name, node in records.nodes.items()
        )
        if self._worker_group.running:
            self._worker_group.request_pause(world.pause_at)
        if self._signals.stopping and self._worker_group.running and not self._worker_group.reports_steps:
            self._worker_group.terminate_workers(self._signals.number)  # they cannot pause, so nothing is waited for
        self._update_own_record(world)
        return None

    def _position(self, world: World) -> int | None:
        """Return this node's place among the members of a running world, or None if it is not a member."""
        return world.position(self._context.id) if world.state is JobState.RUNNING else None

    def _note_place(self, waits: bool, world: World) -> None:
        if waits and not self._waits_for_place:
            nodes = _count(len(world.nodes), "node")
            logger.info("the job has its maximum of %s: waiting for a place", nodes)
        self._waits_for_place = waits

    def handle_store_outage(self, exc: DiscoveryError) -> int | None:
        """Let workers run without the store until others may take over. Returns the exit code if this node leaves."""
        if self._store_away.record(True, time.monotonic()):
            logger.warning("the store does not answer (%s): continuing without it for a while", exc)
        cut_s = self._membership.without_lease_s
        if self._worker_group.finished and not self._spec.resumable and cut_s > self._outage_s:
            self._worker_group.stop_workers()
            logger.info("job %s has ended: the script ended, and no other node waits for this node", self._spec.job)
            return ExitCode.DONE
        # Failed workers cannot restart without the store; a signal to leave is followed after the same time.
        if (self._worker_group.failing or self._signals.stopping) and self._outage_s < cut_s <= self._alone_s:
            self._worker_group.stop_workers()
            logger.warning("no answer from the store for %.0f s: stopping the workers, which no longer train", cut_s)
        if self._worker_group.running and cut_s > self._alone_s:
            logger.warning(
                "no answer from the store for %.0f s: the workers are stopped until the store answers, since other "
                "nodes may have continued job %s by now. If the store is that slow, increase --lease-ttl (%g s) and "
                "--rdzv-conf takeover_timeout=%g (the same on all nodes)",
                *(cut_s, self._spec.job, self._spec.ttl_s, self._spec.rendezvous.takeover_s),
                extra={"job": self._spec.job},
            )
            self._worker_group.stop_workers()
        if self._worker_group.running:
            return None
        if self._signals.stopping:
            return self._signals.exit_code
        away_s = self._store_away.held_s(time.monotonic())
        if self._departure is not None and away_s > self._outage_s:  # the others continue without asking it
            return self._departure.exit_code
        if away_s <= self._spec.join_timeout_s:
            return None
        self._context.shutdown.is_last_node = True  # as far as it knows: its state in memory is kept for a later start
        return self._give_up(f"no store for {away_s:.0f} s")

    def _give_up(self, reason: str) -> int:
        code = int(ExitCode.TRY_AGAIN)
        logger.error(
            "%s (--rdzv-conf join_timeout=SECONDS waits longer): giving up, exit code %d",
            *(reason, code),
            extra={"exit_code": code},
        )
        self._context.status.record_event("leave", f"{GAVE_UP}: {reason}")
        self._context.shutdown.end = TerminationMessage(node=self._context.id, message=reason)
        return code

    @property
    def workers_may_run_until(self) -> float:
        """The time until which this node's workers may continue if the store stops answering (`time.monotonic()`)."""
        return time.monotonic() - self._membership.without_lease_s + self._alone_s

    def _start_generation(self, world: World, position: int) -> None:
        """Replace this node's workers with those of a new generation, in which the node is at `position`."""
        member = world.nodes[position]
        last = member.first_rank + member.local_world_size - 1
        ranks = f"rank {last}" if last == member.first_rank else f"ranks {member.first_rank}-{last}"
        logger.info(
            "generation %d (%s): %s, %s here",
            *(world.generation, world.message, _count(world.size, "rank"), ranks),
            extra={"generation": world.generation, "world_size": world.size, "first_rank": member.first_rank},
        )
        self._context.status.record_event("generation", world.message, world.generation)
        if world.message.startswith(HANGING) and self._worker_group.running:
            what = "what the workers of this node were doing (for an evaluation, set a limit with Checkpointer.busy())"
            logger.warning("%s:\n%s", what, self._worker_group.dump_stacks())
            self._context.status.record_event("hang", world.message, world.generation - 1)
        if self._worker_group.running:
            # The time from here on is not the old workers' training.
            self._context.status.charge_time(TimeCategory.RENDEZVOUS, self._context.replicas.replicated_us)
        self._context.replicas.change_world(world)
        self._context.peer_connections.set_peers(choose_peers(world, position))
        self._worker_group.start_generation(world, position)
        if position == 0:
            # Not earlier: a worker still on its way to the last generation's store would wait for entries that never
            # come, and opening the next store may take seconds if DNS does not answer torch.
            self._master = self._next_master
            self._next_master = open_master_endpoint(self._spec)

    def _handle_absence(self, records: JobRecords) -> int | None:
        """Stop the workers of a node that is not a member now. Returns the exit code if the node will not return."""
        stopping = self._signals.stopping
        if self._worker_group.running and stopping and not self._worker_group.terminate_workers(self._signals.number):
            return None
        if self._worker_group.running:
            self._worker_group.stop_workers()
            if records.world.state is JobState.FORMING and not stopping:
                logger.warning("stopping the workers: %s", records.world.message)
            elif not stopping:
                logger.warning("the others continued without this node, which was silent: joining them again")
                self._context.replicas.change_world(records.world)
                self._context.host.forget_slots()  # theirs are newer and must not be mixed with these
        if stopping:
            saved = self._membership.node.paused >= 0
            self._context.status.record_event("leave", "asked to", records.world.generation)
            if saved:
                logger.info("left; %s", self._kept_state)
            else:
                logger.info("left")
            return self._signals.exit_code
        return self._wait_for_quorum(records) if records.world.state is JobState.FORMING else None

    def _wait_for_quorum(self, records: JobRecords) -> int | None:
        """Log how many nodes the job waits for. Returns the exit code if it has waited too long."""
        now = time.monotonic()
        here = sum(not node.leaving for node in records.nodes.values())
        wanted = self._spec.rendezvous.min_nodes
        if here >= wanted:
            self._end_shortage(now)
            return None
        self._too_few.record(True, now)
        waited_s = self._too_few.held_s(now)
        left_s = max(0.0, self._spec.join_timeout_s - waited_s)
        if waited_s > self._spec.join_timeout_s:
            return self._give_up(f"only {_count(here, 'node')} of at least {wanted} joined within {waited_s:.0f} s")
        if self._told_nodes.record(here, now):
            are = "node is" if wanted == 1 else "nodes are"
            logger.info(
                "%d of at least %d %s here: waiting up to %.0f s for more (--rdzv-conf join_timeout=SECONDS)",
                *(here, wanted, are, left_s),
                extra={"nodes": here},
            )
        elif self._told_nodes.held_s(now) >= _REPEAT_S:
            self._told_nodes.record(here, now, restart=True)
            logger.info(
                "still %d of at least %d nodes: waiting %.0f s more", here, wanted, left_s, extra={"nodes": here}
            )
        return None

    def _end_shortage(self, now: float) -> None:
        """Stop waiting for more nodes, since there are enough or the job runs. The next shortage starts a new wait."""
        self._too_few.record(False, now)
        self._told_nodes.record(-1, now)

    @property
    def _kept_state(self) -> str:
        """Return, as text, where to find the state that this node saved before it left."""
        if not self._context.shutdown.is_last_node:
            return "the others have every step so far"
        if self._spec.checkpoint:
            return f"every step so far is saved, and will be stored at {self._spec.checkpoint}"
        return "every step so far is saved, in this host's memory for an hour (--checkpoint URL keeps it for longer)"

    def _end_job(self, world: World) -> int:
        self._worker_group.stop_workers()
        self._context.shutdown.end = self._describe_end(world)
        if world.state is JobState.DONE:
            logger.info("job %s has ended: %s", self._spec.job, world.message, extra={"job": self._spec.job})
            return ExitCode.DONE
        code = ExitCode.FAILED
        if world.cause == ExitCause.NO_TEACHER.value:
            code = ExitCode.TRY_AGAIN
            self._context.shutdown.is_last_node = True  # on every node: the job continues from its state in memory
            self._context.persister.store_newest()
        logger.error(
            "job %s has failed, exit code %d: %s",
            *(self._spec.job, code, world.message),
            extra={"job": self._spec.job, "exit_code": int(code)},
        )
        return code

    def _describe_end(self, world: World) -> TerminationMessage:
        """Return why a job ended: the same on every node, except for the number of processes that the kernel killed."""
        own, here = self._context.shutdown.end, self._context.id
        node = next((member.id for member in world.nodes if world.failed_rank in member.ranks), here)
        oom_kills = own.oom_kills if (own.node, own.rank) == (node, world.failed_rank) == (here, own.rank) else 0
        return TerminationMessage(
            cause=world.cause, rank=world.failed_rank, node=node, oom_kills=oom_kills, message=world.message
        )

    def _propose_next_world(self, records: JobRecords) -> bool:
        """Propose what the job's record should become. Returns whether the records must be processed again."""
        world = records.world
        if self._departure is not None:
            return self._propose_world_without_this_node(records, self._departure)
        present = [member for member in world.nodes if member.id in records.nodes]
        finished = [member for member in present if records.nodes[member.id].finished == world.generation]
        ended = [rank for member in finished for rank in member.ranks]
        # A member counted as late, because this machine or the store was paused, may be gone too.
        missing = len(present) < len(world.nodes) or any(member.id in records.late for member in present)
        decision = self._worker_group.judge_failures(
            world.forgiven, others_ended=ended, missing=missing, known_at=records.asked_at
        )
        decision = self._prepare_departure(decision)
        if self._departure is not None:
            return True
        if decision is not None and decision.fatal:
            cause = decision.cause.value if decision.cause is not None else ""
            proposal: World | None = failed_world(world, decision.fatal, cause, decision.rank)
        else:
            observation = self._observe(decision or RecoveryDecision(restart=self._missed_generation(world)))
            proposal = next_world(world, records.nodes, observation, self._spec.rendezvous)
        if not self._write_world(proposal, records):
            return False
        if decision is not None:
            self._note_recovery(decision, world)
        return True

    def _propose_world_without_this_node(self, records: JobRecords, departure: Departure) -> bool:
        """Let the other nodes continue without this node, once they have the state that only its memory had."""
        if self._position(records.world) is None or not self._context.replicas.hand_over_state():
            return False
        if not self._membership.node.leaving:
            self._membership.update_node(leaving=True)
        nodes = records.nodes | {self._context.id: self._membership.node}
        observation = replace(self._observe(RecoveryDecision()), restart=departure.restart)
        return self._write_world(next_world(records.world, nodes, observation, self._spec.rendezvous), records)

    def _write_world(self, proposal: World | None, records: JobRecords) -> bool:
        """Write the job's record. Returns whether the record changed. If another node wrote first, wakes the agent."""
        if proposal is None or proposal == records.world:
            return False
        if not self._membership.propose_world(proposal, records.version):
            self._context.events.put(None)
            return False
        return True

    def _note_recovery(self, decision: RecoveryDecision, world: World) -> None:
        """Record the recovery, or the end of the job, that followed from failures of this node's workers."""
        if decision.fatal:
            self._note_failure(decision, decision.fatal)
            if decision.unclear:
                self._exclusions.remove_unclear()
        elif decision.cause is ExitCause.PEER_LOST and decision.traceback:
            logger.warning("%s, and no other cause was found:\n%s", decision.restart, decision.traceback)
        self._worker_group.count_restart()
        self._context.persister.store_newest()
        kind, text = ("error", _summarize_error(decision.fatal)) if decision.fatal else ("restart", decision.restart)
        self._context.status.record_event(kind, text, world.generation)

    def _prepare_departure(self, decision: RecoveryDecision | None) -> RecoveryDecision | None:
        """Stop the workers if failures mean that this node must leave. Returns the decision, or a fatal one instead."""
        if decision is None or not (decision.leave_out or decision.needs_memory):
            return decision
        if decision.leave_out:
            decision = self._exclude_host(decision)
            if decision.fatal:
                return decision
            remedy = f"this host is out of job {self._spec.job}: {REMEDY}"
            restart = f"a GPU of {self._context.id} failed"
            self._departure = Departure(ExitCode.FAULTY_NODE, "its GPU failed", restart, remedy)
        else:
            logger.error("%s: this node is leaving, so that it can be restarted with more memory", decision.restart)
            self._context.status.record_event("restart", decision.restart, self._worker_group.generation)
            restart = f"{self._context.id} left: it had too little memory"
            remedy = "start this node again with more memory"
            self._departure = Departure(ExitCode.OUT_OF_MEMORY, "too little memory", restart, remedy)
        self._note_failure(decision, "\n".join(filter(None, (decision.restart, decision.traceback))))
        self._worker_group.stop_workers()
        self._context.persister.store_newest()
        return decision

    def _note_failure(self, decision: RecoveryDecision, message: str) -> None:
        self._context.shutdown.end = TerminationMessage(
            cause=decision.cause.value if decision.cause is not None else "",
            rank=decision.rank,
            node=self._context.id,
            oom_kills=decision.oom_kills,
            message=message,
        )

    def _exclude_host(self, decision: RecoveryDecision) -> RecoveryDecision:
        """Exclude this host because of its GPU. Returns a fatal decision instead if another host had the fault before.

        Raises:
            DiscoveryError: The store does not answer, and nothing has changed.
        """
        clear = not decision.unclear
        exclusion = Exclusion(self._context.id, decision.restart, clear, self._worker_group.last_step, time.time())
        other = None if clear else self._exclusions.find_same_elsewhere(exclusion)
        if other is not None:
            where = f"it also failed on {other.node}, and here at no later step: the error is the script's own"
            fatal = f"{decision.restart} ({where})\n{decision.traceback}"
            return RecoveryDecision(fatal=fatal, unclear=True, rank=decision.rank, cause=ExitCause.ERROR)
        self._exclusions.add(exclusion)
        surely = "this node's GPU has failed" if clear else "this node's GPU has probably failed, for the second time"
        logger.error("%s (%s): the job continues without this node", surely, decision.restart)
        self._context.status.record_event("faulty", decision.restart, self._worker_group.generation)
        return decision

    def _depart(self, world: World, departure: Departure, *, member: bool) -> int | None:
        """Leave a job that continues without this node, once others have the state that only this node's memory had."""
        if member or (world.state is JobState.FORMING and not self._context.replicas.hand_over_state()):
            return None
        self._context.status.record_event("leave", departure.reason, world.generation)
        code = departure.exit_code
        logger.error(
            "left; %s; exit code %d", departure.remedy, code, extra={"job": self._spec.job, "exit_code": int(code)}
        )
        return code

    def _missed_generation(self, world: World) -> str:
        """Return why this node's workers were stopped until the next generation, if they were; otherwise ""."""
        same = world.state is JobState.RUNNING and world.generation == self._worker_group.generation
        over = self._worker_group.running or self._membership.node.finished == world.generation
        stopped = same and world.position(self._context.id) is not None and not over
        return "its workers were stopped while the store did not answer" if stopped else ""

    def _observe(self, decision: RecoveryDecision) -> LocalObservation:
        now = time.monotonic()
        group, statuses = self._worker_group, self._worker_group.read_statuses()
        return LocalObservation(
            node=self._context.id,
            quiet_s=self._node_ids.held_s(now),
            pausing_s=self._pause.held_s(now) if self._pause.value[1] is not None else 0.0,
            pause_step=pause_step(statuses, group.generation) if group.running else None,
            pause_needs_s=pause_needs_s(statuses),
            restart=decision.restart,
            forgives=decision.after_error,
            dead=self._context.host.dead,
        )

    def _update_own_record(self, world: World) -> None:
        node = self._membership.node
        worker_group = self._worker_group
        changes: dict[str, Any] = {}
        if self._signals.stopping and not node.leaving:
            changes["leaving"] = True
        paused = worker_group.generation if worker_group.paused and world.pause_at is not None else -1
        if paused >= 0 and self._signals.stopping and not self._context.replicas.hand_over_state():
            paused = -1  # the remaining nodes need what only this node has
        if node.paused != paused and (paused >= 0 or not self._signals.stopping):
            changes["paused"] = paused
        if node.finished != worker_group.generation and worker_group.finished:
            changes["finished"] = worker_group.generation
        if node.port != self._next_master.port:
            changes["port"] = self._next_master.port
        busy = worker_group.generation if worker_group.running and worker_group.hangs.busy else -1
        if node.busy != busy:
            changes["busy"] = busy
        nbytes = slot_nbytes(Path(self._context.host.slots(0)))
        if nbytes > node.slot_nbytes:
            changes["slot_nbytes"] = nbytes
        if changes:
            self._membership.update_node(**changes)


def _summarize_error(fatal: str) -> str:
    """Return which rank failed, and the last line of its traceback, which is the error."""
    who, _, traceback = fatal.partition("\n")
    error = traceback.rstrip().rpartition("\n")[2].strip()
    return f"{who}: {error}" if error else who


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
