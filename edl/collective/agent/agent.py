"""A node's part of a job: keeps the node's record, follows the job's, and runs this node's workers accordingly.

A single thread acts. The others only put what they learn (a record changed, a worker ended, a signal came) into its
queue. `context` is what an agent holds, `join` what it does before it joins, and `reconciler` what it does from then
on.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import time

from edl.collective.agent.context import AgentContext, EventQueue, PeerLost, open_agent_context
from edl.collective.agent.ending import AskedToLeaveError, StopSignals, TerminationMessage, write_termination_message
from edl.collective.agent.join import join_job
from edl.collective.agent.launch_spec import LaunchSpec
from edl.collective.agent.reconciler import NodeReconciler
from edl.discovery.store import Store
from edl.errors import DiscoveryError

__all__ = ["Agent"]

logger = logging.getLogger(__name__)

_TICK_S = 0.1  # how soon workers that are stopped are noticed
_PAUSING_TICK_S = 0.01  # while all wait for a pause: every rank waits this much longer
_REREAD_S = 1.0  # in case a watch missed a change; more often would load a store of hundreds of nodes


class Agent:
    """Runs a node of a job until the job has ended or the node must leave.

    Everything that happens is logged. A person should see all messages from INFO on.
    """

    def __init__(self, spec: LaunchSpec, store: Store) -> None:
        self._spec = spec
        self._store = store
        self._events: EventQueue = queue.SimpleQueue()
        self._signals = StopSignals(lambda: self._events.put(None), slurm=spec.slurm)
        self._read_at = -math.inf
        self._leave_announced = False
        self._lost_peers: set[str] = set()

    def run(self) -> int:
        """Take part in the job until the end.

        Call this from the main thread: it handles signals, and workers die with the thread that started them.

        Returns:
            The exit code: an `ExitCode`, or 128 plus the signal's number if a signal asked this node to leave.

        Raises:
            SettingsError: The checkpoint storage cannot be used, or the job's other nodes run another script.
            DiscoveryError: The store cannot be reached when this node starts.
            EDLError: The process that forks workers died during its imports, or took too long.
        """
        with self._signals, open_agent_context(self._spec, self._store, self._signals, self._events) as context:
            try:
                code = join_job(context)
                reconciler = NodeReconciler(context)
                while code is None:
                    code = self._take_turn(context, reconciler)
            except AskedToLeaveError:
                logger.info("asked to leave: leaving")
                if context.shutdown.joined:
                    context.status.record_event("leave", "asked to")
                code = self._signals.exit_code
            if self._signals.stopping and code == self._signals.exit_code:
                name = signal.Signals(self._signals.number).name
                context.shutdown.end = TerminationMessage(node=context.id, message=f"asked to leave ({name})")
            context.shutdown.code = code
            # Written before the last state is stored, because that takes time and the sender of a signal may not wait.
            write_termination_message(self._spec.termination_log, context.shutdown.termination)
        exit_code = context.shutdown.exit_code
        assert exit_code is not None
        if exit_code != code:
            write_termination_message(self._spec.termination_log, context.shutdown.termination)
        return exit_code

    def _take_turn(self, context: AgentContext, reconciler: NodeReconciler) -> int | None:
        """Wait for an event or a tick, and act on it. Returns the exit code if this node's part is over."""
        woken = self._handle_events(context, _PAUSING_TICK_S if reconciler.pausing else _TICK_S)
        if self._signals.urgent:
            logger.info("asked a second time: leaving at once")
            return self._signals.exit_code
        if self._signals.stopping and not self._leave_announced:
            self._leave_announced = True
            logger.info("asked to leave: the others are told, and this node goes after the next steps")
        worker_group = context.worker_group
        worker_group.check_workers()
        context.status.charge_time(reconciler.time_category, context.replicas.replicated_us)
        reread_s = _REREAD_S if worker_group.running and not reconciler.pausing else _TICK_S
        due = time.monotonic() - self._read_at >= reread_s
        if not (woken or due or reconciler.pause_unpublished or worker_group.failing):
            return None
        asked_at = time.monotonic()
        try:
            self._delete_lost_peers(context)
            records = context.membership.read_records()
            self._read_at = time.monotonic()
            code = reconciler.reconcile(records)
        except DiscoveryError as exc:
            code = reconciler.handle_store_outage(exc)
        worker_group.allow_heartbeat(asked_at, reconciler.workers_may_run_until)
        return code

    def _handle_events(self, context: AgentContext, timeout_s: float) -> bool:
        """Process all queued events. Returns whether there were any."""
        woken = False
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                woken = True
                if isinstance(event, PeerLost):
                    self._lost_peers.add(event.node)
                elif event is not None:
                    context.worker_group.handle_event(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return woken

    def _delete_lost_peers(self, context: AgentContext) -> None:
        """Delete the records of nodes whose agents are gone.

        Raises:
            DiscoveryError: The store does not answer: perhaps such an agent served it. The next turn tries again.
        """
        for node in list(self._lost_peers):
            context.membership.delete_node(node)
            self._lost_peers.discard(node)
