"""What a node does before it joins: it looks whether there is something to do, is tested, and imports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edl.collective.agent.context import AgentContext
from edl.collective.agent.exit_codes import ExitCode
from edl.collective.agent.health.node_check.gate import check_before_joining
from edl.collective.agent.health.node_check.runner import NodeCheckSettings
from edl.collective.agent.job_run import JobRun
from edl.collective.agent.membership.excluded_hosts import REMEDY, Exclusions, host_key
from edl.collective.checkpoint.memory.slots import preallocate_slots
from edl.collective.job_records import JobState, World, prefix
from edl.errors import SettingsError

__all__ = ["join_job"]

_POLL_S = 0.1
_SILENT_S = 2.0
_PROVE_S = 20.0


def join_job(context: AgentContext) -> int | None:
    """Join the job. Returns the exit code where this node has no part in it.

    Raises:
        AskedToLeaveError: a signal came first.
        SettingsError: the job's other nodes run another script, or nothing can be stored where checkpoints shall be.
        DiscoveryError: the store does not answer.
        EDLError: the process that forks workers died, or took too long.
    """
    code = _too_late(context)
    if code == ExitCode.DONE:
        _store_what_was_left(context)
    if code is None and _is_left_out(context):
        code = ExitCode.FAULTY_NODE
    if code is None and context.spec.check is not None:
        code = _check(context, context.spec.check)
    if code is not None:
        return code
    _agree_on_script(context)
    context.persister.check_storage(_PROVE_S, context.signals.raise_if_stopping)
    with _said_after(_SILENT_S, context.say, f"importing what {Path(context.spec.warm.target).name} imports"):
        complaint = context.worker_group.warm_up()
    if complaint:
        context.say(f"{complaint}; each worker will import it by itself")
    context.signals.raise_if_stopping()
    _agree_on_script(context)  # once more: whoever came meanwhile saw nobody here yet
    _make_room(context)
    context.membership.join()
    context.shutdown.joined = True
    _inherit(context)
    context.persister.start()
    context.status.record_event("join", "ready")
    return None


def _too_late(context: AgentContext) -> int | None:
    """Whether the job has ended already: a late node has nothing to do. A failed job is started again."""
    deadline = time.monotonic() + 4 * context.spec.ttl_s
    while True:
        context.signals.raise_if_stopping()
        records = context.membership.read_records()
        world = records.world
        if world.state is JobState.DONE:
            context.say(f"job {context.spec.job} has ended already ({world.message}): nothing to do")
            context.say("another --rdzv-id starts another job")
            return ExitCode.DONE
        if world.state is not JobState.FAILED:
            return None
        if not records.nodes:
            context.membership.propose_world(World(world.generation, message="started again"), records.version)
        elif time.monotonic() > deadline:
            context.say(f"job {context.spec.job} has failed, and its nodes have not left yet: try again in a moment")
            return ExitCode.FAILED
        else:
            time.sleep(_POLL_S)


def _store_what_was_left(context: AgentContext) -> None:
    """The job has ended, but an agent on this host could not store its last state."""
    host = context.host
    if host.unstored and host.holds_state and host.run == JobRun(context.store, context.spec.job)():
        context.say(f"node {host.previous_owner} could not store the last state: it is stored now")
        context.persister.start()


def _is_left_out(context: AgentContext) -> bool:
    """Whether a GPU of this host failed in this job before, and nobody said since that the host is well again."""
    exclusions = Exclusions(context.store, context.spec.job, host_key())
    exclusion = exclusions.own_exclusion()
    if exclusion is None:
        return False
    if context.spec.readmit:
        exclusions.remove()
        context.say(f"this host is left out no more ({exclusion.reason})")
        return False
    context.say(
        f"job {context.spec.job} leaves this host out ({exclusion.reason}): {REMEDY}; "
        f"exit code {ExitCode.FAULTY_NODE:d}"
    )
    return True


def _agree_on_script(context: AgentContext) -> None:
    """A node with another script would stop the job's training, and have no part in it.

    A job that nobody runs any more may go on with whatever its user calls the script now.
    """
    spec, key = context.spec, prefix(context.spec.job) + "script"
    own = Path(spec.warm.target).name
    while True:
        context.signals.raise_if_stopping()
        entry = context.store.get(key)
        if entry is not None and entry.value.decode() == own:
            return
        if entry is not None and context.membership.read_records().nodes:
            raise SettingsError(
                f"job {spec.job} runs {entry.value.decode()}, and this is {own}: another --rdzv-id starts another job"
            )
        if context.store.compare_and_set(key, own.encode(), None if entry is None else entry.version) is not None:
            return


@contextmanager
def _said_after(seconds: float, say: Callable[[str], None], line: str) -> Iterator[None]:
    """Say `line` if the block takes longer than so many seconds."""
    timer = threading.Timer(seconds, say, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check(context: AgentContext, settings: NodeCheckSettings) -> int | None:
    """Test this node and others that wait. Returns the exit code of one that is faulty."""
    spec = context.spec
    settings = replace(settings, raise_if_stopping=context.signals.raise_if_stopping)
    found = check_before_joining(
        context.store, spec.job, context.id, spec.addr, max(1.0, spec.rules.last_call_s), settings, context.say
    )
    for name, why in found.slow.items():
        context.say(f"{'this node' if name == context.id else name} is slow: {why}")
    if context.id in found.faulty:
        context.say(
            f"this node is faulty: {found.faulty[context.id]}; it does not join, exit code {ExitCode.FAULTY_NODE:d}"
        )
        return ExitCode.FAULTY_NODE
    return None


def _make_room(context: AgentContext) -> None:
    """Have memory for the state that this node's workers will be given: the others will wait for that."""
    nbytes = max((node.slot_nbytes for node in context.membership.read_records().nodes.values()), default=0)
    if nbytes:
        for rank in range(context.spec.workers):
            preallocate_slots(Path(context.host.slots(rank)), nbytes)


def _inherit(context: AgentContext) -> None:
    """Say whether a state in memory, which an agent of this job left here, is used.

    One of another run of the job's name, whose records are gone from the store, would count as newer than it is. One of
    a job without a name is the state of another training, unless the same command left it.
    """
    host, run, command = context.host, JobRun(context.store, context.spec.job)(), context.spec.command
    if host.holds_state and host.run == run and host.command != command:
        host.forget_slots()
        context.say(
            f"node {host.previous_owner} left a state in memory, of another script or of other arguments: it is "
            "removed; with --rdzv-id NAME a job goes on whatever its arguments are"
        )
    elif host.holds_state and host.run == run:
        context.say(f"node {host.previous_owner} left its workers' state in memory here: it is used")
    elif host.holds_state:
        host.forget_slots()
        context.say(f"node {host.previous_owner} left a state in memory, of a job before this one: it is removed")
    host.run = run
    host.command = command
    host.unstored = False
