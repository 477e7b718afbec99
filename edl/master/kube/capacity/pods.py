"""A pod as capacity is counted: what it asks for, where it is, and since when it waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from edl.master.kube.capacity.amounts import Amounts, pod_requests
from edl.master.kube.capacity.placement import PlacementRules

__all__ = ["PodClaim", "refuse_shapes"]

_ENDED: Final = frozenset({"Succeeded", "Failed"})
"""Phases in which a pod holds nothing any more."""


@contextmanager
def refuse_shapes() -> Iterator[None]:
    """Raise a ValueError where a field is not what the API has there: templates are read before the API server does.

    Raises:
        ValueError: such as for a text in the place of an object.
    """
    try:
        yield
    except (AttributeError, TypeError) as exc:
        raise ValueError(f"a field is not what the API has there: {exc}") from exc


@dataclass(frozen=True)
class PodClaim:
    """What a pod holds, or waits for.

    Attributes:
        uid: of the pod.
        namespace: of the pod.
        name: of the pod.
        labels: of the pod.
        requests: what it asks for, in thousandths.
        rules: where it may run.
        node: on which it is; "" while it has none.
        nominated_node: on which the scheduler makes room for it; "" for none.
        priority: its number; None where admission has not written it yet.
        created: when, as the API has it; earlier texts are earlier times.
        ended: whether its containers have ended for good: it holds nothing.
        deleting: whether it is being deleted: with a node it holds on until it is gone, without it asks for nothing.
        gated: whether the scheduler is told not to look at it yet.
    """

    uid: str
    namespace: str
    name: str
    labels: Mapping[str, str]
    requests: Amounts
    rules: PlacementRules
    node: str
    nominated_node: str
    priority: int | None
    created: str
    ended: bool
    deleting: bool
    gated: bool

    @classmethod
    def of(cls, pod: Mapping[str, Any]) -> PodClaim:
        """Read a pod, or a template of pods.

        Raises:
            ValueError: a quantity is none of Kubernetes', or a field is not what the API has there.
        """
        with refuse_shapes():
            return cls._read(pod)

    @classmethod
    def _read(cls, pod: Mapping[str, Any]) -> PodClaim:
        metadata, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
        priority = spec.get("priority")
        if priority is not None and not isinstance(priority, int):
            raise TypeError(f"priority {priority!r} is no whole number")
        return cls(
            uid=metadata.get("uid", ""),
            namespace=metadata.get("namespace", ""),
            name=metadata.get("name", ""),
            labels=metadata.get("labels") or {},
            requests=pod_requests(spec),
            rules=PlacementRules.of(spec),
            node=spec.get("nodeName") or "",
            nominated_node=status.get("nominatedNodeName") or "",
            priority=priority,
            created=metadata.get("creationTimestamp") or "",
            ended=status.get("phase") in _ENDED,
            deleting=bool(metadata.get("deletionTimestamp")),
            gated=bool(spec.get("schedulingGates")),
        )

    @property
    def waits(self) -> bool:
        """Whether the scheduler looks for a node for it."""
        return not (self.node or self.ended or self.deleting or self.gated)

    @cached_property
    def shape(self) -> str:
        """What it asks for and where it may run, as a text: equal for pods that fit on the same nodes."""
        return repr((sorted(self.requests.items()), self.rules))
