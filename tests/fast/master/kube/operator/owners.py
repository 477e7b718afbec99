"""Jobs and pools as the operator has read them."""

from __future__ import annotations

from typing import Any

from edl.master.kube.resources import ElasticJob, TeacherPool, parse_elastic_job, parse_teacher_pool

NOWHERE = "edl://nowhere:29400"


def make_job(name: str = "digits", *, uid: str = "", gpus: int = 0, pod: Any = None, **spec: Any) -> ElasticJob:
    """Return a job of namespace `lab`; `pod` is added to its template's spec."""
    limits = {"nvidia.com/gpu": gpus} if gpus else {}
    container = {"name": "main", "image": "i", "resources": {"limits": limits}}
    metadata = {
        "name": name,
        "namespace": "lab",
        "uid": uid or f"u-{name}",
        "creationTimestamp": "2023-11-14T00:00:00Z",
    }
    template = {"spec": {"containers": [container], **(pod or {})}}
    fields = {"run": ["t.py"], "store": NOWHERE, "template": template, **spec}
    job = parse_elastic_job({"metadata": metadata, "spec": fields, "status": {}}, fields["store"])
    assert isinstance(job, ElasticJob), job
    return job


def make_pool(namespace: str = "lab", day: int = 1, **spec: Any) -> TeacherPool:
    """Return a pool of service `digits` that was made on a day."""
    metadata = {"name": "p", "namespace": namespace, "uid": namespace, "creationTimestamp": f"2026-01-0{day}T00:00:00Z"}
    template = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
    fields = {"serve": ["m.py:f"], "service": "digits", "store": NOWHERE, "template": template, **spec}
    pool = parse_teacher_pool({"metadata": metadata, "spec": fields}, fields["store"])
    assert isinstance(pool, TeacherPool), pool
    return pool
