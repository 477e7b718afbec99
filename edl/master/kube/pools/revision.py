"""What a pool's teachers are made from, as a digest: which of them were made from a spec that has been edited since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Final

from edl.discovery.urls import identify_store
from edl.master.kube.members import MemberPod
from edl.master.kube.resources import TeacherPool

__all__ = ["REVISION_LABEL", "find_unlabelled_revision", "hash_place", "hash_revision", "list_outdated", "list_places"]

REVISION_LABEL: Final = "edl.io/revision"
_CHARS: Final = 10
"""Of the digest: 40 bits tell the specs of a pool apart."""
_PLACE_CHARS: Final = 16
"""Of the digest: 64 bits tell the places of a cluster apart."""
_UNKNOWN: Final = "unknown"
"""Revision of teachers without a label whose pool was edited while no operator looked: no spec has this digest."""


def hash_revision(pool: TeacherPool) -> str:
    """Return the digest of all that a teacher's pod is made from.

    What does not belong to it changes no pod: bounds, scaling, `probeSeconds`, another spelling of the store. Whatever
    else is counted here some day has all teachers of all pools replaced when the operator is upgraded.
    """
    parts = {
        "serve": list(pool.serve),
        "service": pool.service,
        "store": identify_store(pool.store),
        "template": pool.template,
        "priorityClassName": pool.priority_class_name,
        "gracePeriodSeconds": pool.grace_period_s,
        "queue": pool.queue,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:_CHARS]


def hash_place(pool: TeacherPool) -> str:
    """Return the digest of where students find a pool's teachers: the service, and the store in the one spelling."""
    place = json.dumps([identify_store(pool.store), pool.service])
    return hashlib.sha256(place.encode()).hexdigest()[:_PLACE_CHARS]


def list_places(pool: TeacherPool) -> frozenset[str]:
    """Return where teachers of a pool may be found: by its spec, and by specs before it, which its status keeps."""
    written = pool.status.get("servedPlaces")
    former = written if isinstance(written, list) else []
    return frozenset({hash_place(pool), *(place for place in former if isinstance(place, str))})


def find_unlabelled_revision(pool: TeacherPool, teachers: Iterable[MemberPod], revision: str) -> str | None:
    """Return the revision of teachers that an operator made which wrote none; None where there are no such.

    They count as up to date when they are first seen, and are outdated by the next edit; where the pool was edited
    since its status was written, they are outdated when they are first seen.
    """
    if all(pod.labels.get(REVISION_LABEL) for pod in teachers):
        return None
    before = pool.status.get("unlabelledRevision")
    if isinstance(before, str) and before:
        return before
    return revision if pool.status.get("observedGeneration") == pool.generation else _UNKNOWN


def list_outdated(teachers: Iterable[MemberPod], revision: str, unlabelled: str | None) -> tuple[MemberPod, ...]:
    """Return the teachers that were made from another spec than the present one."""
    return tuple(pod for pod in teachers if (pod.labels.get(REVISION_LABEL) or unlabelled) != revision)
