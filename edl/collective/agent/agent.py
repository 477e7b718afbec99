"""One node's part of a job: it keeps the node's record, follows the job's, and runs this node's workers accordingly.

A single thread acts; the others only put what they learn (a record changed, a worker ended, a signal came) into its
queue. `context` is what an agent holds, `join` what it does before it joins, `reconciler` what it does from then on.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable

from edl.collective.agent.context import AgentContext, EventQueue, PeerLost, open_agent_context
from edl.collective.agent.health.step_times import StepTimes
from edl.collective.agent.join import join_job
from edl.collective.agent.launch_spec import LaunchSpec
from edl.collective.agent.reconciler import NodeReconciler
from edl.collective.agent.signals import AskedToLeaveError, StopSignals
from edl.discovery.store import Store
from edl.errors import DiscoveryError

__all__ = ["Agent"]

_TICK_S = 0.1
_PAUSING_TICK_S = 0.01
_REREAD_S = 1.0
_WINDOW_S = 5.0


class Agent:
    """Runs one node of a job until the job has ended or this node shall leave.

    Args:
        spec: this node's part.
        store: shared by all nodes; stays the caller's to close.
        say: called with each line that a person should see.
    """

    def __init__(self, spec: LaunchSpec, store: Store, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._store = store
        self._say = say
        self._events: EventQueue = queue.SimpleQueue()
        self._signals = StopSignals(lambda: self._events.put(None), slurm=spec.slurm)
        self._step_times = StepTimes()
        self._shared_at = time.monotonic()
        self._read_at = -math.inf
        self._said_leaving = False
        self._gone: set[str] = set()

    def run(self) -> int:
        """Take part until the end. Returns the exit code, an `ExitCode`.

        Call it from the main thread: signals are handled here, and workers die with the thread that started them.

        Raises:
            SettingsError: checkpoints cannot be stored where they shall be.
            DiscoveryError: the store cannot be reached when this node comes.
            EDLError: the process that forks workers died while it imported, or took too long.
        """
        with (
            self._signals,
            open_agent_context(self._spec, self._store, self._say, self._signals, self._events) as context,
        ):
            try:
                code = join_job(context)
                reconciler = NodeReconciler(context)
                while code is None:
                    code = self._turn(context, reconciler)
            except AskedToLeaveError:
                self._say("asked to leave: leaving")
                if context.shutdown.joined:
                    context.status.record_event("leave", "asked to")
                code = self._signals.exit_code
            context.shutdown.code = code
        ended = context.shutdown.exit_code
        assert ended is not None
        return ended

    def _turn(self, context: AgentContext, reconciler: NodeReconciler) -> int | None:
        """Wait for something to happen, or a moment, and act on it."""
        woken = self._drain(context, _PAUSING_TICK_S if reconciler.pausing else _TICK_S)
        if self._signals.urgent:
            self._say("asked a second time: leaving at once")
            return self._signals.exit_code
        if self._signals.stopping and not self._said_leaving:
            self._said_leaving = True
            self._say("asked to leave: the others are told, and this node goes after the next steps")
        context.worker_group.check_workers()
        context.status.observe(reconciler.agent_state, context.worker_group, context.replicas.replicated_us)
        self._share_times(context)
        reread_s = _REREAD_S if context.worker_group.running and not reconciler.pausing else _TICK_S
        due = time.monotonic() - self._read_at >= reread_s
        if not (woken or due or reconciler.paused_unsaid or context.worker_group.failing):
            return None
        asked_at = time.monotonic()
        try:
            for node in list(self._gone):
                context.membership.delete_node(
                    node
                )  # an error leaves it for the next turn: it may have served the store
                self._gone.discard(node)
            records = context.membership.read_records()
            self._read_at = time.monotonic()
            code = reconciler.reconcile(records)
        except DiscoveryError as exc:
            code = reconciler.without_store(exc)
        context.worker_group.allow_heartbeat(asked_at, reconciler.until)
        return code

    def _drain(self, context: AgentContext, timeout_s: float) -> bool:
        """Take in all events. Returns whether there were any."""
        woken = False
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                woken = True
                if isinstance(event, PeerLost):
                    self._gone.add(event.node)
                elif event is not None:
                    context.worker_group.handle_event(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return woken

    def _share_times(self, context: AgentContext) -> None:
        """Every window, tell the others what this node's ranks took for a step."""
        now = time.monotonic()
        if not context.worker_group.running or now - self._shared_at < _WINDOW_S:
            return
        self._shared_at = now
        first = context.worker_group.first_rank
        own_s = self._step_times.measure_window(
            {first + rank: one for rank, one in context.worker_group.read_statuses().items()}
        )
        if own_s:
            context.status.share_step_times(context.worker_group.generation, own_s, leads=first == 0)
