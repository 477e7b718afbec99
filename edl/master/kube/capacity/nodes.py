"""A node as capacity is counted: what it has, and who may use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edl.master.kube.capacity.amounts import Amounts, parse_allocatable
from edl.master.kube.capacity.placement import Taint

__all__ = ["NodeCapacity"]


@dataclass(frozen=True)
class NodeCapacity:
    """What a node has for pods.

    Attributes:
        name: of the node.
        allocatable: what it has for pods, in thousandths.
        labels: of the node.
        taints: that keep pods away.
        usable: whether new pods can start there at all: it is ready, not cordoned, and not being deleted.
    """

    name: str
    allocatable: Amounts
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    usable: bool

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> NodeCapacity:
        """Read a node.

        Raises:
            ValueError: a quantity is none of Kubernetes'.
        """
        metadata, spec, status = node.get("metadata") or {}, node.get("spec") or {}, node.get("status") or {}
        ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True"
            for condition in status.get("conditions") or ()
        )
        return cls(
            name=metadata.get("name", ""),
            allocatable=parse_allocatable(status.get("allocatable") or {}),
            labels=metadata.get("labels") or {},
            taints=Taint.read_all(spec),
            usable=ready and not spec.get("unschedulable") and not metadata.get("deletionTimestamp"),
        )
