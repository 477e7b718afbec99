"""What a node does before it joins: it looks whether there is something to do, is tested, and imports."""

from __future__ import annotations

import time
from dataclasses import replace

from edl.collective.agent.checking import check_before_joining
from edl.collective.agent.exits import Exit
from edl.collective.agent.nodecheck_run import CheckSettings
from edl.collective.agent.part import Part
from edl.collective.agent.world import State, World

__all__ = ["arrive"]

_POLL_S = 0.1


def arrive(part: Part) -> int | None:
    """Join the job. Returns the exit code where this node has no part in it.

    Raises:
        AskedToLeaveError: a signal came first.
        DiscoveryError: the store does not answer.
        EDLError: the process that forks workers died, or took too long.
    """
    code = _too_late(part)
    if code is None and part.told.check is not None:
        code = _check(part, part.told.check)
    if code is not None:
        return code
    complaint = part.crew.warm_up()
    if complaint:
        part.say(f"{complaint}; each worker will import it by itself")
    part.signals.heed()
    part.membership.join()
    part.ending.joined = True
    _inherit(part)
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


def _check(part: Part, settings: CheckSettings) -> int | None:
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


def _inherit(part: Part) -> None:
    """Say whether a state in memory, which an agent of this job left when it died, is used."""
    heir_of = part.host.heir_of
    if not heir_of:
        return
    if part.membership.read().world.generation >= 0:
        part.say(f"node {heir_of} died here, and left its workers' state in memory: it is used")
    else:
        part.host.forget_slots()  # of a job that this store knows nothing of
        part.say(f"node {heir_of} left a state in memory, of a job before this one: it is removed")
