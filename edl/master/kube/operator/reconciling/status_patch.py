"""From a status to the next: a merge patch (RFC 7386) of what differs, and statuses that no planner writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edl.kube.objects import Object
from edl.master.kube.conditions import Condition, write_conditions
from edl.master.kube.resources import SpecProblem

__all__ = ["build_merge_patch", "describe_refused_spec", "set_condition"]


def build_merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Object:
    """Return the merge patch that makes `before` into `after`; empty if they are equal.

    Args:
        before: as it was read.
        after: as it is to be; a field that is None is not there.
    """
    patch: Object = {}
    for name in [*after, *(name for name in before if name not in after)]:
        old, new = before.get(name), after.get(name)
        if new is None:
            if old is not None:
                patch[name] = None
        elif isinstance(old, Mapping) and isinstance(new, Mapping):
            if inner := build_merge_patch(old, new):
                patch[name] = inner
        elif old != new or isinstance(old, bool) != isinstance(new, bool):
            patch[name] = without_none(new)
    return patch


def without_none(value: Any) -> Any:
    """Return JSON without the fields of objects that are null, which a merge patch would take for removals.

    Args:
        value: the JSON.
    """
    if isinstance(value, Mapping):
        return {name: without_none(inner) for name, inner in value.items() if inner is not None}
    return value


def describe_refused_spec(
    before: Mapping[str, Any], problems: Sequence[SpecProblem], generation: int, now_s: float
) -> Object:
    """Return the status of a resource whose spec cannot be worked on: members and all else stay as they were.

    Args:
        before: the status until now.
        problems: what is wrong with the spec, at least one.
        generation: of the spec.
        now_s: the time, in seconds since 1970.
    """
    message = "; ".join(problem.message for problem in problems)
    status = set_condition(before, Condition("Accepted", False, problems[0].reason, message), generation, now_s)
    return {**status, "observedGeneration": generation, "phase": before.get("phase") or "Pending", "message": message}


def set_condition(status: Mapping[str, Any], condition: Condition, generation: int, now_s: float) -> Object:
    """Return a status in which a condition is as given, and the others as they were.

    Args:
        status: until now.
        condition: that is new.
        generation: of the spec that it speaks of.
        now_s: the time, in seconds since 1970.
    """
    found = status.get("conditions")
    before = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    written = write_conditions(before, [condition], generation, now_s)
    others = [item for item in before if item.get("type") != condition.type]
    return {**status, "conditions": [*written, *others]}
