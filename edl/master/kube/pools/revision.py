"""What a pool's teachers are made from, as a digest: which of them were made from a spec that has been edited since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from edl.discovery.urls import identify_store
from edl.master.kube.members import MemberPod
from edl.master.kube.resources import TeacherPool

__all__ = ["REVISION_LABEL", "find_unlabelled_revision", "hash_revision", "list_outdated"]

REVISION_LABEL: Final = "edl.io/revision"
_CHARS: Final = 10
"""Of the digest: 40 bits tell the specs of a pool apart."""


def hash_revision(pool: TeacherPool) -> str:
    """Return the digest of all that a teacher's pod is made from.

    What does not belong to it changes no pod: bounds, scaling, `probeSeconds`, another spelling of the store. Whatever
    else is counted here some day has all teachers of all pools replaced when the operator is upgraded.

    Args:
        pool: whose teachers they are.
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


def find_unlabelled_revision(status: Mapping[str, Any], teachers: Iterable[MemberPod], revision: str) -> str | None:
    """Return the revision of teachers that an operator made which wrote none; None where there are no such.

    They count as up to date when they are first seen, and are outdated by the next edit.

    Args:
        status: of the pool, as it was written last.
        teachers: that are live.
        revision: of the spec as it is now.
    """
    if all(pod.labels.get(REVISION_LABEL) for pod in teachers):
        return None
    before = status.get("unlabelledRevision")
    return before if isinstance(before, str) and before else revision


def list_outdated(teachers: Iterable[MemberPod], revision: str, unlabelled: str | None) -> tuple[MemberPod, ...]:
    """Return the teachers that were made from another spec than the present one.

    Args:
        teachers: that are live.
        revision: of the spec as it is now.
        unlabelled: of teachers whose pod does not say its revision.
    """
    return tuple(pod for pod in teachers if (pod.labels.get(REVISION_LABEL) or unlabelled) != revision)
