"""What one node does as its job's records change: its workers begin, stop and pause, its own record follows.

What should become of the job is decided by `world.next_world`, what ended workers mean by `failures.decide_recovery`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from edl.collective.agent.context import AgentContext, is_member
from edl.collective.agent.exit_codes import ExitCode
from edl.collective.agent.health.failures import RecoveryDecision
from edl.collective.agent.health.peer_monitor import choose_peers
from edl.collective.agent.launch_spec import MasterEndpoint, open_master_endpoint
from edl.collective.agent.membership.excluded_hosts import REMEDY, Exclusions, host_key
from edl.collective.agent.membership.membership_timer import MembershipTimer, is_join_deferred
from edl.collective.agent.membership.node_records import JobRecords
from edl.collective.agent.membership.quorum_wait import QuorumWait
from edl.collective.agent.membership.rendezvous import LocalObservation, failed_world, next_world
from edl.collective.agent.worker_group import HANGING
from edl.collective.checkpoint.memory.slots import slot_nbytes
from edl.collective.goodput.node import AgentState
from edl.collective.job_records import Exclusion, JobState, World
from edl.errors import DiscoveryError

__all__ = ["NodeReconciler"]


class NodeReconciler:
    """Acts for one node that has joined. Used from the agent's thread only."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._say, self._spec, self._worker_group = context.say, context.spec, context.worker_group
        self._membership, self._signals = context.membership, context.signals
        self._spare: MasterEndpoint = context.spare
        self._meeting: MasterEndpoint | None = None
        self._membership_timer = MembershipTimer(time.monotonic())
        self._quorum_wait = QuorumWait(context.spec.rules.min_nodes, context.spec.join_timeout_s)
        self._exclusions = Exclusions(context.store, context.spec.job, host_key())
        self._excluded: Exclusion | None = None
        self._unreachable_since: float | None = None
        self._reserve = False
        self._alone_s = 0.8 * context.spec.rules.takeover_s

    @property
    def pausing(self) -> bool:
        """Whether this node's workers are to pause, so that every moment counts."""
        return self._worker_group.running and self._membership_timer.pausing

    @property
    def paused_unsaid(self) -> bool:
        """Whether they have, and the others do not know it yet."""
        return (
            self.pausing and self._membership.node.paused != self._worker_group.generation and self._worker_group.paused
        )

    @property
    def agent_state(self) -> AgentState:
        """What this node's time is spent on, as far as the workers' status pages do not say more."""
        if self._worker_group.finished:
            return AgentState.IDLE
        if self._worker_group.running:
            return AgentState.RUNNING
        return AgentState.IDLE if self._reserve else AgentState.RENDEZVOUS

    def reconcile(self, records: JobRecords) -> int | None:
        """Do what follows from the records. Returns the exit code if this node's part is over.

        Raises:
            DiscoveryError: the store does not answer.
        """
        if self._unreachable_since is not None:
            self._unreachable_since = None
            self._say("the store answers again")
        world = records.world
        self._membership_timer.record_membership(
            world, records.nodes, time.monotonic(), deferred=is_join_deferred(world, records.nodes)
        )
        others = (node for name, node in records.nodes.items() if name != self._context.id)
        self._context.shutdown.alone = all(node.leaving for node in others)
        if world.ended:
            return self._end(world)
        position = world.position(self._context.id) if world.state is JobState.RUNNING else None
        if self._excluded is not None:
            return self._leave_faulty(records, self._excluded, member=position is not None)
        if world.state is not JobState.FORMING:
            self._quorum_wait.end_wait()
        self._tell_of_place(position is None and len(world.nodes) >= self._spec.rules.max_nodes, world)
        if position is None:
            code = self._wait(records)
            if code is not None:
                return code
        elif world.generation != self._worker_group.generation:
            verdict = self._worker_group.judge_failures(world.forgiven)
            if verdict is not None and verdict.leave_out:  # others lost contact, and were first to begin anew
                self._exclude(verdict)
                if self._excluded is not None:
                    return self._leave_faulty(records, member=True)
            self._begin(world, position)
        self._worker_group.hangs.others_busy = any(
            name != self._context.id and node.busy == world.generation for name, node in records.nodes.items()
        )
        if self._worker_group.running:
            self._worker_group.request_pause(world.pause_at)
        if self._signals.stopping and self._worker_group.running and not self._worker_group.reports_steps:
            self._worker_group.terminate_workers(self._signals.number)  # there is no pause to wait for
        self._tell(world)
        return self._decide(records)

    def _tell_of_place(self, reserve: bool, world: World) -> None:
        if reserve and not self._reserve:
            self._say(f"the job has its {_count(len(world.nodes), 'node')}, and no place for more: waiting for one")
        self._reserve = reserve

    def without_store(self, exc: DiscoveryError) -> int | None:
        """The store does not answer. Workers go on, but not so long that others may have taken the job over.

        Returns the exit code where this node shall leave, or has waited for the store for too long.
        """
        if self._unreachable_since is None:
            self._unreachable_since = time.monotonic()
            self._say(f"the store does not answer ({exc}): going on without it for a while")
        cut_s = self._membership.without_lease_s
        if self._worker_group.running and cut_s > self._alone_s:
            self._say(f"no answer for {cut_s:.0f} s: the workers are stopped until the store is back")
            self._worker_group.stop_workers()
        if self._worker_group.running:
            return None
        if self._signals.stopping:
            return self._signals.exit_code
        away_s = time.monotonic() - self._unreachable_since
        if away_s <= self._spec.join_timeout_s:
            return None
        self._context.shutdown.alone = True  # as far as is known here: the state in memory is kept for a later start
        self._say(
            f"no store for {away_s:.0f} s (--rdzv-conf join_timeout=SECONDS waits longer): giving up, exit code "
            f"{ExitCode.TRY_AGAIN:d}"
        )
        return ExitCode.TRY_AGAIN

    @property
    def until(self) -> float:
        """Until when this node's workers may go on if there is no more word of the store (`time.monotonic()`)."""
        return time.monotonic() - self._membership.without_lease_s + self._alone_s

    # --- The record of the job. ---

    def _begin(self, world: World, position: int) -> None:
        member = world.nodes[position]
        last = member.first_rank + member.local_world_size - 1
        ranks = f"rank {last}" if last == member.first_rank else f"ranks {member.first_rank}-{last}"
        self._say(f"generation {world.generation} ({world.message}): {_count(world.size, 'rank')}, {ranks} here")
        self._context.status.record_event("generation", world.message, world.generation)
        if world.message.startswith(HANGING) and self._worker_group.running:
            self._say(f"what the workers of this node did:\n{self._worker_group.dump_stacks()}")
            self._context.status.record_event("hang", world.message, world.generation - 1)
        if self._worker_group.running:
            # What follows is no training of the old workers.
            self._context.status.observe(
                AgentState.RENDEZVOUS, self._worker_group, self._context.replicas.replicated_us
            )
        self._context.replicas.change_world(world)
        self._context.peer_connections.set_peers(choose_peers(world, position))
        self._worker_group.start_generation(world, position)
        if position == 0:
            # Not sooner: a worker on its way to the last generation's store would find nothing there and wait, and the
            # next store may take seconds, where DNS does not answer torch.
            self._meeting, self._spare = self._spare, open_master_endpoint(self._spec)

    def _wait(self, records: JobRecords) -> int | None:
        """This node is not a member now. Returns the exit code if it is not to wait for that."""
        if (
            self._worker_group.running
            and self._signals.stopping
            and not self._worker_group.terminate_workers(self._signals.number)
        ):
            return None
        if self._worker_group.running:
            self._worker_group.stop_workers()
            if records.world.state is JobState.FORMING and not self._signals.stopping:
                self._say(f"the workers are stopped: {records.world.message}")
            elif not self._signals.stopping:
                self._say("the others went on without this node, which was silent: it joins them again")
                self._context.replicas.change_world(records.world)
                self._context.host.forget_slots()  # theirs are newer, and must not be mixed up with these
        if self._signals.stopping:
            saved = self._membership.node.paused >= 0
            self._context.status.record_event("leave", "asked to", records.world.generation)
            self._say(f"left; {self._kept}" if saved else "left")
            return self._signals.exit_code
        return self._wait_for_more(records) if records.world.state is JobState.FORMING else None

    def _wait_for_more(self, records: JobRecords) -> int | None:
        """The job waits for enough nodes. Returns the exit code if it has done so for too long."""
        now = time.monotonic()
        here = sum(not node.leaving for node in records.nodes.values())
        words = self._quorum_wait.record_nodes(here, now)
        waited_s = self._quorum_wait.waited_s(now)
        if waited_s > self._spec.join_timeout_s:
            wanted = self._spec.rules.min_nodes
            self._say(
                f"only {_count(here, 'node')} of at least {wanted} came within {waited_s:.0f} s "
                f"(--rdzv-conf join_timeout=SECONDS waits longer): giving up, exit code {ExitCode.TRY_AGAIN:d}"
            )
            return ExitCode.TRY_AGAIN
        if words:
            self._say(words)
        return None

    @property
    def _kept(self) -> str:
        """Where the state is that this node saved before it left."""
        if not self._context.shutdown.alone:
            return "the others have every step until now"
        if self._spec.checkpoint:
            return f"every step until now is saved, and will be at {self._spec.checkpoint}"
        return "every step until now is saved, in this host's memory for an hour (--checkpoint URL keeps it for longer)"

    def _end(self, world: World) -> int:
        self._worker_group.stop_workers()
        if world.state is JobState.DONE:
            self._say(f"job {self._spec.job} has ended: {world.message}")
            return ExitCode.DONE
        self._say(f"job {self._spec.job} has failed: {world.message}")
        return ExitCode.FAILED

    def _decide(self, records: JobRecords) -> int | None:
        """Propose what the job's record should become."""
        world = records.world
        nodes = records.nodes
        finished = [one for one in world.nodes if one.id in nodes and nodes[one.id].finished == world.generation]
        ended = [rank for one in finished for rank in one.ranks]
        missing = any(one.id not in nodes for one in world.nodes)
        verdict = self._worker_group.judge_failures(world.forgiven, others_ended=ended, missing=missing)
        if verdict is not None and verdict.leave_out:
            verdict = self._exclude(verdict)
            if self._excluded is not None:
                return self.reconcile(records)
        if verdict is not None and verdict.fatal:
            proposal: World | None = failed_world(world, verdict.fatal)
        else:
            observation = self._observe(verdict or RecoveryDecision(restart=self._stopped_before(world)))
            proposal = next_world(world, records.nodes, observation, self._spec.rules)
        if proposal is None or proposal == world:
            return None
        if not self._membership.propose_world(proposal, records.version):
            self._context.events.put(None)  # somebody was first: look again
            return None
        if verdict is not None:
            if verdict.fatal and verdict.unclear:
                self._exclusions.remove_unclear()
            self._worker_group.count_restart()
            self._context.persister.store_newest()
            kind, text = ("error", _in_a_line(verdict.fatal)) if verdict.fatal else ("restart", verdict.restart)
            self._context.status.record_event(kind, text, world.generation)
        return self.reconcile(self._membership.read_records())  # the others learn of it by their watches

    def _exclude(self, verdict: RecoveryDecision) -> RecoveryDecision:
        """Leave this host out because of its GPU. Returns another verdict where the fault was on another host before.

        Raises:
            DiscoveryError: the store does not answer, and nothing is changed.
        """
        clear = not verdict.unclear
        exclusion = Exclusion(self._context.id, verdict.restart, clear, self._worker_group.step, time.time())
        other = None if clear else self._exclusions.find_same_elsewhere(exclusion)
        if other is not None:
            where = f"so it was on {other.node} before, and no step further: the script's own error"
            return RecoveryDecision(fatal=f"{verdict.restart} ({where})\n{verdict.traceback}", unclear=True)
        self._exclusions.add(exclusion)
        self._excluded = exclusion
        surely = "this node's GPU has failed" if clear else "this node's GPU has probably failed, for the second time"
        self._say(f"{surely} ({verdict.restart}): the job goes on without this node")
        self._context.status.record_event("faulty", verdict.restart, self._worker_group.generation)
        self._worker_group.stop_workers()
        self._context.persister.store_newest()
        return verdict

    def _leave_faulty(self, records: JobRecords, exclusion: Exclusion, *, member: bool) -> int | None:
        """Leave a job that goes on without this node; first the others get what only this node's memory has."""
        if member:
            if not self._context.replicas.hand_over_state():
                return None
            if not self._membership.node.leaving:
                self._membership.update_node(leaving=True)
            nodes = records.nodes | {self._context.id: self._membership.node}
            observation = replace(self._observe(RecoveryDecision()), restart=f"a GPU of {self._context.id} failed")
            proposal = next_world(records.world, nodes, observation, self._spec.rules)
            if proposal is not None and self._membership.propose_world(proposal, records.version):
                return self.reconcile(self._membership.read_records())
            return None
        self._context.status.record_event("leave", "its GPU failed", records.world.generation)
        self._say(f"left; this host is out of job {self._spec.job}: {REMEDY}; exit code {ExitCode.FAULTY_NODE:d}")
        return ExitCode.FAULTY_NODE

    def _stopped_before(self, world: World) -> str:
        """Why this node's part of the present generation does not run any more, if it is so.

        It cannot begin again: its ranks have met, and others may have gone on.
        """
        same = world.state is JobState.RUNNING and world.generation == self._worker_group.generation
        over = self._worker_group.running or self._membership.node.finished == world.generation
        stopped = same and is_member(world, self._context.id) and not over
        return "its workers were stopped while the store was away" if stopped else ""

    def _observe(self, verdict: RecoveryDecision) -> LocalObservation:
        now = time.monotonic()
        return LocalObservation(
            node=self._context.id,
            quiet_s=self._membership_timer.quiet_s(now),
            pausing_s=self._membership_timer.pausing_s(now),
            pause_step=self._worker_group.pause_step(),
            pause_needs_s=self._worker_group.pause_needs_s(),
            restart=verdict.restart,
            forgives=verdict.after_error,
            dead=self._context.host.dead,
        )

    # --- The record of this node. ---

    def _tell(self, world: World) -> None:
        """Bring this node's record up to date."""
        node, worker_group = self._membership.node, self._worker_group
        changes: dict[str, Any] = {}
        if self._signals.stopping and not node.leaving:
            changes["leaving"] = True
        paused = worker_group.generation if worker_group.paused and world.pause_at is not None else -1
        if paused >= 0 and self._signals.stopping and not self._context.replicas.hand_over_state():
            paused = -1  # whoever goes on needs what only this node has
        if node.paused != paused and (paused >= 0 or not self._signals.stopping):
            changes["paused"] = paused
        if node.finished != worker_group.generation and worker_group.finished:
            changes["finished"] = worker_group.generation
        if node.port != self._spare.port:
            changes["port"] = self._spare.port
        busy = worker_group.generation if worker_group.running and worker_group.hangs.busy else -1
        if node.busy != busy:
            changes["busy"] = busy
        nbytes = slot_nbytes(Path(self._context.host.slots(0)))
        if nbytes > node.slot_nbytes:
            changes["slot_nbytes"] = nbytes
        if changes:
            self._membership.update_node(**changes)


def _in_a_line(fatal: str) -> str:
    """Who failed, and the last line of the traceback, which is the error."""
    who, _, traceback = fatal.partition("\n")
    error = traceback.rstrip().rpartition("\n")[2].strip()
    return f"{who}: {error}" if error else who


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
