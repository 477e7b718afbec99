"""What a node does before it joins: it looks whether there is something to do, is tested, and imports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edl.collective.agent.checkpoint_persister import JobRun
from edl.collective.agent.context import Part
from edl.collective.agent.exit_codes import Exit
from edl.collective.agent.health.node_check.gate import check_before_joining
from edl.collective.agent.health.node_check.runner import NodeCheckSettings
from edl.collective.agent.membership.excluded_hosts import REMEDY, Exclusions, host_key
from edl.collective.checkpoint.memory.slots import make_room
from edl.collective.job_records import State, World, prefix
from edl.errors import SettingsError

__all__ = ["arrive"]

_POLL_S = 0.1
_SILENT_S = 2.0
_PROVE_S = 20.0


def arrive(part: Part) -> int | None:
    """Join the job. Returns the exit code where this node has no part in it.

    Raises:
        AskedToLeaveError: a signal came first.
        SettingsError: the job's other nodes run another script, or nothing can be stored where checkpoints shall be.
        DiscoveryError: the store does not answer.
        EDLError: the process that forks workers died, or took too long.
    """
    code = _too_late(part)
    if code == Exit.DONE:
        _store_what_was_left(part)
    if code is None and _is_left_out(part):
        code = Exit.FAULTY_NODE
    if code is None and part.told.check is not None:
        code = _check(part, part.told.check)
    if code is not None:
        return code
    _agree_on_script(part)
    part.storing.prove(_PROVE_S, part.signals.heed)
    with _said_after(_SILENT_S, part.say, f"importing what {Path(part.told.warm.target).name} imports"):
        complaint = part.crew.warm_up()
    if complaint:
        part.say(f"{complaint}; each worker will import it by itself")
    part.signals.heed()
    _agree_on_script(part)  # once more: whoever came meanwhile saw nobody here yet
    _make_room(part)
    part.membership.join()
    part.ending.joined = True
    _inherit(part)
    part.storing.begin()
    part.chronicle.tell("join", "ready")
    return None


def _too_late(part: Part) -> int | None:
    """Whether the job has ended already: a late node has nothing to do. A failed job is started again."""
    deadline = time.monotonic() + 4 * part.told.ttl_s
    while True:
        part.signals.heed()
        records = part.membership.read()
        world = records.world
        if world.state is State.DONE:
            part.say(f"job {part.told.job} has ended already ({world.message}): nothing to do")
            part.say("another --rdzv-id starts another job")
            return Exit.DONE
        if world.state is not State.FAILED:
            return None
        if not records.nodes:
            part.membership.propose(World(world.generation, message="started again"), records.version)
        elif time.monotonic() > deadline:
            part.say(f"job {part.told.job} has failed, and its nodes have not left yet: try again in a moment")
            return Exit.FAILED
        else:
            time.sleep(_POLL_S)


def _store_what_was_left(part: Part) -> None:
    """The job has ended, but an agent on this host could not store its last state."""
    host = part.host
    if host.unstored and host.holds_state and host.run == JobRun(part.store, part.told.job)():
        part.say(f"node {host.heir_of} could not store the last state: it is stored now")
        part.storing.begin()


def _is_left_out(part: Part) -> bool:
    """Whether a GPU of this host failed in this job before, and nobody said since that the host is well again."""
    exclusions = Exclusions(part.store, part.told.job, host_key())
    exclusion = exclusions.of_this_host()
    if exclusion is None:
        return False
    if part.told.readmit:
        exclusions.remove()
        part.say(f"this host is left out no more ({exclusion.reason})")
        return False
    part.say(f"job {part.told.job} leaves this host out ({exclusion.reason}): {REMEDY}; exit code {Exit.FAULTY_NODE:d}")
    return True


def _agree_on_script(part: Part) -> None:
    """A node with another script would stop the job's training, and have no part in it.

    A job that nobody runs any more may go on with whatever its user calls the script now.
    """
    told, key = part.told, prefix(part.told.job) + "script"
    own = Path(told.warm.target).name
    while True:
        part.signals.heed()
        entry = part.store.get(key)
        if entry is not None and entry.value.decode() == own:
            return
        if entry is not None and part.membership.read().nodes:
            raise SettingsError(
                f"job {told.job} runs {entry.value.decode()}, and this is {own}: another --rdzv-id starts another job"
            )
        if part.store.compare_and_set(key, own.encode(), None if entry is None else entry.version) is not None:
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


def _check(part: Part, settings: NodeCheckSettings) -> int | None:
    """Test this node and others that wait. Returns the exit code of one that is faulty."""
    told = part.told
    settings = replace(settings, heed=part.signals.heed)
    found = check_before_joining(
        part.store, told.job, part.id, told.addr, max(1.0, told.rules.last_call_s), settings, part.say
    )
    for name, why in found.slow.items():
        part.say(f"{'this node' if name == part.id else name} is slow: {why}")
    if part.id in found.faulty:
        part.say(f"this node is faulty: {found.faulty[part.id]}; it does not join, exit code {Exit.FAULTY_NODE:d}")
        return Exit.FAULTY_NODE
    return None


def _make_room(part: Part) -> None:
    """Have memory for the state that this node's workers will be given: the others will wait for that."""
    nbytes = max((node.slot_nbytes for node in part.membership.read().nodes.values()), default=0)
    if nbytes:
        for rank in range(part.told.workers):
            make_room(Path(part.host.slots(rank)), nbytes)


def _inherit(part: Part) -> None:
    """Say whether a state in memory, which an agent of this job left here, is used.

    One of another run of the job's name, whose records are gone from the store, would count as newer than it is. One of
    a job without a name is the state of another training, unless the same command left it.
    """
    host, run, command = part.host, JobRun(part.store, part.told.job)(), part.told.command
    if host.holds_state and host.run == run and host.command != command:
        host.forget_slots()
        part.say(
            f"node {host.heir_of} left a state in memory, of another script or of other arguments: it is removed; with "
            "--rdzv-id NAME a job goes on whatever its arguments are"
        )
    elif host.holds_state and host.run == run:
        part.say(f"node {host.heir_of} left its workers' state in memory here: it is used")
    elif host.holds_state:
        host.forget_slots()
        part.say(f"node {host.heir_of} left a state in memory, of a job before this one: it is removed")
    host.run = run
    host.command = command
    host.unstored = False
