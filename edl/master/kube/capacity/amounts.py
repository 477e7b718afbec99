"""Amounts of resources as whole thousandths, so that sums are exact and comparisons cheap.

A thousandth is the smallest part that Kubernetes schedules by (a CPU's `1m`); memory and extended resources come in
whole numbers, which a thousandth holds as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from edl.kube.quantity import parse_quantity

__all__ = ["ONE", "PODS", "Amounts", "add_amounts", "parse_allocatable", "parse_requests", "pod_requests"]

Amounts = Mapping[str, int]
"""Resource name -> thousandths."""

ONE: Final = 1000
"""A whole one of a resource."""
PODS: Final = "pods"
"""The resource of which every pod takes one, without asking for it."""


def parse_allocatable(quantities: Mapping[str, Any]) -> Amounts:
    """Return what a node has, rounded down.

    Raises:
        ValueError: a quantity is none of Kubernetes'.
    """
    return {name: math.floor(parse_quantity(value) * ONE) for name, value in quantities.items()}


def parse_requests(resources: Mapping[str, Any]) -> dict[str, int]:
    """Return what a container asks for, rounded up; a limit without a request is a request, as the API server has it.

    Raises:
        ValueError: a quantity is none of Kubernetes'.
    """
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: math.ceil(parse_quantity(value) * ONE) for name, value in asked.items()}


def add_amounts(total: dict[str, int], more: Amounts, sign: int = 1) -> None:
    """Add amounts to a total, in place."""
    for name, amount in more.items():
        total[name] = total.get(name, 0) + sign * amount


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """Return what a pod asks its node for, as the scheduler counts it.

    Containers run together, and so do init containers that are restarted for ever (sidecars); other init containers run
    one after another before, beside the sidecars that are started already. So a pod asks for the larger of the two, and
    the overhead of its runtime class. What `spec.resources` asks for the pod as a whole replaces the sum:
    https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers.

    Raises:
        ValueError: a quantity is none of Kubernetes'.
    """
    running: dict[str, int] = {}
    before: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        requests = parse_requests(container.get("resources") or {})
        if container.get("restartPolicy") == "Always":
            add_amounts(running, requests)
            _raise_to(before, running)
        else:
            add_amounts(requests, running)
            _raise_to(before, requests)
    for container in spec.get("containers") or ():
        add_amounts(running, parse_requests(container.get("resources") or {}))
    _raise_to(running, before)
    running.update(parse_requests(spec.get("resources") or {}))
    add_amounts(running, parse_requests({"requests": spec.get("overhead") or {}}))
    running[PODS] = ONE
    return {name: amount for name, amount in running.items() if amount > 0}


def _raise_to(amounts: dict[str, int], other: Amounts) -> None:
    for name, amount in other.items():
        amounts[name] = max(amounts.get(name, 0), amount)
