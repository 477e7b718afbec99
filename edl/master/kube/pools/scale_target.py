"""A pool whose teachers are another object's pods, such as a Deployment of Triton's: only its `/scale` is moved."""

from __future__ import annotations

from collections.abc import Mapping

from edl.master.kube.members import MemberRecord
from edl.master.kube.observation import OwnerObservation
from edl.master.kube.plan import Plan
from edl.master.kube.pools.growth import Growth
from edl.master.kube.pools.pool_status import PoolView, describe_transitions, write_status
from edl.master.kube.pools.target import find_target
from edl.master.kube.resources import TeacherPool

__all__ = ["plan_scale_target"]


def plan_scale_target(
    pool: TeacherPool,
    observation: OwnerObservation,
    records: Mapping[str, MemberRecord],
    leaving: tuple[str, ...] = (),
) -> Plan:
    """Decide what an adopted object's `/scale` is to say. It is written only where it says something else.

    Its pods are not the pool's: they are neither made, probed nor removed one by one, and what is idle is not looked
    at. An autoscaler that writes the same `/scale` would be written over, and is not supported.

    `records` and `leaving` are of teachers of its own, which it had before.
    """
    ref, found = pool.scale_target_ref, observation.target
    present = None if found is None else found.replicas
    assert ref is not None
    target = find_target(pool, observation, present or 0)
    named = f"{ref.kind} {ref.name}"
    if observation.service_holder:
        target = present or 0  # not the pool's to end: its registrations are what is wrong
        growth = Growth(False, "ServiceTaken", f"{observation.service_holder} serves {pool.service} in the same store")
    elif present is None:
        growth = Growth(False, "TargetMissing", f"there is no {named} in this namespace")
    elif present < target:
        growth = Growth(True, "Scaling", f"{named} is scaled to {target}")
    elif target == pool.max_replicas:
        growth = Growth(False, "AtMaximum", "maxReplicas is reached")
    else:
        growth = Growth(False, "AtWanted", "no more teachers are wanted")
    replicas = present or 0
    view = PoolView(
        target=target,
        replicas=replicas,
        scheduled=replicas,
        ready=0 if found is None else found.ready,
        growth=growth,
        leaving=leaving,
        records=records,
    )
    return Plan(
        status=write_status(pool, observation, view),
        scale_target=target if present is not None and present != target else None,
        events=describe_transitions(pool, view),
    )
