"""Runs a node's part of a job: updates the node's record, follows the job's record, and runs the node's workers.

A single thread acts. The other threads only put events into that thread's queue: a record changed, a worker ended, a
signal arrived. `context` holds an agent's resources, and `reconciler` acts once the node has joined.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from edl.collective.agent.context import AgentContext, EventQueue, JobRun, PeerLost
from edl.collective.agent.ending import (
    AskedToLeaveError,
    ExitCode,
    StopSignals,
    TerminationMessage,
    write_termination_message,
)
from edl.collective.agent.health.failures import ExitCause
from edl.collective.agent.health.node_check import NodeCheckSettings, check_before_joining
from edl.collective.agent.launch_spec import LaunchSpec
from edl.collective.agent.node_records import REMEDY, Exclusions, host_key
from edl.collective.agent.reconciler import NodeReconciler
from edl.collective.checkpoint.memory.slots import preallocate_slots
from edl.collective.job_records import JobState, World, prefix
from edl.discovery.store import Store
from edl.errors import DiscoveryError, SettingsError

logger = logging.getLogger(__name__)

_TICK_S = 0.1  # how soon workers that are stopped are noticed
_PAUSING_TICK_S = 0.01  # while all wait for a pause: every rank waits this much longer
_POLL_S = 0.1  # between checks whether the nodes of a failed job have left; a tenth of the time a lease takes to expire
_SILENT_S = 2.0  # importing torch alone takes less, and needs no message
_STORAGE_TIMEOUT_S = 20.0  # for a distant object storage; without an answer the job begins anyway
_REREAD_S = 1.0  # in case a watch missed a change; more often would load a store of hundreds of nodes


class Agent:
    """Runs a node of a job until the job has ended or the node must leave."""

    def __init__(self, spec: LaunchSpec, store: Store) -> None:
        self._spec = spec
        self._store = store
        self._events: EventQueue = queue.SimpleQueue()
        self._signals = StopSignals(lambda: self._events.put(None), slurm=spec.slurm)
        self._read_at = -math.inf
        self._leave_announced = False
        self._lost_peers: set[str] = set()

    def run(self) -> int:
        """Take part in the job until it ends. Call this from the main thread; the workers die if that thread ends.

        Returns the exit code: an `ExitCode`, or 128 plus the signal's number if a signal asked this node to leave.

        Raises:
            SettingsError: The checkpoint storage cannot be used, or the job's other nodes run a different script.
            DiscoveryError: The store cannot be reached when this node starts.
            EDLError: The process that forks workers died during its imports, or its imports took too long.
        """
        with self._signals, ExitStack() as stack:
            context = AgentContext(self._spec, self._store, self._signals, self._events, stack)
            try:
                code = _join_job(context)
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
            logger.info("asked to leave a second time: leaving at once")
            return self._signals.exit_code
        if self._signals.stopping and not self._leave_announced:
            self._leave_announced = True
            logger.info("asked to leave: this node tells the others, and leaves after the next steps")
        worker_group = context.worker_group
        worker_group.check_workers()
        context.status.charge_time(reconciler.time_category, context.replicas.replicated_us)
        reread_s = _REREAD_S if worker_group.running and not reconciler.pausing else _TICK_S
        due = time.monotonic() - self._read_at >= reread_s
        if not (woken or due or reconciler.pause_unpublished or worker_group.failing):
            return None
        asked_at = time.monotonic()
        try:
            for node in list(self._lost_peers):
                context.membership.delete_node(node)
                self._lost_peers.discard(node)
            records = context.membership.read_records()
            self._read_at = time.monotonic()
            code = reconciler.reconcile(records)
        except DiscoveryError as exc:
            code = reconciler.handle_store_outage(exc)
        worker_group.heartbeat.allow_beats(asked_at, reconciler.workers_may_run_until)
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


def _join_job(context: AgentContext) -> int | None:
    code = _check_job_state(context)
    if code == ExitCode.DONE:
        _store_leftover_state(context)
    if code is None and _is_excluded(context):
        code = ExitCode.FAULTY_NODE
    if code is None and context.spec.check is not None:
        code = _check_node(context, context.spec.check)
    if code is not None:
        return code
    _agree_on_script(context)
    context.persister.check_storage(_STORAGE_TIMEOUT_S, context.signals.raise_if_stopping)
    with _logged_if_slow(f"importing the modules that {Path(context.spec.program.target).name} imports"):
        import_failures = context.worker_group.warm_up()
    if import_failures:
        logger.warning("%s; each worker will make these imports itself", import_failures)
    context.signals.raise_if_stopping()
    _agree_on_script(context)  # again, since a node that started during the imports saw no other node here
    _reserve_memory(context)
    context.membership.join()
    context.shutdown.joined = True
    context.status.follow_workers(context.worker_group)
    _adopt_state(context)
    context.persister.start()
    context.status.record_event("join", "ready")
    return None


def _check_job_state(context: AgentContext) -> int | None:
    """Return an exit code if the job has ended. Starts a failed job again once its nodes have left (1 or 2 leases)."""
    spec = context.spec
    deadline = time.monotonic() + 4 * spec.ttl_s
    while True:
        context.signals.raise_if_stopping()
        records = context.membership.read_records()
        world = records.world
        if world.state is JobState.DONE:
            fields = {"job": spec.job}
            logger.info("job %s has already ended (%s): nothing to do", spec.job, world.message, extra=fields)
            again = f"to run it again, give it another name, such as --rdzv-id {spec.job}-2"
            if spec.checkpoint:
                again += f", and a --checkpoint other than {spec.checkpoint}, so that it does not resume there"
            logger.info("%s", again)
            context.shutdown.end = TerminationMessage(node=context.id, message=f"job {spec.job} has already ended")
            return ExitCode.DONE
        if world.state is not JobState.FAILED:
            return None
        if not records.nodes:
            if context.membership.propose_world(World(world.generation, message="started again"), records.version):
                error = world.message.rstrip().rpartition("\n")[2].strip()
                where = "newest state" if spec.checkpoint or context.host.holds_state else "beginning"
                logger.warning("job %s failed (%s): starting it again, from the %s", spec.job, error, where)
        elif time.monotonic() > deadline:
            reason = f"job {spec.job} has failed, and its nodes have not left yet: try again in a moment"
            logger.error("%s", reason)
            context.shutdown.end = TerminationMessage(node=context.id, message=reason)
            return ExitCode.TRY_AGAIN
        else:
            time.sleep(_POLL_S)


def _store_leftover_state(context: AgentContext) -> None:
    """Store the last state of a job that has ended, if an agent on this host could not store it."""
    host = context.host
    if host.unstored and host.holds_state and host.run == JobRun(context.store, context.spec.job)():
        logger.info("node %s could not store the last state: storing it now", host.previous_owner)
        context.persister.start()


def _is_excluded(context: AgentContext) -> bool:
    """Return whether a GPU of this host failed earlier in this job and the host has not been readmitted since."""
    exclusions = Exclusions(context.store, context.spec.job, host_key())
    exclusion = exclusions.own_exclusion()
    if exclusion is None:
        return False
    if context.spec.readmit:
        exclusions.remove()
        logger.info("this host is no longer excluded (%s)", exclusion.reason)
        return False
    code = int(ExitCode.FAULTY_NODE)
    logger.error(
        "job %s excludes this host (%s): %s; exit code %d",
        *(context.spec.job, exclusion.reason, REMEDY, code),
        extra={"job": context.spec.job, "exit_code": code},
    )
    _note_fault(context, exclusion.reason)
    return True


def _note_fault(context: AgentContext, reason: str) -> None:
    cause = ExitCause.HARDWARE.value
    context.shutdown.end = TerminationMessage(cause=cause, node=context.id, message=reason)


def _agree_on_script(context: AgentContext) -> None:
    """Check that the script has the recorded name. Records its name if there is none, or if no node is alive."""
    job = context.spec.job
    key = prefix(job) + "script"
    own = Path(context.spec.program.target).name
    while True:
        context.signals.raise_if_stopping()
        entry = context.store.get(key)
        if entry is not None and entry.value.decode() == own:
            return
        if entry is not None and context.membership.read_records().nodes:
            raise SettingsError(
                f"job {job} runs {entry.value.decode()}, not {own}: use another --rdzv-id for another job"
            )
        if context.store.compare_and_set(key, own.encode(), None if entry is None else entry.version) is not None:
            return


@contextmanager
def _logged_if_slow(line: str) -> Iterator[None]:
    timer = threading.Timer(_SILENT_S, logger.info, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_node(context: AgentContext, settings: NodeCheckSettings) -> int | None:
    """Test this node together with other waiting nodes. Returns the exit code if this node is faulty."""
    spec = context.spec
    settings = replace(settings, raise_if_stopping=context.signals.raise_if_stopping)
    quiet_s = max(1.0, spec.rendezvous.last_call_s)
    result = check_before_joining(context.store, spec.job, context.id, spec.addr, quiet_s, settings)
    for name, why in result.slow.items():
        logger.warning("%s is slow: %s", "this node" if name == context.id else name, why, extra={"node": name})
    if context.id not in result.faulty:
        return None
    code = int(ExitCode.FAULTY_NODE)
    logger.error(
        "this node is faulty: %s; it does not join, exit code %d",
        *(result.faulty[context.id], code),
        extra={"exit_code": code},
    )
    _note_fault(context, result.faulty[context.id])
    return code


def _reserve_memory(context: AgentContext) -> None:
    """Preallocate slots as large as other nodes' slots, so that the other nodes need not wait for this node."""
    nbytes = max((node.slot_nbytes for node in context.membership.read_records().nodes.values()), default=0)
    if nbytes:
        for rank in range(context.spec.workers):
            preallocate_slots(Path(context.host.slots(rank)), nbytes)


def _adopt_state(context: AgentContext) -> None:
    """Use the state that an agent left in memory, but remove a state of another run, script or arguments."""
    host = context.host
    run = JobRun(context.store, context.spec.job)()
    command = context.spec.command
    if host.holds_state and host.run == run and host.command != command:
        host.forget_slots()
        logger.info(
            "node %s left a state in memory, from a different script or arguments: removing it; a job "
            "with a name (--rdzv-id NAME) resumes even if its arguments differ",
            host.previous_owner,
        )
    elif host.holds_state and host.run == run:
        logger.info("node %s left its workers' state in memory here: using it", host.previous_owner)
    elif host.holds_state:
        host.forget_slots()
        logger.info("node %s left the state of an earlier job in memory: removing it", host.previous_owner)
    host.run = run
    host.command = command
    host.unstored = False
