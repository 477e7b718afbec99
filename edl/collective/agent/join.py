"""Joins a job, after checking that there is work, testing the node and importing the script's modules."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edl.collective.agent.context import AgentContext, JobRun
from edl.collective.agent.ending import ExitCode, TerminationMessage
from edl.collective.agent.health.failures import ExitCause
from edl.collective.agent.health.node_check import NodeCheckSettings, check_before_joining
from edl.collective.agent.node_records import REMEDY, Exclusions, host_key
from edl.collective.checkpoint.memory.slots import preallocate_slots
from edl.collective.job_records import JobState, World, prefix
from edl.errors import SettingsError

__all__ = ["join_job"]

logger = logging.getLogger(__name__)

_POLL_S = 0.1  # between checks whether the nodes of a failed job have left; a tenth of the time a lease takes to expire
_SILENT_S = 2.0  # torch alone takes less to import, which needs no message
_STORAGE_TIMEOUT_S = 20.0  # for a distant object storage; without an answer the job begins anyway


def join_job(context: AgentContext) -> int | None:
    """Join the job.

    Returns:
        The exit code if this node takes no part in the job; None once it has joined.

    Raises:
        AskedToLeaveError: A signal came first.
        SettingsError: The job's other nodes run another script, or the checkpoint storage cannot be used.
        DiscoveryError: The store does not answer.
        EDLError: The process that forks workers died, or took too long.
    """
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
    with _logged_if_slow(f"importing what {Path(context.spec.program.target).name} imports"):
        import_failures = context.worker_group.warm_up()
    if import_failures:
        logger.warning("%s; each worker will import it by itself", import_failures)
    context.signals.raise_if_stopping()
    _agree_on_script(context)  # again, since a node that came during the imports saw no other node here
    _reserve_memory(context)
    context.membership.join()
    context.shutdown.joined = True
    context.status.follow_workers(context.worker_group)
    _adopt_state(context)
    context.persister.start()
    context.status.record_event("join", "ready")
    return None


def _check_job_state(context: AgentContext) -> int | None:
    """Return an exit code if the job has already ended: a late node has nothing to do. A failed job is started again.

    A failed job's nodes leave within the time of a lease or two.
    """
    spec = context.spec
    deadline = time.monotonic() + 4 * spec.ttl_s
    while True:
        context.signals.raise_if_stopping()
        records = context.membership.read_records()
        world = records.world
        if world.state is JobState.DONE:
            fields = {"job": spec.job}
            logger.info("job %s has ended already (%s): nothing to do", spec.job, world.message, extra=fields)
            again = f"to run it again, give it another name, such as --rdzv-id {spec.job}-2"
            if spec.checkpoint:
                again += f", and another --checkpoint than {spec.checkpoint}, from which it would go on"
            logger.info("%s", again)
            context.shutdown.end = TerminationMessage(node=context.id, message=f"job {spec.job} has ended already")
            return ExitCode.DONE
        if world.state is not JobState.FAILED:
            return None
        if not records.nodes:
            if context.membership.propose_world(World(world.generation, message="started again"), records.version):
                error = world.message.rstrip().rpartition("\n")[2].strip()
                where = f"from what is stored at {spec.checkpoint}" if spec.checkpoint else "from the beginning"
                logger.warning("job %s had failed (%s): it is started again, %s", spec.job, error, where)
        elif time.monotonic() > deadline:
            reason = f"job {spec.job} has failed, and its nodes have not left yet: try again in a moment"
            logger.error("%s", reason)
            context.shutdown.end = TerminationMessage(node=context.id, message=reason)
            return ExitCode.FAILED
        else:
            time.sleep(_POLL_S)


def _store_leftover_state(context: AgentContext) -> None:
    """Store the last state of a job that has ended, if an agent on this host could not."""
    host = context.host
    if host.unstored and host.holds_state and host.run == JobRun(context.store, context.spec.job)():
        logger.info("node %s could not store the last state: it is stored now", host.previous_owner)
        context.persister.start()


def _is_excluded(context: AgentContext) -> bool:
    """Return whether a GPU of this host failed earlier in this job, and the host was not readmitted since."""
    exclusions = Exclusions(context.store, context.spec.job, host_key())
    exclusion = exclusions.own_exclusion()
    if exclusion is None:
        return False
    if context.spec.readmit:
        exclusions.remove()
        logger.info("this host is left out no more (%s)", exclusion.reason)
        return False
    code = int(ExitCode.FAULTY_NODE)
    logger.error(
        "job %s leaves this host out (%s): %s; exit code %d",
        *(context.spec.job, exclusion.reason, REMEDY, code),
        extra={"job": context.spec.job, "exit_code": code},
    )
    _note_fault(context, exclusion.reason)
    return True


def _note_fault(context: AgentContext, reason: str) -> None:
    """Note why this node cannot take part, for its termination message."""
    cause = ExitCause.HARDWARE.value
    context.shutdown.end = TerminationMessage(cause=cause, node=context.id, message=reason)


def _agree_on_script(context: AgentContext) -> None:
    """Record the script's name, or compare it with the other nodes'.

    A job without live nodes may continue under a new script name.

    Raises:
        SettingsError: The job's other nodes run another script, so this node would disturb their training.
    """
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
                f"job {job} runs {entry.value.decode()}, and this is {own}: another --rdzv-id starts another job"
            )
        if context.store.compare_and_set(key, own.encode(), None if entry is None else entry.version) is not None:
            return


@contextmanager
def _logged_if_slow(line: str) -> Iterator[None]:
    """Log `line` if the block takes longer than `_SILENT_S`."""
    timer = threading.Timer(_SILENT_S, logger.info, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_node(context: AgentContext, settings: NodeCheckSettings) -> int | None:
    """Test this node together with others that wait. Returns the exit code if this node is faulty."""
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
    """Preallocate slots as large as other nodes' for the state that this node's workers will get.

    Otherwise the others would wait while the workers do that.
    """
    nbytes = max((node.slot_nbytes for node in context.membership.read_records().nodes.values()), default=0)
    if nbytes:
        for rank in range(context.spec.workers):
            preallocate_slots(Path(context.host.slots(rank)), nbytes)


def _adopt_state(context: AgentContext) -> None:
    """Use the state in memory that an agent of this job left here, or remove it.

    A state of another run of the same job name, whose records are gone from the store, would count as newer than it is.
    A state of a job without a name belongs to another training, unless the same command left it.
    """
    host = context.host
    run = JobRun(context.store, context.spec.job)()
    command = context.spec.command
    if host.holds_state and host.run == run and host.command != command:
        host.forget_slots()
        logger.info(
            "node %s left a state in memory, of another script or of other arguments: it is removed; with "
            "--rdzv-id NAME a job goes on whatever its arguments are",
            host.previous_owner,
        )
    elif host.holds_state and host.run == run:
        logger.info("node %s left its workers' state in memory here: it is used", host.previous_owner)
    elif host.holds_state:
        host.forget_slots()
        logger.info("node %s left a state in memory, of a job before this one: it is removed", host.previous_owner)
    host.run = run
    host.command = command
    host.unstored = False
