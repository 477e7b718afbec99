"""Pods as the API has them, for tests."""

from __future__ import annotations

from typing import Any


def build_pod(name: str = "job-worker-0-0", **status: Any) -> dict[str, Any]:
    """Return the JSON of a member pod: index 0, try 0, of the owner `uid-of-owner`."""
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-of-{name}",
            "resourceVersion": "7",
            "creationTimestamp": "2026-03-01T12:00:00Z",
            "labels": {
                "edl.io/owner-uid": "uid-of-owner",
                "edl.io/role": "worker",
                "edl.io/index": "0",
                "edl.io/try": "0",
            },
            "ownerReferences": [{"kind": "ElasticJob", "uid": "uid-of-owner", "controller": True}],
        },
        "spec": {"containers": [{"name": "worker", "image": "i", "resources": {"limits": {"memory": "1Gi"}}}]},
        "status": {"phase": "Pending", **status},
    }


def build_ended(exit_code: int, message: str = "", reason: str = "Error", **status: Any) -> dict[str, Any]:
    """Return the JSON of a member pod whose container has ended."""
    terminated = {
        "exitCode": exit_code,
        "reason": reason,
        "message": message,
        "startedAt": "2026-03-01T12:00:10Z",
        "finishedAt": "2026-03-01T12:05:10Z",
    }
    pod = build_pod(phase="Failed" if exit_code else "Succeeded", **status)
    pod["spec"]["nodeName"] = "node1"
    pod["status"]["containerStatuses"] = [{"name": "worker", "state": {"terminated": terminated}}]
    return pod
