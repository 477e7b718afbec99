"""From a status to the next: a merge patch (RFC 7386) of what differs, and statuses that no planner writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edl.kube.objects import Object
from edl.master.kube.conditions import Condition, write_conditions
from edl.master.kube.resources import SpecProblem

__all__ = ["FORMER_SPEC", "build_merge_patch", "describe_refused_spec", "encode_status", "set_condition"]

FORMER_SPEC: Final = "formerSpec"
"""Field of a status: the spec cannot be worked on, and the operator goes on by the one before."""


def build_merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> Object:
    """Return the merge patch that makes `before` into `after`; empty if they are equal.

    A field of `after` that is None or an empty text is not there.
    """
    patch: Object = {}
    for name in [*after, *(name for name in before if name not in after)]:
        old, new = before.get(name), after.get(name)
        if _is_absent(new):
            if old is not None:
                patch[name] = None
        elif isinstance(old, Mapping) and isinstance(new, Mapping):
            if inner := build_merge_patch(old, new):
                patch[name] = inner
        elif _encode(old) != _encode(written := _keep_present(new)):  # which tells 1 from true
            patch[name] = written
    return patch


def encode_status(status: Mapping[str, Any]) -> str:
    """Return a status as a text, the same before it is written and when it is read again."""
    return _encode(_keep_present(status))


def _keep_present(value: Any) -> Any:
    """Return JSON without fields of objects that are null, which a merge patch would take for removals, or empty."""
    if isinstance(value, Mapping):
        return {name: _keep_present(inner) for name, inner in value.items() if not _is_absent(inner)}
    if isinstance(value, (list, tuple)):
        return [_keep_present(inner) for inner in value]
    return value


def _encode(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _is_absent(value: object) -> bool:
    """Whether a field is not written. API servers of 1.20 refuse an empty text as null where a schema wants a text."""
    return value is None or value == ""


def describe_refused_spec(
    before: Mapping[str, Any], problems: Sequence[SpecProblem], generation: int, now_s: float
) -> Object:
    """Return the status of a resource whose spec cannot be worked on: members and all else stay as they were."""
    message = "; ".join(problem.message for problem in problems)
    status = set_condition(before, Condition("Accepted", False, problems[0].reason, message), generation, now_s)
    phase = before.get("phase") or "Pending"
    return {**status, "observedGeneration": generation, "phase": phase, "message": message, FORMER_SPEC: None}


def set_condition(
    status: Mapping[str, Any],
    condition: Condition,
    generation: int,
    now_s: float,
    before: Mapping[str, Any] | None = None,
) -> Object:
    """Return a status in which a condition is as given, and the others as they were.

    The time of its last transition is that of `before`, the status as it was read; None for `status`.
    """
    written = write_conditions(_list_conditions(status if before is None else before), [condition], generation, now_s)
    others = [item for item in _list_conditions(status) if item.get("type") != condition.type]
    return {**status, "conditions": [*written, *others]}


def _list_conditions(status: Mapping[str, Any]) -> list[Object]:
    found = status.get("conditions")
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
