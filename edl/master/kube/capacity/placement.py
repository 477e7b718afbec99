"""On which nodes a pod may run: node selector, required node affinity, taints and tolerations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["PlacementRules", "Taint"]

_REPELLING: Final = frozenset({"NoSchedule", "NoExecute"})
"""Effects that keep a pod away; `PreferNoSchedule` only makes a node less liked."""


@dataclass(frozen=True)
class Taint:
    """A taint that keeps pods away that do not tolerate it.

    Attributes:
        key: of the taint.
        value: of the taint.
        effect: `NoSchedule` or `NoExecute`.
    """

    key: str
    value: str
    effect: str

    @classmethod
    def read_all(cls, spec: Mapping[str, Any]) -> tuple[Taint, ...]:
        """Return the taints of a node that keep pods away."""
        found = (cls(t.get("key", ""), t.get("value") or "", t.get("effect", "")) for t in spec.get("taints") or ())
        return tuple(taint for taint in found if taint.effect in _REPELLING)

    def is_tolerated_by(self, toleration: Mapping[str, Any]) -> bool:
        """Return whether a toleration of a pod allows this taint."""
        if toleration.get("effect") not in (None, "", self.effect):
            return False
        key = toleration.get("key") or ""
        if toleration.get("operator") == "Exists":
            return key in ("", self.key)
        return bool(key == self.key and (toleration.get("value") or "") == self.value)


@dataclass(frozen=True)
class PlacementRules:
    """Where a pod may run, as its spec says.

    Attributes:
        selector: `nodeSelector`.
        terms: `nodeSelectorTerms` of the required node affinity: any of them is enough; None where there is none.
        tolerations: of the pod.
    """

    selector: Mapping[str, str]
    terms: tuple[Mapping[str, Any], ...] | None
    tolerations: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> PlacementRules:
        """Return the rules of a pod."""
        affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
        return cls(
            selector=spec.get("nodeSelector") or {},
            terms=None if required is None else tuple(required.get("nodeSelectorTerms") or ()),
            tolerations=tuple(spec.get("tolerations") or ()),
        )

    def allow(self, name: str, labels: Mapping[str, str], taints: tuple[Taint, ...]) -> bool:
        """Return whether a pod with these rules may run on a node."""
        if any(labels.get(key) != value for key, value in self.selector.items()):
            return False
        if self.terms is not None and not any(_is_met(term, name, labels) for term in self.terms):
            return False
        return all(any(taint.is_tolerated_by(toleration) for toleration in self.tolerations) for taint in taints)


def _is_met(term: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> bool:
    """Return whether all requirements of a term are met; a term without any matches no node."""
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_holds(rule, labels) for rule in expressions) and all(
        _holds(rule, {"metadata.name": name}) for rule in fields
    )


def _holds(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a requirement holds; one with an operator that is not known does not."""
    check = _OPERATORS.get(rule.get("operator", ""))
    return check is not None and check(labels.get(rule.get("key", "")), rule.get("values") or [])


def _compare(value: str | None, values: list[str]) -> int | None:
    """Return the sign of a label's number less the rule's; None where either is none."""
    try:
        difference = int(value or "") - int(values[0])
    except (ValueError, IndexError):
        return None
    return (difference > 0) - (difference < 0)


_OPERATORS: Final[Mapping[str, Callable[[str | None, list[str]], bool]]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": lambda value, values: _compare(value, values) == 1,
    "Lt": lambda value, values: _compare(value, values) == -1,
}
"""https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#operators"""
