"""Nodes and pods as the API server has them."""

from __future__ import annotations

import itertools
from typing import Any

_uids = itertools.count(1)


def node(name: str = "n1", gpus: int = 2, **fields: Any) -> dict[str, Any]:
    """Return a node that is ready. `fields`: labels, taints, unschedulable, ready ("True"), cpu, memory, pods."""
    status = fields.get("ready", "True")
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **fields.get("labels", {})}},
        "spec": {"taints": fields.get("taints", []), "unschedulable": fields.get("unschedulable", False)},
        "status": {
            "allocatable": {
                "cpu": fields.get("cpu", "8"),
                "memory": fields.get("memory", "32Gi"),
                "pods": fields.get("pods", "110"),
                "nvidia.com/gpu": str(gpus),
            },
            "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": status}],
        },
    }


def pod(gpus: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a pod. `fields`: name, node, nominated, phase, priority, created, deleting, labels, requests, spec."""
    number = next(_uids)
    requests = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    metadata: dict[str, Any] = {
        "name": fields.get("name", f"pod-{number}"),
        "namespace": fields.get("namespace", "default"),
        "uid": fields.get("uid", f"uid-{number}"),
        "labels": fields.get("labels", {}),
        "creationTimestamp": fields.get("created", "2026-01-01T00:00:00Z"),
    }
    if fields.get("deleting"):
        metadata["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    spec: dict[str, Any] = {
        "containers": [{"name": "main", "resources": {"requests": {**requests, **fields.get("requests", {})}}}],
        **fields.get("spec", {}),
    }
    if "node" in fields:
        spec["nodeName"] = fields["node"]
    if "priority" in fields:
        spec["priority"] = fields["priority"]
    status: dict[str, Any] = {"phase": fields.get("phase", "Running" if "node" in fields else "Pending")}
    if "nominated" in fields:
        status["nominatedNodeName"] = fields["nominated"]
    return {"metadata": metadata, "spec": spec, "status": status}
