"""Conditions of a resource, as Kubernetes has them: what holds, since when, why, and for which generation of `spec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edl.kube.objects import format_time

__all__ = ["Condition", "find_condition", "write_conditions"]


@dataclass(frozen=True)
class Condition:
    """Something that holds of a resource, or does not.

    Attributes:
        type: such as `Running`.
        status: it holds; None if that is not known.
        reason: CamelCase, for programs.
        message: for a person.
    """

    type: str
    status: bool | None
    reason: str
    message: str = ""


def write_conditions(
    before: Sequence[Mapping[str, Any]], conditions: Sequence[Condition], generation: int, now_s: float
) -> list[dict[str, Any]]:
    """Return conditions as `status.conditions` has them. A transition time is kept where the status stays the same.

    Conditions of `before` that are not named in `conditions` are left out.
    """
    former = {str(found.get("type")): found for found in before if isinstance(found, Mapping)}
    written = []
    for condition in conditions:
        status = "Unknown" if condition.status is None else str(condition.status)
        previous = former.get(condition.type, {})
        since = previous.get("lastTransitionTime") if previous.get("status") == status else None
        written.append(
            {
                "type": condition.type,
                "status": status,
                "reason": condition.reason,
                # Never empty: Kubernetes 1.20 makes null of an empty text in a status that was not there before.
                "message": condition.message or condition.reason,
                "lastTransitionTime": since or format_time(now_s),
                "observedGeneration": generation,
            }
        )
    return written


def find_condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition of a status; empty if it is not there."""
    conditions = status.get("conditions")
    for found in conditions if isinstance(conditions, list) else []:
        if isinstance(found, Mapping) and found.get("type") == kind:
            return found
    return {}
